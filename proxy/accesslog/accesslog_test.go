package accesslog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// lines returns the lines of a file, each decoded.
func lines(t *testing.T, path string) []Entry {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var entries []Entry
	for line := range bytes.Lines(text) {
		var e Entry
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		entries = append(entries, e)
	}
	return entries
}

// TestWriteAndReopen: after a rename, Reopen begins a new file and the old one keeps its
// lines. A path that cannot be opened changes nothing.
func TestWriteAndReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.jsonl")
	l, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	first := 12.5
	l.Write(&Entry{Time: time.Unix(1, 0).UTC(), RequestID: "r1", Model: strings.Repeat("m", 1000), FirstByteMS: &first, Fallbacks: []string{"place:late"}})
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := l.Reopen(path); err != nil {
		t.Fatal(err)
	}
	l.Write(&Entry{RequestID: "r2\n<&>"})
	if err := l.Reopen(filepath.Join(path, "impossible")); err == nil {
		t.Error("Reopen below a file: no error")
	}
	l.Write(&Entry{RequestID: "r3"})
	if err := l.Close(); err != nil || l.On.Load() {
		t.Errorf("Close: %v, enabled %t", err, l.On.Load())
	}
	l.Write(&Entry{RequestID: "r4"})
	old, now := lines(t, path+".1"), lines(t, path)
	if len(old) != 1 || old[0].RequestID != "r1" || len(old[0].Model) != maxText || *old[0].FirstByteMS != first {
		t.Errorf("old file: %+v", old)
	}
	if len(now) != 2 || now[0].RequestID != "r2\n<&>" || now[1].RequestID != "r3" {
		t.Errorf("new file: %+v", now)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// TestOneFileOfSeveral: lines of several logs with the same file do not mix.
func TestOneFileOfSeveral(t *testing.T) {
	const logs, each = 4, 200
	path := filepath.Join(t.TempDir(), "access.jsonl")
	var wg sync.WaitGroup
	for n := range logs {
		l, err := Open(path, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer l.Close()
			for i := range each {
				l.Write(&Entry{RequestID: fmt.Sprint(n, "-", i), Model: strings.Repeat("x", i)})
			}
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for _, e := range lines(t, path) {
		seen[e.RequestID] = true
	}
	if len(seen) != logs*each {
		t.Errorf("got %d lines, want %d", len(seen), logs*each)
	}
}

// TestFailedWrites: a failed write is reported once in a minute, and a nil log writes
// nothing.
func TestFailedWrites(t *testing.T) {
	var reported bytes.Buffer
	l, err := Open("/dev/full", slog.New(slog.NewTextHandler(&reported, nil)))
	if err != nil {
		t.Skip("no /dev/full:", err)
	}
	for range 3 {
		l.Write(&Entry{})
	}
	if n := strings.Count(reported.String(), "the access log lacks lines"); n != 1 {
		t.Errorf("%d reports: %s", n, reported.String())
	}
}

func BenchmarkWrite(b *testing.B) {
	l, err := Open(filepath.Join(b.TempDir(), "access.jsonl"), slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	first := 31.25
	e := Entry{Time: time.Now(), RequestID: "0198f3c2-7d1e-7c1a-9a53-0c7b1f6a2d10", Model: "meta-llama/Llama-3.1-8B-Instruct", Stream: true, Flow: "prefill_first",
		Policy: "kv_aware", Prefill: "p0", Decode: "d0", Outcome: "ok", Status: 200, Legs: 2, PromptTokens: 800, OutputTokens: 64, FirstByteMS: &first, DurationMS: 900}
	b.ReportAllocs()
	for b.Loop() {
		l.Write(&e)
	}
}
