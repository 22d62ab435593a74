package shared

import (
	"encoding/binary"
	"errors"
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
)

// MaxMetrics is the number of metrics that a plugin may define, over all its
// versions.
const MaxMetrics = 1000

// ErrTooManyMetrics is the error of Metrics.Define for a metric above MaxMetrics.
var ErrTooManyMetrics = errors.New("define metric: the plugin has too many")

// Metrics makes the metrics that the guests of one plugin define. It is safe
// for concurrent use. It returns the same metric for the same kind and name,
// also to a later version of the plugin.
type Metrics interface {
	// Define returns an error for a name that is not available, above all one
	// of a metric of another kind.
	Define(kind host.MetricKind, name string) (Metric, error)
}

// Metric is one metric of a guest. It is safe for concurrent use.
type Metric interface {
	Add(delta int64)     // counters (never below 0) and gauges
	Record(value uint64) // a gauge is set, a histogram observes, a counter grows by it
	Value() uint64       // counters and gauges
}

// MetricTable holds a plugin's metrics by their ids, which are the same in all
// of its VMs. Its methods are those of host.Env; they are safe for concurrent
// use.
type MetricTable struct {
	maker Metrics

	mu   sync.RWMutex
	rows []metricRow       // id-1; guarded by mu
	ids  map[string]uint32 // guarded by mu
}

type metricRow struct {
	kind   host.MetricKind
	metric Metric
}

// NewMetricTable returns an empty table. With a nil maker no metric can be
// defined.
func NewMetricTable(maker Metrics) *MetricTable {
	return &MetricTable{maker: maker, ids: make(map[string]uint32)}
}

// Define returns the id of a metric and makes the metric if needed.
// BadArgument: the name is longer than host.MaxMetricName, belongs to another
// kind or is not available. InternalFailure: there are too many metrics.
func (t *MetricTable) Define(kind host.MetricKind, name string) (uint32, host.Status) {
	if len(name) > host.MaxMetricName {
		return 0, host.BadArgument
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, ok := t.ids[name]; ok {
		if t.rows[id-1].kind != kind {
			return 0, host.BadArgument
		}
		return id, host.OK
	}
	if t.maker == nil || len(t.rows) >= MaxMetrics {
		return 0, host.InternalFailure
	}
	metric, err := t.maker.Define(kind, name)
	switch {
	case errors.Is(err, ErrTooManyMetrics):
		return 0, host.InternalFailure
	case err != nil:
		return 0, host.BadArgument
	}
	t.rows = append(t.rows, metricRow{kind, metric})
	id := uint32(len(t.rows))
	t.ids[name] = id
	return id, host.OK
}

func (t *MetricTable) row(id uint32) (metricRow, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if id == 0 || int64(id) > int64(len(t.rows)) {
		return metricRow{}, false
	}
	return t.rows[id-1], true
}

// Record sets a gauge, observes a value in a histogram, or increases a counter.
// NotFound: there is no such metric.
func (t *MetricTable) Record(id uint32, value uint64) host.Status {
	row, ok := t.row(id)
	if !ok {
		return host.NotFound
	}
	row.metric.Record(value)
	return host.OK
}

// Increment adds to a counter or a gauge. NotFound: there is no such metric.
// BadArgument: the counter would decrease, or the metric is a histogram.
func (t *MetricTable) Increment(id uint32, delta int64) host.Status {
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

// Value reads a counter or a gauge. NotFound: there is no such metric.
// BadArgument: the metric is a histogram, which has no value.
func (t *MetricTable) Value(id uint32) (uint64, host.Status) {
	row, ok := t.row(id)
	switch {
	case !ok:
		return 0, host.NotFound
	case row.kind == host.Histogram:
		return 0, host.BadArgument
	}
	return row.metric.Value(), host.OK
}

// Count is the foreign function pdproxy.v1.counter. args is the amount to add
// to a counter, an i64, and the counter's name; the result is the counter's
// value, an i64. BadArgument: args has another form, or the counter would
// decrease.
func (t *MetricTable) Count(args []byte) ([]byte, host.Status) {
	if len(args) < 9 || len(args)-8 > host.MaxMetricName {
		return nil, host.BadArgument
	}
	id, status := t.Define(host.Counter, string(args[8:]))
	if status == host.OK {
		status = t.Increment(id, int64(binary.LittleEndian.Uint64(args)))
	}
	if status != host.OK {
		return nil, status
	}
	value, status := t.Value(id)
	return binary.LittleEndian.AppendUint64(nil, value), status
}
