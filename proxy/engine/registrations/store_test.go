package registrations

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// place is a directory and the log of all stores that share the directory.
type place struct {
	*testing.T
	dir *privatedir.Dir
	log bytes.Buffer
}

func newPlace(t *testing.T) *place {
	p := &place{T: t, dir: privatedirtest.Open(t)}
	return p
}

func (p *place) store() *Store {
	return New(p.dir, "x", slog.New(slog.NewTextHandler(&p.log, nil)))
}

// take calls Acquire for a store that need not wait for another store.
func (p *place) take(r *Store) []Entry {
	p.Helper()
	entries, ok := r.Acquire(p.Context(), func([]Entry) { p.Error("another process accepts registrations") })
	if !ok {
		p.Fatal("the process does not accept registrations")
	}
	return entries
}

// entry returns an entry that ends after ttl, or never if ttl is 0.
func entry(key string, ttl time.Duration) Entry {
	e := Entry{Key: key, Value: []byte("value of " + key), Peer: "10.0.0.1", Born: 7}
	if ttl > 0 {
		e.End(time.Now(), ttl, ttl)
	}
	return e
}

func keys(entries []Entry) (s string) {
	for _, e := range entries {
		s += e.Key
	}
	return s
}

// Only one process at a time takes registrations. The next process follows its
// entries, and starts with the entries of its last write.
func TestTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		first, second := p.store(), p.store()
		if entries := p.take(first); len(entries) != 0 || first.Complete() {
			t.Errorf("a new store has entries: %v", entries)
		}
		first.Write([]Entry{entry("a", time.Minute)})
		var seen []string
		var had []Entry
		done := make(chan bool)
		go func() {
			var ok bool
			had, ok = second.Acquire(t.Context(), func(entries []Entry) { seen = append(seen, keys(entries)) })
			done <- ok
		}()
		time.Sleep(time.Second)
		if second.Complete() {
			t.Error("the store is complete one second after the start of the first process")
		}
		a, b := entry("a", 2*time.Second), entry("b", 0)
		for range 10 { // only the first process decides that an entry has expired
			time.Sleep(WriteEvery)
			first.Write([]Entry{a, b})
		}
		if !first.Complete() || !second.Complete() {
			t.Error("the store is not complete after ten seconds")
		}
		select {
		case <-done:
			t.Fatal("two take registrations")
		default:
		}
		c := entry("c", time.Minute)
		first.Release([]Entry{a, b, c})
		if !<-done || !reflect.DeepEqual(had, []Entry{b, c}) {
			t.Errorf("the second has %v", had)
		}
		if got := strings.Join(seen, " "); !strings.HasPrefix(got, "a ab ab") {
			t.Errorf("the second saw %s", got)
		}
		// A process that has released the registrations follows those of the second.
		ctx, cancel := context.WithCancel(t.Context())
		var last string
		followed := make(chan struct{})
		go func() {
			defer close(followed)
			first.Follow(ctx, func(entries []Entry) { last = keys(entries) })
		}()
		second.Write([]Entry{c})
		time.Sleep(2 * WriteEvery)
		cancel()
		<-followed
		if last != "c" {
			t.Errorf("the first process has the entries %q", last)
		}
		second.Release(nil)
		if p.log.Len() > 0 {
			t.Error(p.log.String())
		}
	})
}

// A process that dies leaves the entries of its last write. They are complete for
// the first few seconds only: later, engines that are not in the file may have come.
func TestCrash(t *testing.T) {
	for _, tt := range []struct {
		name          string
		lived, gone   time.Duration
		known, before bool
		want          string
	}{
		{"at once", time.Minute, time.Second, true, true, "ab"},
		{"some have run out", time.Minute, 4 * time.Second, true, true, "b"},
		{"others may have come", time.Minute, 6 * time.Second, false, true, "b"},
		{"it had not lived for long", 2 * time.Second, time.Second, false, false, "ab"},
		{"the clock was set back", time.Minute, -time.Hour, false, true, "ab"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlace(t)
				r := p.store()
				p.take(r)
				time.Sleep(tt.lived)
				a, b := entry("a", 3*time.Second), entry("b", 0)
				r.Write([]Entry{a, b})
				if r.Complete() != tt.before {
					t.Errorf("Complete = %v before the registrations", r.Complete())
				}
				r.lock.Unlock() // the system unlocks the file of a dead process
				if tt.gone < 0 {
					a.Until -= tt.gone.Milliseconds()
					text, _ := encode([]Entry{a, b}, true, time.Now().Add(-tt.gone))
					if err := os.WriteFile(p.dir.Path("registered-x"), text, 0o600); err != nil {
						t.Fatal(err)
					}
				} else {
					time.Sleep(tt.gone)
				}
				next := p.store()
				entries := p.take(next)
				if keys(entries) != tt.want || next.Complete() != tt.known {
					t.Errorf("%s, all: %v; want %s, %v", keys(entries), next.Complete(), tt.want, tt.known)
				}
				for _, e := range entries {
					if e.Key == "a" && e.Left(time.Now()) > 3*time.Second {
						t.Errorf("the entry stays for %s", e.Left(time.Now()))
					}
				}
				next.Release(entries)
			})
		})
	}
}

// A file without registrations counts as no file. The store logs the file
// once and replaces it.
func TestForeignFile(t *testing.T) {
	good, _ := encode([]Entry{entry("a", time.Minute)}, true, time.Now())
	of := func(e *fleetpb.Registration) string {
		return string(fleetpb.Append(nil, &fleetpb.Registrations{WrittenMs: 1, Entries: []*fleetpb.Registration{e}}))
	}
	for name, text := range map[string]string{
		"empty":   "",
		"half":    string(good[:len(good)/2]),
		"more":    string(good) + "\xff",
		"JSON":    `{"version":1,"written":1,"whole":false,"entries":[]}`,
		"never":   string(fleetpb.Append(nil, &fleetpb.Registrations{Entries: []*fleetpb.Registration{{Key: "a"}}})),
		"no time": of(&fleetpb.Registration{UntilMs: 1}), "no end": of(&fleetpb.Registration{TtlMs: 1}),
		"negative": of(&fleetpb.Registration{TtlMs: -1, UntilMs: 1}), "long": of(&fleetpb.Registration{Key: strings.Repeat("x", maxEntry+1)}),
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			if err := os.WriteFile(p.dir.Path("registered-x"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			r := p.store()
			if entries := p.take(r); len(entries) > 0 || r.Complete() {
				t.Errorf("p.take(r) = %v", entries)
			}
			if n := strings.Count(p.log.String(), "\n"); n != 1 {
				t.Errorf("logged: %s", p.log.String())
			}
			r.Release([]Entry{entry("b", 0)})
			next := p.store()
			if entries := p.take(next); keys(entries) != "b" {
				t.Errorf("p.take(next) = %v", entries)
			}
			next.Release(nil)
			info, err := os.Stat(p.dir.Path("registered-x"))
			if err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf(`os.Stat(p.dir.Path("registered-x")) = %v, %v`, info, err)
			}
		})
	}
}

// The store follows no symbolic link in the directory: another user may have
// created the link.
func TestLinks(t *testing.T) {
	p := newPlace(t)
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(precious, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"registered-x", "registered-x.next"} {
		if err := os.Symlink(precious, p.dir.Path(name)); err != nil {
			t.Fatal(err)
		}
	}
	r := p.store()
	p.take(r)
	r.Release([]Entry{entry("a", 0)})
	if b, err := os.ReadFile(precious); string(b) != "x" {
		t.Errorf("os.ReadFile(precious) = %q, %v", b, err)
	}
}

// Without a directory no other process shares the registrations.
func TestNoDirectory(t *testing.T) {
	r := New(nil, "x", slog.New(slog.DiscardHandler))
	if entries, ok := r.Acquire(t.Context(), nil); !ok || len(entries) > 0 || r.Complete() {
		t.Error(entries, ok)
	}
	r.Write([]Entry{entry("a", 0)})
	r.Release(nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Follow(ctx, nil)
	if _, ok := r.Acquire(ctx, nil); ok {
		t.Error("the registration has expired")
	}
}

// The store leaves out entries for which the file has no room, and logs this.
func TestTooMany(t *testing.T) {
	p := newPlace(t)
	r := p.store()
	p.take(r)
	var many []Entry
	const room = maxFile / (maxEntry - 100)
	for n := range room + 10 {
		e := entry(fmt.Sprint(n), 0)
		e.Key += strings.Repeat("<", maxEntry-100)
		many = append(many, e)
	}
	many = append(many, Entry{Key: "long", Value: make([]byte, maxEntry)})
	r.Release(many)
	next := p.store()
	entries := p.take(next)
	if len(entries) < room-1 || len(entries) > room {
		t.Errorf("%d of %d", len(entries), len(many))
	}
	next.Release(nil)
	if !strings.Contains(p.log.String(), "too many") {
		t.Error(p.log.String())
	}
}

func TestLeft(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	for _, tt := range []struct {
		ttl, until int64
		want       time.Duration
	}{
		{0, 0, math.MaxInt64},
		{10_000, 1_004_000, 4 * time.Second},
		{10_000, 1_000_000, 0},
		{10_000, 1, -999_999 * time.Millisecond},
		{10_000, math.MaxInt64, 10 * time.Second}, // the clock of the writer was ahead
	} {
		if got := (Entry{TTL: tt.ttl, Until: tt.until}).Left(now); got != tt.want {
			t.Errorf("got %d, %d: Left = %s, want %s", tt.ttl, tt.until, got, tt.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	good, _ := encode([]Entry{{Key: "a", Value: []byte("b"), Peer: "10.0.0.1", Born: 1, TTL: 10, Until: 20}, {Value: []byte{0xff}}}, true, time.UnixMilli(1_700_000_000_000))
	f.Add(good)
	f.Add(fleetpb.Append(nil, &fleetpb.Registrations{WrittenMs: 1, Entries: []*fleetpb.Registration{{TtlMs: math.MaxInt64, UntilMs: 1}}}))
	f.Add(append(good, 0xf8, 0x3f, 1)) // the field 1023
	f.Fuzz(func(t *testing.T, b []byte) {
		read, err := decode(b)
		if err != nil {
			return
		}
		for _, e := range read.entries {
			if left := e.Left(time.UnixMilli(read.written)); e.Until > 0 && left > time.Duration(e.TTL)*time.Millisecond {
				t.Errorf("entry %+v has %s left", e, left)
			}
		}
		again, left := encode(read.entries, read.whole, time.UnixMilli(read.written))
		same, err := decode(again)
		if err != nil || left == 0 && len(read.entries) > 0 && !reflect.DeepEqual(same, read) {
			t.Errorf("%+v, %v; was %+v", same, err, read)
		}
	})
}
