package shared

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
)

func TestMetricTable(t *testing.T) {
	maker := new(LocalMetrics)
	if _, err := maker.Define(host.Gauge, "taken"); err != nil {
		t.Fatal(err)
	}
	m := NewMetricTable(maker)
	for i, tt := range []struct {
		kind   host.MetricKind
		name   string
		id     uint32
		status host.Status
	}{
		{host.Counter, "c", 1, host.OK},
		{host.Gauge, "g", 2, host.OK},
		{host.Histogram, "h", 3, host.OK},
		{host.Counter, "c", 1, host.OK},
		{host.Gauge, "c", 0, host.BadArgument},
		{host.Counter, "taken", 0, host.BadArgument},
	} {
		if id, status := m.Define(tt.kind, tt.name); id != tt.id || status != tt.status {
			t.Errorf("definition %d: id %d, status %d", i, id, status)
		}
	}
	for _, tt := range []struct {
		name      string
		got, want host.Status
	}{
		{"counter grows", m.Increment(1, 2), host.OK},
		{"counter shrinks", m.Increment(1, -1), host.BadArgument},
		{"gauge shrinks", m.Increment(2, -1), host.OK},
		{"histogram grows", m.Increment(3, 1), host.BadArgument},
		{"histogram observes", m.Record(3, 1), host.OK},
		{"no id 0", m.Record(0, 1), host.NotFound},
		{"no id 4", m.Increment(4, 1), host.NotFound},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: status %d, want %d", tt.name, tt.got, tt.want)
		}
	}
	if value, status := m.Value(1); value != 2 || status != host.OK {
		t.Errorf("the counter is %d, status %d", value, status)
	}
	if _, status := m.Value(3); status != host.BadArgument {
		t.Errorf("a histogram's value: status %d", status)
	}
	if _, status := m.Value(1 << 31); status != host.NotFound {
		t.Errorf("no such metric: status %d", status)
	}
}

func TestMetricTableIsBounded(t *testing.T) {
	if _, status := NewMetricTable(nil).Define(host.Counter, "c"); status != host.InternalFailure {
		t.Errorf("without a maker: status %d", status)
	}
	m := NewMetricTable(new(LocalMetrics))
	for size, want := range map[int]host.Status{host.MaxMetricName: host.OK, host.MaxMetricName + 1: host.BadArgument} {
		name := strings.Repeat("n", size)
		if _, status := NewMetricTable(new(LocalMetrics)).Define(host.Counter, name); status != want {
			t.Errorf("a name of %d bytes: status %d", size, status)
		}
		if _, status := m.Count(append(make([]byte, 8), name...)); status != want {
			t.Errorf("a counter's name of %d bytes: status %d", size, status)
		}
	}
	m = NewMetricTable(new(LocalMetrics))
	for i := range MaxMetrics {
		if _, status := m.Define(host.Counter, fmt.Sprint(i)); status != host.OK {
			t.Fatalf("metric %d: status %d", i, status)
		}
	}
	if _, status := m.Define(host.Counter, "one more"); status != host.InternalFailure {
		t.Errorf("status of a metric above the limit: %d", status)
	}
	if _, status := m.Define(host.Counter, "0"); status != host.OK {
		t.Errorf("status of an existing metric: %d", status)
	}
}

func TestCount(t *testing.T) {
	m := NewMetricTable(new(LocalMetrics))
	add := func(delta int64, name string) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, uint64(delta)), name...)
	}
	if _, status := m.Define(host.Gauge, "gauge"); status != host.OK {
		t.Fatal(status)
	}
	for _, tt := range []struct {
		args   []byte
		value  uint64
		status host.Status
	}{
		{add(3, "turns"), 3, host.OK},
		{add(4, "turns"), 7, host.OK},
		{add(0, "others"), 0, host.OK},
		{add(-1, "turns"), 0, host.BadArgument}, // a counter does not decrease
		{add(1, "gauge"), 0, host.BadArgument},
		{add(1, ""), 0, host.BadArgument},
		{[]byte("short"), 0, host.BadArgument},
		{nil, 0, host.BadArgument},
	} {
		result, status := m.Count(tt.args)
		if status != tt.status || status == host.OK && binary.LittleEndian.Uint64(result) != tt.value {
			t.Errorf("%q: %v, status %d", tt.args, result, status)
		}
	}
}
