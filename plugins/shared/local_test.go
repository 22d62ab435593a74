package shared

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
)

func TestLocalMetrics(t *testing.T) {
	var l LocalMetrics
	for _, tt := range []struct {
		kind          host.MetricKind
		name          string
		adds, records []uint64
		value         uint64
	}{
		{host.Counter, "c", []uint64{2, 3}, []uint64{4}, 9},
		{host.Gauge, "g", []uint64{2, ^uint64(0)}, nil, 1},
		{host.Gauge, "set", []uint64{2}, []uint64{7, 5}, 5},
		{host.Histogram, "h", nil, []uint64{8, 1}, 9},
	} {
		for range 2 { // a later version continues with the values
			if _, err := l.Define(tt.kind, tt.name); err != nil {
				t.Fatal(err)
			}
		}
		m, ok := l.Find(tt.kind, tt.name)
		if !ok {
			t.Fatalf("no %s", tt.name)
		}
		for _, n := range tt.adds {
			m.Add(int64(n))
		}
		for _, n := range tt.records {
			m.Record(n)
		}
		if m.Value() != tt.value || m.Records() != len(tt.records) {
			t.Errorf("%s is %d after %d records, want %d", tt.name, m.Value(), m.Records(), tt.value)
		}
	}
	if _, err := l.Define(host.Gauge, "c"); err == nil {
		t.Error("the counter is a gauge")
	}
	if _, ok := l.Find(host.Gauge, "c"); ok {
		t.Error("the counter was found as a gauge")
	}
}
