package dashboard

import (
	"maps"
	"math"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// totals returns totals of n requests of 2 output tokens, each with a first token after
// 0.1 to 0.2 s.
func totals(n float64) telemetry.Totals {
	c := uint64(n)
	return telemetry.Totals{
		Outcomes: map[string]float64{"ok": n}, Tokens: map[string]float64{"completion": 2 * n},
		FirstToken: telemetry.Buckets{Bounds: []float64{.1, .2, .4}, Counts: []uint64{0, c, c, c}},
		InterEvent: telemetry.Buckets{Bounds: []float64{.001}, Counts: []uint64{c, c}},
	}
}

var start = time.Unix(1_700_000_000, 0)

// TestMeter: what processes did before the first report is no traffic. A process that comes
// later counts from its first report, and one that is silent for a while is counted when it
// reports again.
func TestMeter(t *testing.T) {
	m := new(Meter)
	m.Report("a", totals(1000))
	traffic := func(now time.Time) Traffic {
		m.Sample(now)
		got, _ := m.Traffic()
		return got
	}
	if got := traffic(start); got.Requests != 0 || got.TTFT.P50 != nil || got.Output != 0 {
		t.Errorf("at first: %+v", got)
	}
	m.Report("a", totals(1010))
	m.Report("b", totals(500))
	got := traffic(start.Add(time.Second))
	if got.Requests != 10 || got.Output != 20 || got.Events != 10 || !maps.Equal(got.Outcomes, map[string]float64{"ok": 10}) {
		t.Errorf("after a second: %+v", got)
	}
	m.Report("a", totals(1020)) // b is silent
	if got := traffic(start.Add(2 * time.Second)); got.Requests != 10 {
		t.Errorf("while b is silent: %+v", got)
	}
	m.Report("a", totals(1030))
	m.Report("b", totals(530))
	if got := traffic(start.Add(3 * time.Second)); got.Requests != 20 {
		t.Errorf("after b has reported again: %+v", got)
	}
	m.Report("a", totals(7)) // a new process of the same name
	if got := traffic(start.Add(4 * time.Second)); got.Requests != 15 {
		t.Errorf("a counter that falls: %+v", got)
	}
	for i := 5; i < 60; i++ {
		m.Report("a", totals(7))
		got = traffic(start.Add(time.Duration(i) * time.Second))
	}
	if got.Requests != 0 || len(got.Outcomes) != 0 || got.TTFT.P99 != nil || len(m.samples) > int(Window/time.Second)+2 {
		t.Errorf("idle: %+v, %d samples", got, len(m.samples))
	}
}

// TestMeterOfOtherVersion: a process with other bounds does not disturb the percentiles.
func TestMeterOfOtherVersion(t *testing.T) {
	m := new(Meter)
	other := totals(0)
	other.FirstToken = telemetry.Buckets{Bounds: []float64{7}, Counts: []uint64{0, 0}}
	m.Report("a", totals(0))
	m.Report("b", other)
	m.Sample(start)
	m.Report("a", totals(10))
	other.FirstToken.Counts = []uint64{90, 90}
	m.Report("b", other)
	m.Sample(start.Add(time.Second))
	traffic, _ := m.Traffic()
	if got := traffic.TTFT.P99; got == nil || *got > 200 {
		t.Errorf("p99 %v", got)
	}
}

func TestQuantile(t *testing.T) {
	bounds := []float64{.1, .2, .4}
	for _, tt := range []struct {
		name         string
		before, then []uint64
		share, want  float64
		none         bool
	}{
		{"nothing", []uint64{1, 2, 3, 4}, []uint64{1, 2, 3, 4}, .5, 0, true},
		{"one bucket", []uint64{0, 0, 0, 0}, []uint64{0, 10, 10, 10}, .5, .15, false},
		{"a share of a bucket", []uint64{0, 5, 5, 5}, []uint64{0, 5, 15, 15}, .95, .39, false},
		{"the first bucket", []uint64{0, 0, 0, 0}, []uint64{4, 4, 4, 4}, .5, .05, false},
		{"two buckets", []uint64{0, 0, 0, 0}, []uint64{5, 10, 10, 10}, .75, .15, false},
		{"above all", []uint64{0, 0, 0, 0}, []uint64{0, 0, 0, 3}, .5, .4, false},
		{"from nothing", nil, []uint64{0, 0, 8, 8}, .5, .3, false},
	} {
		got, ok := quantile(telemetry.Buckets{Bounds: bounds, Counts: tt.before}, telemetry.Buckets{Bounds: bounds, Counts: tt.then}, tt.share)
		if ok == tt.none || math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("%s: got %v, %v, want %v", tt.name, got, ok, tt.want)
		}
	}
}
