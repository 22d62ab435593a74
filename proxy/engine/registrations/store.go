// Package registrations keeps who has registered with a process in a file, so that the
// next one knows them at once: a successor, or who comes after a crash.
//
// In a directory one process at a time takes registrations, the one that holds the
// lock of their kind. It writes the file every second and a last time when it
// leaves. Others read it meanwhile, and judge nothing by themselves: a record that
// has run out in the file may have been renewed since. Who gets the lock goes on
// from what the file said last, and each record ends when it would have ended
// there.
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
	// WriteEvery is how often who takes registrations calls Write.
	WriteEvery = time.Second
	// readEvery is how often others look at the file and the lock.
	readEvery = 20 * time.Millisecond
	// allAfter is the time in which all register who are there: they say so every few
	// seconds. An older file may lack some, and so may one that was begun later.
	completeAfter = 5 * time.Second
)

// Store is one process's part in the registrations of one kind. Its methods but
// Complete are called by one goroutine.
type Store struct {
	dir         *privatedir.Dir
	name        string
	log         *slog.Logger
	lock        *privatedir.Lock // nil: another has it
	since       time.Time        // when it became this one's
	complete    atomic.Bool
	last        []byte // the file as it was read last
	lastProblem string // the problem that was logged last
}

// New returns the store of the registrations of a kind in a directory, nil for none: it has no file then,
// and no others. It opens nothing.
func New(dir *privatedir.Dir, kind string, log *slog.Logger) *Store {
	return &Store{dir: dir, name: "registered-" + kind, log: log}
}

// Complete reports whether all who are there are known, as far as anybody can know: by
// the file, or because there was time for them to register. Safe for concurrent use.
func (r *Store) Complete() bool { return r.complete.Load() }

// Acquire waits until this process is the one that takes registrations and returns
// what was registered until then and has not run out; false when ctx ends before.
// Meanwhile shown is called with what another has, as often as that changes.
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

// Follow calls shown with what another has, as often as that changes, until ctx
// ends.
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

// Write keeps the entries in the file. Only who has taken registrations may.
func (r *Store) Write(entries []Entry) {
	if r.lock == nil {
		return
	}
	if time.Since(r.since) >= completeAfter {
		r.complete.Store(true)
	}
	b, left := encode(entries, r.Complete(), time.Now())
	err := r.dir.WriteFileNoSync(r.name+".json", b)
	if err == nil && left > 0 {
		err = errors.New("there are too many")
	}
	r.note(err)
}

// Release writes the entries and lets another process take registrations.
func (r *Store) Release(entries []Entry) {
	r.Write(entries)
	r.lock.Unlock()
	r.lock = nil
}

// tryLock reports whether the lock is this process's.
func (r *Store) tryLock() bool {
	if _, held, _ := r.dir.LockHolder(r.name + ".lock"); held { // an error is TryLock's too
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

// look reads the file, and calls shown if it has changed and can be used.
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
	age := time.Since(time.UnixMilli(f.Written))
	r.complete.Store(f.Whole && age > -completeAfter && age < completeAfter)
	shown(f.Entries)
}

func (r *Store) read() ([]byte, error) {
	f, err := r.dir.OpenFile(r.name+".json", os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f)
}

// note logs what goes wrong, once until it changes or is over.
func (r *Store) note(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != r.lastProblem && err != nil {
		r.log.Warn("registrations may not outlive this process, or are not known from the one before", "file", r.name, "error", err)
	}
	r.lastProblem = text
}
