package registrations

import (
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// Limits of the file.
const (
	maxEntries = 16 << 10
	maxEntry   = 80 << 10 // the strings of one entry, in bytes
	maxFile    = 32 << 20
)

// Entry is one registration as received.
type Entry struct {
	Key   string // if the registration has one
	Value []byte
	Peer  string // address of the registering peer
	Born  int64  // increases from entry to entry, if the order matters
	// TTL is the time that an entry lasts without renewal, and Until its end, both in
	// milliseconds, Until since 1970. 0: no end.
	TTL   int64
	Until int64
}

// End sets an entry's times. ttl is the total time of the entry, left is the remaining
// time from now on.
func (e *Entry) End(now time.Time, ttl, left time.Duration) {
	e.TTL, e.Until = max(1, ttl.Milliseconds()), max(1, now.Add(left).UnixMilli())
}

// Left returns the remaining time of an entry. The result is at most TTL, even if the
// clock was set back. After the end of the entry the result is 0 or negative.
func (e Entry) Left(now time.Time) time.Duration {
	if e.Until == 0 {
		return math.MaxInt64
	}
	return time.Duration(min(e.Until-now.UnixMilli(), e.TTL)) * time.Millisecond
}

func (e Entry) size() int { return len(e.Key) + len(e.Value) + len(e.Peer) }

// file is the content of the file.
type file struct {
	written int64 // milliseconds since 1970
	whole   bool  // all engines had time to register
	entries []Entry
}

// encode encodes the file. It returns the number of entries that did not fit.
func encode(entries []Entry, whole bool, now time.Time) (b []byte, left int) {
	const overhead = 64 // of one entry, in bytes: its numbers and lengths
	f := &fleetpb.Registrations{WrittenMs: now.UnixMilli(), Whole: whole}
	room := maxFile - overhead
	for _, e := range entries {
		if e.size() > maxEntry || e.size()+overhead > room || len(f.Entries) == maxEntries {
			left++
			continue
		}
		room -= e.size() + overhead
		f.Entries = append(f.Entries, &fleetpb.Registration{Key: e.Key, Value: e.Value, Peer: e.Peer, Born: e.Born, TtlMs: e.TTL, UntilMs: e.Until})
	}
	return fleetpb.Append(nil, f), left
}

func readAll(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = errors.New("read registrations: the file is too long")
	}
	return b, err
}

// decode decodes a file. It ignores what a later version wrote in addition.
func decode(b []byte) (file, error) {
	var m fleetpb.Registrations
	if fleetpb.Unmarshal(b, &m, maxEntries) != nil || m.WrittenMs <= 0 {
		return file{}, errors.New("read registrations: it is not a file of registrations")
	}
	f := file{written: m.WrittenMs, whole: m.Whole}
	for n, in := range m.Entries {
		e := Entry{Key: in.Key, Value: in.Value, Peer: in.Peer, Born: in.Born, TTL: in.TtlMs, Until: in.UntilMs}
		// Registrations may ask for at most 2^31 s.
		const longest = int64(1<<31) * 1000
		if e.size() > maxEntry || e.Born < 0 || e.Until < 0 || e.TTL < 0 || e.TTL > longest || (e.TTL == 0) != (e.Until == 0) {
			return file{}, fmt.Errorf("read registrations: entry %d is invalid", n)
		}
		f.entries = append(f.entries, e)
	}
	return f, nil
}
