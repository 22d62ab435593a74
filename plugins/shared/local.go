package shared

import (
	"fmt"
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
)

// LocalMetrics are metrics in memory, for guests outside of a proxy. The zero
// value is empty. It is safe for concurrent use.
type LocalMetrics struct {
	mu     sync.Mutex
	byName map[string]*LocalMetric // guarded by mu
}

// Define implements Metrics.
func (l *LocalMetrics) Define(kind host.MetricKind, name string) (Metric, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.byName[name]
	if m == nil {
		if l.byName == nil {
			l.byName = make(map[string]*LocalMetric)
		}
		m = &LocalMetric{kind: kind}
		l.byName[name] = m
	}
	if m.kind != kind {
		return nil, fmt.Errorf("define metric: %s has another kind", name)
	}
	return m, nil
}

// Find returns the metric of that kind and name, if a guest has defined it.
func (l *LocalMetrics) Find(kind host.MetricKind, name string) (m *LocalMetric, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m = l.byName[name]
	return m, m != nil && m.kind == kind
}

// LocalMetric is one metric of LocalMetrics.
type LocalMetric struct {
	kind host.MetricKind

	mu      sync.Mutex
	value   uint64 // for a histogram the sum; guarded by mu
	records int    // guarded by mu
}

// Add implements Metric.
func (m *LocalMetric) Add(delta int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.value += uint64(delta)
}

// Record implements Metric.
func (m *LocalMetric) Record(value uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.records++
	if m.kind == host.Gauge {
		m.value = 0
	}
	m.value += value
}

// Value implements Metric. The value of a histogram is the sum of the recorded
// values.
func (m *LocalMetric) Value() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.value
}

// Records returns how often Record was called.
func (m *LocalMetric) Records() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.records
}
