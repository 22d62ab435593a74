package recording

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// openFile opens an empty file at path for a recording. A file that has lines, or that
// another process is recording to, is first renamed to the time of its last change, such
// as trace.jsonl.20260102T150405.678Z: the times and hashes of two recordings cannot be
// compared. The other process continues to write to its open file. A path that is not a
// regular file, such as a pipe, is opened without renaming.
func openFile(path string) (*os.File, error) {
	for range 10 { // other processes may rename the file at the same time
		// The operator names the file, which may be a link: O_NOFOLLOW is for names that
		// an attacker can guess.
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
		moved := err != nil || !os.SameFile(now, info) // another process has renamed the file since it was opened
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
	return nil, fmt.Errorf("other processes rename %s repeatedly", path)
}

// setAside renames a recording to the time of its last change, or to the next
// millisecond whose name is free.
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
