package idstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// File is the Store of one host: ids.json in a directory. All processes that use the
// directory share it. Under a lock on ids.lock the file is written, synced and renamed.
type File struct {
	dir   *privatedir.Dir
	lines disaggid.Block
}

// marks is the content of ids.json.
type marks struct {
	// Mark is the Unix time in ms below which id-time may be used already.
	Mark int64 `json:"mark"`
}

// lockAgain is the pause between two attempts to lock. A holder has the lock for one
// write.
const lockAgain = 5 * time.Millisecond

// NewFile returns the store in a folder, for the given lines; the block's times mean
// nothing.
func NewFile(dir *privatedir.Dir, lines disaggid.Block) *File { return &File{dir: dir, lines: lines} }

// Reserve implements Store.
func (f *File) Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error) {
	unlock, err := f.lock(ctx)
	if err != nil {
		return disaggid.Block{}, err
	}
	defer unlock()
	mark, err := f.readMark()
	if err != nil {
		return disaggid.Block{}, err
	}
	b := f.lines
	if b.From, b.Until, err = block(now, mark, width); err != nil {
		return disaggid.Block{}, err
	}
	return b, f.writeMark(b.Until)
}

// Close implements Store.
func (f *File) Close(context.Context) error { return nil }

// lock waits for the lock and returns the function that releases it.
func (f *File) lock(ctx context.Context) (unlock func(), err error) {
	for {
		lock, err := f.dir.TryLock("ids.lock")
		if err == nil {
			return lock.Unlock, nil
		}
		var locked *privatedir.LockedError
		if !errors.As(err, &locked) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, context.Cause(ctx))
		case <-time.After(lockAgain):
		}
	}
}

// markFile is the name of the file that holds the mark.
const markFile = "ids.json"

// readMark returns the mark of the directory, 0 if there is none.
func (f *File) readMark() (int64, error) {
	text, err := f.dir.ReadFile(markFile, 1024)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var m marks
	if err := json.Unmarshal(text, &m); err != nil {
		return 0, fmt.Errorf("read %s: %w", f.dir.Path(markFile), err)
	}
	if m.Mark < disaggid.Epoch || m.Mark > disaggid.End {
		return 0, fmt.Errorf("read %s: mark %d is outside of id-time", f.dir.Path(markFile), m.Mark)
	}
	return m.Mark, nil
}

// writeMark writes the mark atomically and syncs it to disk.
func (f *File) writeMark(mark int64) error {
	text, err := json.Marshal(marks{mark})
	if err != nil {
		return err
	}
	return f.dir.WriteFile(markFile, append(text, '\n'))
}
