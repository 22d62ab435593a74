package idstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// File is the Store of one host: ids.json in a folder, which all processes that
// use the folder share, whatever their lines are. It is written anew, synced and
// renamed, under a lock on ids.lock.
type File struct {
	dir   string
	lines disaggid.Block
}

// marks is what ids.json holds.
type marks struct {
	// Mark is the Unix time in ms below which id-time may have been used.
	Mark int64 `json:"mark"`
}

// lockAgain is the time between two tries to get the lock, which its holder has
// for one write.
const lockAgain = 5 * time.Millisecond

// NewFile returns the store in a folder that exists, for the given lines; the
// block's times mean nothing.
func NewFile(dir string, lines disaggid.Block) *File { return &File{dir: dir, lines: lines} }

// Reserve implements Store.
func (f *File) Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error) {
	unlock, err := f.lock(ctx)
	if err != nil {
		return disaggid.Block{}, err
	}
	defer unlock()
	path := filepath.Join(f.dir, "ids.json")
	mark, err := readMark(path)
	if err != nil {
		return disaggid.Block{}, err
	}
	b := f.lines
	if b.From, b.Until, err = block(now, mark, width); err != nil {
		return disaggid.Block{}, err
	}
	return b, writeMark(path, b.Until)
}

// Close implements Store.
func (f *File) Close(context.Context) error { return nil }

// lock waits for the lock and returns what ends it.
func (f *File) lock(ctx context.Context) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(f.dir, "ids.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil // with it goes the lock
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", file.Name(), err)
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("lock %s: another process has it: %w", file.Name(), context.Cause(ctx))
		case <-time.After(lockAgain):
		}
	}
}

// readMark is the mark of a file, 0 without one.
func readMark(path string) (int64, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var m marks
	if err := json.Unmarshal(text, &m); err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	if m.Mark < disaggid.Epoch || m.Mark > disaggid.End {
		return 0, fmt.Errorf("read %s: mark %d is outside of id-time", path, m.Mark)
	}
	return m.Mark, nil
}

// writeMark makes the file hold mark, whole and on the disk.
func writeMark(path string, mark int64) error {
	text, err := json.Marshal(marks{mark})
	if err != nil {
		return err
	}
	next := path + ".new"
	file, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(text, '\n'))
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
