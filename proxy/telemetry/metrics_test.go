package telemetry

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// value sums the series of one metric whose label values contain all given.
func value(t *testing.T, reg *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			found := 0
			for _, l := range m.GetLabel() {
				for _, want := range labels {
					if l.GetValue() == want {
						found++
					}
				}
			}
			if found == len(labels) {
				sum += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// Engines need not report every number (openai.Usage is then -1), and a counter
// that is given a negative one panics.
func TestTokensNotReported(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := New(reg)
	m.Tokens(10, 5, -1)
	m.Tokens(-1, -1, 3)
	for kind, want := range map[string]float64{"prompt": 10, "completion": 5, "cached": 3} {
		if got := value(t, reg, "pdproxy_tokens_total", kind); got != want {
			t.Errorf("%s: %v tokens, want %v", kind, got, want)
		}
	}
}

// A wait of 2^i ms and more is no longer in bucket i, and the last bucket takes
// whatever is longer.
func TestIntervalBuckets(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := New(reg)
	var a, b Intervals
	for _, ms := range []int{0, 1, 2, 3, 1000} {
		a.Observe(time.Duration(ms) * time.Millisecond)
	}
	b.Observe(time.Hour)
	b.Observe(-time.Second)
	m.MergeIntervals(&a)
	m.MergeIntervals(&b)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "pdproxy_inter_event_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 7 {
			t.Errorf("%d waits are counted, want 7", h.GetSampleCount())
		}
		want := map[float64]uint64{0.001: 2, 0.002: 3, 0.004: 5, 0.512: 5, 1.024: 6, 16.384: 6}
		for _, bucket := range h.GetBucket() {
			if n, ok := want[bucket.GetUpperBound()]; ok && n != bucket.GetCumulativeCount() {
				t.Errorf("%d waits below %v s, want %d", bucket.GetCumulativeCount(), bucket.GetUpperBound(), n)
			}
			delete(want, bucket.GetUpperBound())
		}
		if len(want) > 0 {
			t.Errorf("buckets are missing: %v", want)
		}
		return
	}
	t.Fatal("there is no such histogram")
}
