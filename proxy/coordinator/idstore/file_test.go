package idstore

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

var lines = disaggid.Block{Node: 7, First: 2, Lines: 3}

// noon is a time for which ids exist.
var noon = time.Date(2026, 3, 4, 12, 0, 0, 0, time.UTC)

func TestFileRaisesItsMark(t *testing.T) {
	dir := privatedirtest.Open(t)
	reserve := func(now time.Time, width time.Duration) disaggid.Block {
		t.Helper()
		b, err := NewFile(dir, lines).Reserve(t.Context(), now, width) // a new File, as after a restart
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	want := disaggid.Block{Node: 7, First: 2, Lines: 3, From: noon.UnixMilli(), Until: noon.UnixMilli() + 60_000}
	if b := reserve(noon, time.Minute); b != want {
		t.Errorf("reserve(noon, time.Minute) = %+v, want %+v", b, want)
	}
	want.From, want.Until = want.Until, want.Until+1000
	if b := reserve(noon.Add(-10*time.Second), time.Second); b != want {
		t.Errorf("reserve(noon.Add(-10*time.Second), time.Second) = %+v, want %+v", b, want)
	}
	later := noon.Add(time.Hour)
	want.From, want.Until = later.UnixMilli(), later.UnixMilli()+1000
	if b := reserve(later, time.Second); b != want {
		t.Errorf("reserve(later, time.Second) = %+v, want %+v", b, want)
	}
	text, err := os.ReadFile(dir.Path(markFile))
	if want := `{"mark":1772629201000}` + "\n"; err != nil || string(text) != want {
		t.Errorf("%q, %v", text, err)
	}
}

// TestFileAmongProcesses: processes that share a folder get different blocks.
func TestFileAmongProcesses(t *testing.T) {
	dir := privatedirtest.Open(t)
	var (
		mu   sync.Mutex
		from []int64
		wg   sync.WaitGroup
	)
	for range 4 {
		wg.Go(func() {
			for range 5 {
				b, err := NewFile(dir, lines).Reserve(t.Context(), noon, time.Second)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				from = append(from, b.From)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	slices.Sort(from)
	for i, f := range from {
		if want := noon.UnixMilli() + int64(i)*1000; f != want {
			t.Fatalf("block %d begins at %d, want %d", i, f, want)
		}
	}
}

func TestFileRefuses(t *testing.T) {
	for name, tt := range map[string]struct{ text, want string }{
		"no JSON":        {"{", "unexpected end"},
		"no mark":        {"{}", "outside of id-time"},
		"beyond the end": {`{"mark":99999999999999}`, "outside of id-time"},
		"at the end":     {`{"mark":2285445348350}`, "used up"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := privatedirtest.Open(t)
			path := dir.Path(markFile)
			if err := os.WriteFile(path, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := NewFile(dir, lines).Reserve(t.Context(), noon, time.Minute)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("NewFile(dir, lines).Reserve = %v, want %q", err, tt.want)
			}
			if text, _ := os.ReadFile(path); string(text) != tt.text {
				t.Errorf("the file is %q", text)
			}
		})
	}
}

// TestFileOfAStoppedProcess: a stopped process holds the lock.
func TestFileOfAStoppedProcess(t *testing.T) {
	dir := privatedirtest.Open(t)
	f := NewFile(dir, lines)
	unlock, err := f.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := f.Reserve(ctx, noon, time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	unlock()
	if _, err := f.Reserve(t.Context(), noon, time.Second); err != nil {
		t.Error(err)
	}
}

// TestKeeperWithoutItsStore: without its store a keeper continues to grant reserved
// blocks. When the store is back, the keeper reserves new blocks.
func TestKeeperWithoutItsStore(t *testing.T) {
	dir := privatedirtest.Open(t)
	if err := os.Remove(dir.Name()); err != nil {
		t.Fatal(err)
	}
	k := NewKeeper(NewFile(dir, lines), time.Millisecond, slog.New(slog.DiscardHandler))
	if err := k.Tend(t.Context(), noon); !errors.Is(err, syscall.ENOENT) {
		t.Fatal(err)
	}
	if _, ok := k.Source().Next(); ok {
		t.Error("the source issued an id without a reserved range")
	}
	if err := os.Mkdir(dir.Name(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := k.Tend(t.Context(), noon); err != nil { // one of the three lines is for this process
		t.Fatal(err)
	}
	if _, ok := k.Source().Next(); !ok {
		t.Error("no id")
	}
	if err := os.RemoveAll(dir.Name()); err != nil {
		t.Fatal(err)
	}
	for holder := range disaggid.Holder(2) {
		if _, ok := k.Grant(disaggid.Ask{Holder: holder}); !ok {
			t.Error("Grant refused a range although ids are reserved")
		}
	}
	if err := k.Tend(t.Context(), noon); err == nil {
		t.Error("Tend reserved ids although the store does not work")
	}
	if _, ok := k.Grant(disaggid.Ask{Holder: 2}); ok {
		t.Error("more was granted than reserved")
	}
	if err := os.Mkdir(dir.Name(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := k.Tend(t.Context(), noon.Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	r, ok := k.Grant(disaggid.Ask{Holder: 2})
	if !ok || r.From != noon.UnixMilli()+1000 {
		t.Errorf("k.Grant = %+v, %v", r, ok)
	}
	s, found, err := disaggid.FindRange(k.Table(), 2)
	if !found || err != nil || s != r {
		t.Errorf("the table has %+v: %v", s, err)
	}
}

// TestKeeperRuns: after a grant a keeper reserves new blocks without a call of Tend.
func TestKeeperRuns(t *testing.T) {
	k := NewKeeper(NewFile(privatedirtest.Open(t), lines), time.Millisecond, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); k.Run(ctx) }()
	defer func() { cancel(); <-done }()
	for holder := disaggid.Holder(0); holder < 20; {
		if _, ok := k.Grant(disaggid.Ask{Holder: holder}); ok {
			holder++
		} else {
			time.Sleep(time.Millisecond)
		}
	}
}

// TestFileFollowsNoLink: a symbolic link does not make the store lock or overwrite
// another file.
func TestFileFollowsNoLink(t *testing.T) {
	for _, name := range []string{markFile, markFile + ".new", "ids.lock"} {
		dir := privatedirtest.Open(t)
		victim := filepath.Join(t.TempDir(), "victim")
		if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), os.Symlink(victim, dir.Path(name))); err != nil {
			t.Fatal(err)
		}
		_, err := NewFile(dir, lines).Reserve(t.Context(), noon, time.Second)
		if name != markFile+".new" && err == nil { // current processes do not use this name
			t.Errorf("%s: the store follows a link", name)
		}
		if text, err := os.ReadFile(victim); string(text) != "precious" || err != nil {
			t.Errorf(`%s: os.ReadFile(victim) = %q, %v, want "precious", nil`, name, text, err)
		}
	}
}
