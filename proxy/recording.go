package proxy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// openRecording opens an empty file at path for a recording. One that has lines, or
// that a process is recording to, first gets the name of its last change, such as
// trace.jsonl.20260102T150405.678Z: the times and hashes of two recordings have
// nothing in common, and who records goes on with the file that it has open. What is
// not a file, such as a pipe, is written to as it is.
func openRecording(path string) (*os.File, error) {
	for range 10 { // others may do the same now
		// The operator names the file, which may be a link: O_NOFOLLOW is for names that
		// others can guess.
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err == nil && !info.Mode().IsRegular() {
			return f, nil
		}
		if err == nil {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) // until it is closed
		}
		free := !errors.Is(err, syscall.EWOULDBLOCK)
		if free && err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		now, err := os.Stat(path)
		moved := err != nil || !os.SameFile(now, info) // by another, between the two
		if free && !moved && now.Size() == 0 {
			return f, nil
		}
		f.Close()
		if !moved {
			err = setAside(path, now.ModTime())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s is renamed by others again and again", path)
}

// setAside renames a recording by the time of its last change, or the next that is
// free.
func setAside(path string, changed time.Time) error {
	for ; ; changed = changed.Add(time.Millisecond) {
		name := path + "." + changed.UTC().Format("20060102T150405.000Z")
		if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			return os.Rename(path, name)
		} else if err != nil {
			return err
		}
	}
}
