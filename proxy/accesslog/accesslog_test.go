package accesslog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
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
	l, err := Open(path, "json", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	first := 12.5
	l.Write(&Entry{Time: time.Unix(1, 0).UTC(), RequestID: "r1", Model: strings.Repeat("m", 1000), FirstByteMS: &first, Fallbacks: []string{"place:late"}})
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := l.Reopen(path, "json"); err != nil {
		t.Fatal(err)
	}
	l.Write(&Entry{RequestID: "r2\n<&>"})
	if err := l.Reopen(filepath.Join(path, "impossible"), "json"); err == nil {
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

// TestLinesWait: a line waits for others until 100 ms have passed or there are enough of them.
func TestLinesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "access.jsonl")
		l, err := Open(path, "json", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		want := 0
		for range 2 { // the second time, the timer is there already
			l.Write(&Entry{})
			time.Sleep(flushAfter - 1)
			l.Write(&Entry{})
			if n := len(lines(t, path)); n != want {
				t.Errorf("%d lines are written early, want %d", n, want)
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if want += 2; len(lines(t, path)) != want {
				t.Errorf("%d lines after 100 ms, want %d", len(lines(t, path)), want)
			}
		}
		for range flushAt / 200 {
			l.Write(&Entry{Model: "m"})
		}
		if n := len(lines(t, path)); n <= want {
			t.Errorf("%d lines behind %d bytes", n, flushAt)
		}
	})
}

// TestOneFileOfSeveral: lines of several logs with the same file do not mix.
func TestOneFileOfSeveral(t *testing.T) {
	const logs, each = 4, 200
	path := filepath.Join(t.TempDir(), "access.jsonl")
	var wg sync.WaitGroup
	for n := range logs {
		l, err := Open(path, "json", slog.New(slog.DiscardHandler))
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
	l, err := Open("/dev/full", "json", slog.New(slog.NewTextHandler(&reported, nil)))
	if err != nil {
		t.Skip("no /dev/full:", err)
	}
	for range 3 {
		l.Write(&Entry{})
		if err := l.Reopen("/dev/full", "json"); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(reported.String(), "the access log lacks lines"); n != 1 {
		t.Errorf("%d reports: %s", n, reported.String())
	}
}

// TestCommonFormat: each line has the seven parts of the common log format, whatever a client sends.
// The regular expression is that of a reader who knows only the format.
func TestCommonFormat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	l, err := Open(path, config.AccessLogCommon, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	l.Write(&Entry{Time: at, ClientAddress: "192.0.2.7", Client: "team-a", Method: "POST", Path: "/v1/completions", Protocol: "HTTP/1.1", Status: 200, BytesOut: 312, Model: "m"})
	l.Write(&Entry{Time: at, ClientAddress: "2001:db8::1", Method: "POST", Path: "/a\"b\\c d\ne\xff", Protocol: "HTTP/2.0", Status: 499})
	l.Write(&Entry{Time: at, Client: "a b", Method: strings.Repeat("M", 1000), Path: "/", Protocol: "HTTP/3.0"})
	if err := l.Reopen(path, config.AccessLogJSON); err != nil {
		t.Fatal(err)
	}
	l.Write(&Entry{RequestID: "json"})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`192.0.2.7 - team-a [03/Feb/2026:04:05:06 +0000] "POST /v1/completions HTTP/1.1" 200 312`,
		`2001:db8::1 - - [03/Feb/2026:04:05:06 +0000] "POST /a\"b\\c\x20d\x0ae\xff HTTP/2.0" 499 -`,
		`- - a\x20b [03/Feb/2026:04:05:06 +0000] "` + strings.Repeat("M", maxText) + ` / HTTP/3.0" - -`,
	}
	got := strings.Split(string(text), "\n")
	if len(got) != 5 || !slices.Equal(got[:3], want) || !strings.HasPrefix(got[3], `{"time":`) {
		t.Fatalf("got\n%s\nwant\n%s", text, strings.Join(want, "\n"))
	}
	reader := regexp.MustCompile(`^(\S+) (\S+) (\S+) \[([^\]]+)\] "((?:[^"\\]|\\.)*)" (\d{3}|-) (\d+|-)$`)
	for _, line := range got[:3] {
		if reader.FindStringSubmatch(line) == nil {
			t.Errorf("no line of the common log format: %s", line)
		}
	}
}

func benchEntry() *Entry {
	first := 31.25
	return &Entry{Time: time.Now(), RequestID: "0198f3c2-7d1e-7c1a-9a53-0c7b1f6a2d10", ClientAddress: "192.0.2.7", Client: "team-a", Method: "POST", Path: "/v1/chat/completions", Protocol: "HTTP/1.1",
		RequestedModel: "llama", Model: "meta-llama/Llama-3.1-8B-Instruct", Class: "default", Stream: true, Flow: "prefill_first",
		Policy: "kv_aware", Prefill: "p0", Decode: "d0", Outcome: "ok", Status: 200, Legs: 2, BytesIn: 3200, BytesOut: 12_000, PromptTokens: 800, OutputTokens: 64, FirstByteMS: &first, DurationMS: 900}
}

func BenchmarkWrite(b *testing.B) {
	for _, format := range []string{config.AccessLogJSON, config.AccessLogCommon} {
		b.Run(format, func(b *testing.B) {
			l, err := Open(filepath.Join(b.TempDir(), "access"), format, slog.New(slog.DiscardHandler))
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			e := benchEntry()
			b.ReportAllocs()
			for b.Loop() {
				l.Write(e)
			}
		})
	}
}
