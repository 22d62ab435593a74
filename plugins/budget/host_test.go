package budget

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestHostMemory(t *testing.T) {
	var refused []string
	h := NewHost(100, func(reason string) { refused = append(refused, reason) })
	for i, tt := range []struct {
		take int64
		ok   bool
		held int64
	}{{60, true, 60}, {41, false, 60}, {40, true, 100}, {1, false, 100}, {0, true, 100}, {1 << 62, false, 100}} {
		if ok := h.Take(tt.take); ok != tt.ok || h.Held() != tt.held {
			t.Errorf("step %d: %v, %d bytes held", i, ok, h.Held())
		}
	}
	h.Give(60)
	h.SetLimit(30) // less than the held bytes
	if h.Take(1) {
		t.Error("Take succeeds above a lowered limit")
	}
	h.Give(40)
	if !h.Take(30) || h.Held() != 30 {
		t.Error("returned bytes are not available")
	}
	if want := []string{RefusedMemory, RefusedMemory, RefusedMemory, RefusedMemory}; !slices.Equal(refused, want) {
		t.Errorf("refused %q, want %q", refused, want)
	}
	if d := NewHost(0, nil); !d.Take(DefaultMemory) || d.Take(1) {
		t.Error("a Host without a limit does not have the default")
	}
}

func TestHostUnderManyHands(t *testing.T) {
	h := NewHost(100, nil)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				if h.Take(40) {
					if held := h.Held(); held > 100 {
						t.Errorf("%d bytes held", held)
					}
					h.Give(40)
				}
			}
		})
	}
	wg.Wait()
	if h.Held() != 0 {
		t.Errorf("%d bytes are still held", h.Held())
	}
}

func TestHostCalls(t *testing.T) {
	refused := 0
	h := NewHost(0, func(string) { refused++ })
	for range MaxCalls {
		if !h.BeginCall() {
			t.Fatal("a call was refused below the limit")
		}
	}
	if h.BeginCall() || refused != 1 {
		t.Error("a call was accepted above the limit")
	}
	h.EndCall()
	if !h.BeginCall() {
		t.Error("no call after one has ended")
	}
}

func TestHostLog(t *testing.T) {
	refused := 0
	h := NewHost(0, func(string) { refused++ })
	now, line := time.Unix(1000, 0), strings.Repeat("x", 64<<10-lineCost)
	fill := func() (lines int) {
		for h.Log(now, line) {
			lines++
		}
		return lines
	}
	if got := fill(); got != logBurst/(64<<10) {
		t.Errorf("%d lines at first", got)
	}
	now = now.Add(time.Second)
	if got := fill(); got != logRate/(64<<10) {
		t.Errorf("%d lines after a second", got)
	}
	now = now.Add(-time.Hour) // a clock that was set back
	if got := fill(); got != 0 {
		t.Errorf("%d lines from the past", got)
	}
	now = now.Add(time.Hour)
	if got := fill(); got != logBurst/(64<<10) {
		t.Errorf("%d lines after an hour", got)
	}
	if refused != 4 {
		t.Errorf("got %d refusals", refused)
	}
	if !NewHost(0, nil).Log(time.Time{}, "x") {
		t.Error("the first line is refused")
	}
}

// loggers are the forms of the proxy's log.
var loggers = map[string]func(io.Writer) slog.Handler{
	"text": func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, nil) },
	"json": func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, nil) },
}

// TestLogCountsWrittenBytes: the limit holds for the bytes that reach the writer, not for
// the bytes that the guest passed.
func TestLogCountsWrittenBytes(t *testing.T) {
	for name, text := range map[string]string{
		"NUL": "\x00", "invalid UTF-8": "\xff", "half a character": "\xe2\x82", "escape": "\x1b[31m", "delete": "\x7f", "vertical tab": "\v",
		"quotes": `"`, "backslashes": `\`, "ends of lines": "\n", "tabs": "\t", "line separator": "\u2028", "soft hyphen": "\u00ad",
		"private plane": "\U0010ffff", "tag": "\U000e0001", "no-break space": "\u00a0", "plain": "x", "accents": "\u00e9", "markup": "<&>", "equals": "a=b ",
	} {
		for form, newHandler := range loggers {
			t.Run(name+"/"+form, func(t *testing.T) {
				var out bytes.Buffer
				h, log := NewHost(0, nil), slog.New(newHandler(&out)).With("plugin", strings.Repeat("n", 64))
				for _, size := range []int{1, 100, 60000} {
					line := strings.Repeat(text, size/len(text)+1)
					for n := 0; h.Log(time.Unix(1000, 0), line); n++ {
						if n > logBurst/lineCost {
							t.Fatal("no limit")
						}
						log.Log(context.Background(), slog.LevelError, line)
					}
				}
				if out.Len() > logBurst || out.Len() < logBurst/8 {
					t.Errorf("%d bytes were written, the limit is %d", out.Len(), logBurst)
				}
			})
		}
	}
}

func FuzzWritten(f *testing.F) {
	f.Add("x\x00\xff\u2028\U000e0001\"\\\n")
	f.Fuzz(func(t *testing.T, text string) {
		for form, newHandler := range loggers {
			var out bytes.Buffer
			slog.New(newHandler(&out)).Log(context.Background(), slog.LevelError, text)
			if most := written(text) + lineCost; out.Len() > most {
				t.Errorf("%s: %d bytes were written, %d were counted", form, out.Len(), most)
			}
		}
	})
}
