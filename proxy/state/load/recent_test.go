package load

import (
	"math"
	"testing"
	"time"
)

func TestRecent(t *testing.T) {
	var c Counter
	now := time.Unix(1_700_000_000, 0)
	if tokens, requests, busy := c.Recent(now); tokens != 0 || requests != 0 || busy != 0 {
		t.Errorf("of a new target: %v, %v, %v", tokens, requests, busy)
	}
	c.Placed(1000, now)
	c.Placed(500, now)
	c.Placed(0, now.Add(recentTime))
	later := now.Add(2 * recentTime)
	tokens, requests, _ := c.Recent(later)
	e := math.Exp(-1)
	if want := 1500 * e * e; math.Abs(float64(tokens)-want) > 1e-3 {
		t.Errorf("got %v tokens, want %v", tokens, want)
	}
	if want := 2*e*e + e; math.Abs(float64(requests)-want) > 1e-5 {
		t.Errorf("got %v requests, want %v", requests, want)
	}
	if tokens, _, _ := c.Recent(now.Add(-time.Hour)); tokens > 600 {
		t.Errorf("Recent with a clock that was set back: %v tokens", tokens)
	}
}

// TestBusy: a target that gets half of the work that it can do in a minute is half busy.
// It soon becomes idle without work.
func TestBusy(t *testing.T) {
	var c Counter
	now := time.Unix(1_700_000_000, 0)
	c.Placed(1000, now)
	if _, _, busy := c.Recent(now); busy != 0 {
		t.Errorf("busy = %v for a target of unknown speed, want 0", busy)
	}
	c.Prefill.Measure(1000, 100*time.Millisecond) // 100 µs a token
	for range 600 {
		now = now.Add(time.Second)
		c.Placed(5000, now)
	}
	if _, _, busy := c.Recent(now); math.Abs(float64(busy)-0.5) > 0.01 {
		t.Errorf("busy %v, want 0.5", busy)
	}
	if _, _, busy := c.Recent(now.Add(busyTime)); math.Abs(float64(busy)-0.5/math.E) > 0.01 {
		t.Errorf("busy %v a minute later", busy)
	}
	if _, _, busy := c.Recent(now.Add(10 * busyTime)); busy > 0.001 {
		t.Errorf("busy %v ten minutes later", busy)
	}
}
