// Package registrations keeps the registrations that a process has received in a file, so that the
// next process has them at its start: a successor, or a new process after a crash.
//
// In a directory one process at a time accepts registrations of a kind: the one that
// holds the lock of the kind. It writes the file every second, and a last time when it
// releases the lock. In the meantime other processes read the file, and expire nothing:
// an entry that has ended in the file may have been renewed since. The process that gets
// the lock continues from the last file, and each entry ends when it would have ended
// there.
//
// The decisions behind this package are in docs/design/engines.md.
package registrations

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	// WriteEvery is how often the process that accepts registrations calls Write.
	WriteEvery = time.Second
	// readEvery is the interval at which other processes read the file and the lock.
	readEvery = 20 * time.Millisecond
	// completeAfter is the time in which all running engines register: they register
	// every few seconds. A file that is older than this time may lack engines. So may a
	// file whose writer has had the lock for less than this time.
	completeAfter = 5 * time.Second
)

// Store is one process's access to the registrations of one kind. All methods except
// Complete must be called by one goroutine.
type Store struct {
	dir         *privatedir.Dir
	name        string
	log         *slog.Logger
	lock        *privatedir.Lock // nil: another process has it
	since       time.Time        // when this process got the lock
	complete    atomic.Bool
	last        []byte // the file as last read
	lastProblem string // the problem that was logged last
}

// New returns the store of the registrations of a kind in a directory. Without a
// directory (nil) there is no file and no other process. New opens nothing.
func New(dir *privatedir.Dir, kind string, log *slog.Logger) *Store {
	return &Store{dir: dir, name: "registered-" + kind, log: log}
}

// OnChange returns a function that calls found with a list, at its first call and whenever the list has
// changed since its last call.
func OnChange[T comparable](list func() []T, found func([]T)) func() {
	var last []T
	called := false
	return func() {
		if now := list(); !called || !slices.Equal(now, last) {
			last, called = now, true
			found(now)
		}
	}
}

// Complete reports whether all present engines are known, by the file, or because they
// had time to register. It is safe for concurrent use.
func (r *Store) Complete() bool { return r.complete.Load() }

// Acquire waits until this process may accept registrations, and returns the
// registrations that have not ended. False: ctx has ended before. While Acquire waits, it
// calls shown whenever the registrations of the other process change.
func (r *Store) Acquire(ctx context.Context, shown func([]Entry)) (entries []Entry, ok bool) {
	if r.dir == nil {
		return nil, ctx.Err() == nil
	}
	tick := time.NewTicker(readEvery)
	defer tick.Stop()
	for {
		if ctx.Err() != nil {
			return nil, false
		}
		if r.tryLock() {
			break
		}
		r.readChanged(shown)
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	now := time.Now()
	r.last, r.since = nil, now
	r.readChanged(func(list []Entry) { entries = slices.DeleteFunc(list, func(e Entry) bool { return e.Left(now) <= 0 }) })
	return entries, true
}

// Follow calls shown with another process's registrations whenever they change, until
// ctx ends.
func (r *Store) Follow(ctx context.Context, shown func([]Entry)) {
	if r.dir == nil {
		<-ctx.Done()
		return
	}
	tick := time.NewTicker(WriteEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.readChanged(shown)
		}
	}
}

// Write writes the entries to the file. Only the process that has the lock may write. In
// other processes Write does nothing.
func (r *Store) Write(entries []Entry) {
	if r.lock == nil {
		return
	}
	if time.Since(r.since) >= completeAfter {
		r.complete.Store(true)
	}
	b, left := encode(entries, r.Complete(), time.Now())
	err := r.dir.WriteFileNoSync(r.name, b)
	if err == nil && left > 0 {
		err = errors.New("there are too many")
	}
	r.note(err)
}

// Release writes the entries and lets another process accept registrations.
func (r *Store) Release(entries []Entry) {
	r.Write(entries)
	r.lock.Unlock()
	r.lock = nil
}

// tryLock reports whether this process has the lock.
func (r *Store) tryLock() bool {
	if _, held, _ := r.dir.LockHolder(r.name + ".lock"); held { // TryLock returns the same error
		return false
	}
	lock, err := r.dir.TryLock(r.name + ".lock")
	var locked *privatedir.LockedError
	if err != nil && !errors.As(err, &locked) {
		r.note(err)
	}
	r.lock = lock
	return err == nil
}

// readChanged reads the file, and calls shown if it has changed and is valid.
func (r *Store) readChanged(shown func([]Entry)) {
	b, err := r.read()
	if errors.Is(err, fs.ErrNotExist) || err == nil && r.last != nil && bytes.Equal(b, r.last) {
		return
	}
	var f file
	if err == nil {
		r.last = b
		f, err = decode(b)
	}
	if r.note(err); err != nil {
		return
	}
	age := time.Since(time.UnixMilli(f.written))
	r.complete.Store(f.whole && age > -completeAfter && age < completeAfter)
	shown(f.entries)
}

func (r *Store) read() ([]byte, error) {
	f, err := r.dir.OpenFile(r.name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f)
}

// note logs a problem once, until it changes or ends.
func (r *Store) note(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != r.lastProblem && err != nil {
		r.log.Warn("the registrations may be lost at the end of this process, or those of the last process are unknown", "file", r.name, "error", err)
	}
	r.lastProblem = text
}
