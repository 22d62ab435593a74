package budget

import (
	"slices"
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
	now := time.Unix(1000, 0)
	fill := func() (lines int) {
		for h.Log(now, 64<<10-lineCost) {
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
	if !NewHost(0, nil).Log(time.Time{}, 1) {
		t.Error("the first line is refused")
	}
}
