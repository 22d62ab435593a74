package plugins

import (
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/filter"
)

// maxMetrics is how many metrics a policy may define.
const maxMetrics = 1000

// metricTable is a policy's metrics by the ids that its guests know them by, the
// same in all of its VMs. It is safe for concurrent use.
type metricTable struct {
	maker filter.Metrics // nil: none can be defined

	mu   sync.RWMutex
	rows []definedMetric   // id-1; guarded by mu
	ids  map[string]uint32 // guarded by mu
}

type definedMetric struct {
	filter.Metric
	kind host.MetricKind
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
	if t.maker == nil || len(t.rows) >= maxMetrics {
		return 0, host.InternalFailure
	}
	m, err := t.maker.Define(kind, name)
	if err != nil {
		return 0, host.BadArgument
	}
	if t.ids == nil {
		t.ids = make(map[string]uint32)
	}
	t.rows = append(t.rows, definedMetric{m, kind})
	t.ids[name] = uint32(len(t.rows))
	return t.ids[name], host.OK
}

// with calls do with a metric unless its kind is refused. NotFound: there is no
// such metric. BadArgument: refused.
func (t *metricTable) with(id uint32, do func(filter.Metric), refused func(host.MetricKind) bool) host.Status {
	t.mu.RLock()
	defer t.mu.RUnlock()
	switch {
	case id == 0 || int64(id) > int64(len(t.rows)):
		return host.NotFound
	case refused(t.rows[id-1].kind):
		return host.BadArgument
	}
	do(t.rows[id-1])
	return host.OK
}
