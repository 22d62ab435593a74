package load

import (
	"math"
	"testing"
	"time"
)

func TestRecent(t *testing.T) {
	var c Counter
	now := time.Unix(1_700_000_000, 0)
	if tokens, requests := c.Recent(now); tokens != 0 || requests != 0 {
		t.Errorf("of a new target: %v, %v", tokens, requests)
	}
	c.Placed(1000, now)
	c.Placed(500, now)
	c.Placed(0, now.Add(recentTime))
	later := now.Add(2 * recentTime)
	tokens, requests := c.Recent(later)
	e := math.Exp(-1)
	if want := 1500 * e * e; math.Abs(float64(tokens)-want) > 1e-3 {
		t.Errorf("%v tokens, want %v", tokens, want)
	}
	if want := 2*e*e + e; math.Abs(float64(requests)-want) > 1e-5 {
		t.Errorf("%v requests, want %v", requests, want)
	}
	if tokens, _ := c.Recent(now.Add(-time.Hour)); tokens > 600 {
		t.Errorf("a clock that went back makes %v tokens", tokens)
	}
}
