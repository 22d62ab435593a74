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

// version is the version of the file's format.
const version = 1

// Limits of the file.
const (
	maxEntries = 16 << 10
	maxEntry   = 80 << 10 // the strings of one entry, in bytes
	maxFile    = 32 << 20
)

// Entry is one registration as received.
type Entry struct {
	Key   string `json:"key,omitempty"` // if the registration has one
	Value []byte `json:"value"`
	Peer  string `json:"peer,omitempty"` // address of the registering peer
	Born  int64  `json:"born,omitempty"` // increases from entry to entry, if the order matters
	// TTL is the time that an entry lasts without renewal, and Until its end, both in
	// milliseconds, Until since 1970. 0: no end.
	TTL   int64 `json:"ttl,omitempty"`
	Until int64 `json:"until,omitempty"`
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

// written bounds the size of an entry in the file: a character may become six bytes,
// and three bytes become four.
func (e Entry) written() int { return 6*(len(e.Key)+len(e.Peer)) + 4*len(e.Value)/3 + 200 }

// file is the content of the file.
type file struct {
	Version int     `json:"version"`
	Written int64   `json:"written"` // milliseconds since 1970
	Whole   bool    `json:"whole"`   // all engines had time to register
	Entries []Entry `json:"entries"`
}

// encode encodes the file. It returns the number of entries that did not fit.
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
	b, _ = json.Marshal(f) // cannot fail for these types
	return b, left
}

func readAll(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = errors.New("read registrations: the file is too long")
	}
	return b, err
}

// decode decodes a file.
func decode(b []byte) (file, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var f file
	err := d.Decode(&f)
	if _, after := d.Token(); err != nil || after != io.EOF || f.Version != version || f.Written <= 0 || len(f.Entries) > maxEntries {
		return file{}, errors.New("read registrations: not a file of this version")
	}
	for n, e := range f.Entries {
		// Registrations may ask for at most 2^31 s.
		const longest = int64(1<<31) * 1000
		if e.size() > maxEntry || e.Born < 0 || e.Until < 0 || e.TTL < 0 || e.TTL > longest || (e.TTL == 0) != (e.Until == 0) {
			return file{}, fmt.Errorf("read registrations: entry %d is invalid", n)
		}
	}
	return f, nil
}
