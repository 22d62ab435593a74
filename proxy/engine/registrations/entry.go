package registrations

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"
)

// version is that of the file.
const version = 1

// Limits of the file.
const (
	maxEntries = 16 << 10
	maxEntry   = 80 << 10 // the texts of one, in bytes
	maxFile    = 32 << 20
)

// Entry is one registration, as it came.
type Entry struct {
	Key   string `json:"key,omitempty"` // where it has one
	Value []byte `json:"value"`
	Peer  string `json:"peer,omitempty"` // the address that it came from
	Born  int64  `json:"born,omitempty"` // grows from one to the next, where that matters
	// TTL is how long it lasts without being renewed and Until when it ends, both in
	// milliseconds, Until since 1970. 0: for ever.
	TTL   int64 `json:"ttl,omitempty"`
	Until int64 `json:"until,omitempty"`
}

// End sets what an entry lasts: ttl in all, and left from now on.
func (e *Entry) End(now time.Time, ttl, left time.Duration) {
	e.TTL, e.Until = max(1, ttl.Milliseconds()), max(1, now.Add(left).UnixMilli())
}

// Left is how long an entry still lasts: not longer than it may at all, whatever
// has become of the clock. It is not positive when it has run out.
func (e Entry) Left(now time.Time) time.Duration {
	if e.Until == 0 {
		return math.MaxInt64
	}
	return time.Duration(min(e.Until-now.UnixMilli(), e.TTL)) * time.Millisecond
}

func (e Entry) size() int { return len(e.Key) + len(e.Value) + len(e.Peer) }

// written is at most what an entry takes of the file: a character may become six,
// three bytes become four.
func (e Entry) written() int { return 6*(len(e.Key)+len(e.Peer)) + 4*len(e.Value)/3 + 200 }

// file is what is written.
type file struct {
	Version int     `json:"version"`
	Written int64   `json:"written"` // milliseconds since 1970
	Whole   bool    `json:"whole"`   // there has been time for all to register
	Entries []Entry `json:"entries"`
}

// encode makes the file, and tells how many entries it has no room for.
func encode(entries []Entry, whole bool, now time.Time) (b []byte, left int) {
	f := file{Version: version, Written: now.UnixMilli(), Whole: whole, Entries: []Entry{}}
	room := maxFile - 200
	for _, e := range entries {
		if e.size() > maxEntry || e.written() > room || len(f.Entries) == maxEntries {
			left++
			continue
		}
		room -= e.written()
		f.Entries = append(f.Entries, e)
	}
	b, _ = json.Marshal(f) // nothing in it can fail
	return b, left
}

func readAll(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = errors.New("read registrations: the file is too long")
	}
	return b, err
}

// decode reads a file.
func decode(b []byte) (file, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var f file
	err := d.Decode(&f)
	if _, after := d.Token(); err != nil || after != io.EOF || f.Version != version || f.Written <= 0 || len(f.Entries) > maxEntries {
		return file{}, errors.New("read registrations: not a file of this version")
	}
	for n, e := range f.Entries {
		// A time of at most 2^31 s, as those who register can ask for.
		const longest = int64(1<<31) * 1000
		if e.size() > maxEntry || e.Born < 0 || e.Until < 0 || e.TTL < 0 || e.TTL > longest || (e.TTL == 0) != (e.Until == 0) {
			return file{}, fmt.Errorf("read registrations: entry %d is none", n)
		}
	}
	return f, nil
}
