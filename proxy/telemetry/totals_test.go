package telemetry

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
)

// TestTotals: totals are sums over the labels that they do not name.
func TestTotals(t *testing.T) {
	m := New(prometheus.NewRegistry())
	if got := m.Totals(); len(got.Outcomes) != 0 || got.Shed != 0 || len(got.InterEvent.Counts) != intervalBuckets {
		t.Errorf("before the first exchange: %+v", got)
	}
	known, other := m.Model("sim"), m.Other
	one := ended(abi.FlowAggregated, OutcomeOK)
	one.Prompt, one.Completion = 7, 5
	one.Intervals.Observe(3 * time.Millisecond)
	known.Ended(one)
	one = ended(abi.FlowConcurrent, OutcomeOK)
	one.Prompt, one.Cached = 3, 4
	other.Ended(one)
	known.Ended(ended(abi.FlowConcurrent, OutcomeBroken))
	m.LegError(abi.Prefill, "p0", "refused")
	m.LegError(abi.Decode, "d0", "refused")
	m.LegError(abi.Decode, "d0", "timeout")
	m.Retry(abi.Decode, "refused")
	m.Retry(abi.Prefill, "timeout")
	m.Shed("queue_full")
	m.Evicted("batch", "saturated")
	m.BrokenStream("cut")
	m.BrokenStream("idle")
	m.Continuation("continued")
	m.Continuation("continued")
	m.Continuation("no_ids")
	other.FirstByte(true, 3*time.Millisecond)
	known.FirstByte(true, 3*time.Second)
	known.FirstByte(true, time.Hour)
	got := m.Totals()
	for name, pair := range map[string][2]map[string]float64{
		"outcomes":   {got.Outcomes, {"ok": 2, "broken": 1}},
		"tokens":     {got.Tokens, {"prompt": 10, "completion": 5, "cached": 4}},
		"leg errors": {got.LegErrors, {"p0": 1, "d0": 2}},
		"continued":  {got.Continuations, {"continued": 2, "no_ids": 1}},
	} {
		if !maps.Equal(pair[0], pair[1]) {
			t.Errorf("%s: got %v, want %v", name, pair[0], pair[1])
		}
	}
	if got.Retries != 2 || got.Shed != 1 || got.Evicted != 1 || got.Broken != 2 {
		t.Errorf("retries %v, shed %v, evicted %v, broken streams %v", got.Retries, got.Shed, got.Evicted, got.Broken)
	}
	if b := got.FirstToken; !slices.Equal(b.Bounds, waits) || b.Counts[1] != 0 || b.Counts[2] != 1 || b.Counts[len(waits)-1] != 2 || b.Counts[len(waits)] != 3 {
		t.Errorf("time to first token: %+v", b)
	}
	if b := got.InterEvent; b.Counts[1] != 0 || b.Counts[2] != 1 || b.Counts[len(b.Counts)-1] != 1 {
		t.Errorf("inter event: %+v", b)
	}
}
