package trial

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// metrics are a guest's metrics, which nobody reads but itself.
type metrics struct {
	mu     sync.Mutex
	byName map[string]*metric // guarded by mu
}

func newMetrics() *metrics { return &metrics{byName: make(map[string]*metric)} }

// Define implements shared.Metrics.
func (m *metrics) Define(kind host.MetricKind, name string) (shared.Metric, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.byName[name]
	if v == nil {
		v = &metric{kind: kind}
		m.byName[name] = v
	}
	if v.kind != kind {
		return nil, fmt.Errorf("metric %s is of another kind", name)
	}
	return v, nil
}

// metric is one of them. It is safe for concurrent use.
type metric struct {
	kind  host.MetricKind
	value atomic.Uint64
}

// Add implements shared.Metric.
func (m *metric) Add(delta int64) { m.value.Add(uint64(delta)) }

// Record implements shared.Metric. A histogram has no one value.
func (m *metric) Record(value uint64) {
	switch m.kind {
	case host.Gauge:
		m.value.Store(value)
	case host.Counter:
		m.value.Add(value)
	}
}

// Value implements shared.Metric.
func (m *metric) Value() uint64 { return m.value.Load() }
