package filter

import (
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
)

// maxMetrics is how many metrics a plugin may define.
const maxMetrics = 1000

// metricTable is a plugin's metrics by the ids that its guests know them by, the
// same in all of its VMs. It is safe for concurrent use.
type metricTable struct {
	definer Metrics

	mu   sync.RWMutex
	rows []metricRow       // id-1; guarded by mu
	ids  map[string]uint32 // guarded by mu
}

type metricRow struct {
	kind   host.MetricKind
	metric Metric
}

// define returns the id of a metric, which is made if need be. BadArgument: the
// name has another kind or cannot be had. InternalFailure: there are too many.
func (t *metricTable) define(kind host.MetricKind, name string) (uint32, host.Status) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, ok := t.ids[name]; ok {
		if t.rows[id-1].kind != kind {
			return 0, host.BadArgument
		}
		return id, host.OK
	}
	if t.definer == nil || len(t.rows) >= maxMetrics {
		return 0, host.InternalFailure
	}
	metric, err := t.definer.Define(kind, name)
	if err != nil {
		return 0, host.BadArgument
	}
	if t.ids == nil {
		t.ids = make(map[string]uint32)
	}
	t.rows = append(t.rows, metricRow{kind, metric})
	id := uint32(len(t.rows))
	t.ids[name] = id
	return id, host.OK
}

func (t *metricTable) row(id uint32) (metricRow, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if id == 0 || int64(id) > int64(len(t.rows)) {
		return metricRow{}, false
	}
	return t.rows[id-1], true
}

// record sets a gauge, lets a histogram observe, or a counter grow.
func (t *metricTable) record(id uint32, value uint64) host.Status {
	row, ok := t.row(id)
	if !ok {
		return host.NotFound
	}
	row.metric.Record(value)
	return host.OK
}

// increment adds to a counter, which cannot shrink, or a gauge. A histogram has
// nothing to add to.
func (t *metricTable) increment(id uint32, delta int64) host.Status {
	row, ok := t.row(id)
	switch {
	case !ok:
		return host.NotFound
	case row.kind == host.Histogram, row.kind == host.Counter && delta < 0:
		return host.BadArgument
	}
	row.metric.Add(delta)
	return host.OK
}

// value reads a counter or a gauge. A histogram has no value.
func (t *metricTable) value(id uint32) (uint64, host.Status) {
	row, ok := t.row(id)
	switch {
	case !ok:
		return 0, host.NotFound
	case row.kind == host.Histogram:
		return 0, host.BadArgument
	}
	return row.metric.Value(), host.OK
}
