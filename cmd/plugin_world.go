package cmd

import (
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// trialWorld is what a guest meets in `pdproxy plugin inspect` and `test`: a
// configuration, a log, shared data, queues and metrics of its own, and nothing
// of a proxy: no streams, no upstreams, hardly a property.
type trialWorld struct {
	log    io.Writer
	level  host.LogLevel
	config []byte

	data    map[string]trialValue
	cas     uint32
	queues  []trialQueue
	metrics []*trialMetric
	notes   []string // of pdproxy.v1.note, since they were last taken
}

type trialValue struct {
	value []byte
	cas   uint32
}

type trialQueue struct {
	name  string
	items [][]byte
}

// trialMetric is a metric that nobody reads but its guest. It is safe for
// concurrent use.
type trialMetric struct {
	name  string
	kind  host.MetricKind
	value atomic.Uint64
}

// Add, Record and Value implement filter.Metric.
func (m *trialMetric) Add(delta int64) { m.value.Add(uint64(delta)) }

// Record sets a gauge; a counter grows, and a histogram has no one value.
func (m *trialMetric) Record(value uint64) {
	switch m.kind {
	case host.Gauge:
		m.value.Store(value)
	case host.Counter:
		m.value.Add(value)
	}
}

// Value is that of a counter or a gauge.
func (m *trialMetric) Value() uint64 { return m.value.Load() }

func newTrialWorld(log io.Writer, level host.LogLevel, config string) *trialWorld {
	return &trialWorld{log: log, level: level, config: []byte(config), data: map[string]trialValue{}}
}

var logLevelNames = [...]string{"trace", "debug", "info", "warn", "error", "critical"}

// Log prints a guest's line.
func (w *trialWorld) Log(level host.LogLevel, message string) {
	if level >= w.level && int(level) < len(logLevelNames) {
		fmt.Fprintf(w.log, "guest: %s: %s\n", logLevelNames[level], message)
	}
}

func (w *trialWorld) LogLevel() host.LogLevel { return w.level }

func (w *trialWorld) VMConfig() []byte     { return nil }
func (w *trialWorld) PluginConfig() []byte { return w.config }

// SetTickPeriod is heard and not followed: a trial has no time to wait.
func (w *trialWorld) SetTickPeriod(uint32, time.Duration) {}

func (w *trialWorld) Stream(uint32) host.Stream { return nil }

// Property knows the names that old C++ guests insist on at their start.
func (w *trialWorld) Property(_ uint32, path []string) ([]byte, host.Status) {
	if len(path) == 1 && slices.Contains([]string{"plugin_name", "plugin_root_id", "plugin_vm_id"}, path[0]) {
		return nil, host.OK
	}
	return nil, host.NotFound
}

func (w *trialWorld) SetProperty(uint32, []string, []byte) host.Status { return host.NotFound }

func (w *trialWorld) SharedData(key string) ([]byte, uint32, host.Status) {
	v, ok := w.data[key]
	if !ok {
		return nil, 0, host.NotFound
	}
	return v.value, v.cas, host.OK
}

func (w *trialWorld) SetSharedData(key string, value []byte, cas uint32) host.Status {
	if old, ok := w.data[key]; ok && cas != 0 && cas != old.cas {
		return host.CASMismatch
	}
	w.cas++
	w.data[key] = trialValue{value: slices.Clone(value), cas: w.cas}
	return host.OK
}

func (w *trialWorld) RegisterQueue(_ uint32, name string) uint32 {
	if id, status := w.ResolveQueue("", name); status == host.OK {
		return id
	}
	w.queues = append(w.queues, trialQueue{name: name})
	return uint32(len(w.queues))
}

func (w *trialWorld) ResolveQueue(_, name string) (uint32, host.Status) {
	i := slices.IndexFunc(w.queues, func(q trialQueue) bool { return q.name == name })
	if i < 0 {
		return 0, host.NotFound
	}
	return uint32(i) + 1, host.OK
}

func (w *trialWorld) Enqueue(queue uint32, value []byte) host.Status {
	if queue == 0 || int(queue) > len(w.queues) {
		return host.NotFound
	}
	q := &w.queues[queue-1]
	q.items = append(q.items, slices.Clone(value))
	return host.OK
}

func (w *trialWorld) Dequeue(queue uint32) ([]byte, host.Status) {
	if queue == 0 || int(queue) > len(w.queues) {
		return nil, host.NotFound
	}
	q := &w.queues[queue-1]
	if len(q.items) == 0 {
		return nil, host.Empty
	}
	value := q.items[0]
	q.items = q.items[1:]
	return value, host.OK
}

func (w *trialWorld) DefineMetric(kind host.MetricKind, name string) (uint32, host.Status) {
	i := slices.IndexFunc(w.metrics, func(m *trialMetric) bool { return m.name == name })
	if i < 0 {
		i = len(w.metrics)
		w.metrics = append(w.metrics, &trialMetric{name: name, kind: kind})
	}
	return uint32(i) + 1, host.OK
}

// metric returns the metric of that id, nil for none.
func (w *trialWorld) metric(id uint32) *trialMetric {
	if id == 0 || int(id) > len(w.metrics) {
		return nil
	}
	return w.metrics[id-1]
}

func (w *trialWorld) RecordMetric(id uint32, value uint64) host.Status {
	m := w.metric(id)
	if m == nil {
		return host.NotFound
	}
	m.Record(value)
	return host.OK
}

func (w *trialWorld) IncrementMetric(id uint32, delta int64) host.Status {
	m := w.metric(id)
	if m == nil || m.kind == host.Histogram || m.kind == host.Counter && delta < 0 {
		return host.BadArgument
	}
	m.Add(delta)
	return host.OK
}

func (w *trialWorld) Metric(id uint32) (uint64, host.Status) {
	m := w.metric(id)
	if m == nil || m.kind == host.Histogram {
		return 0, host.BadArgument
	}
	return m.Value(), host.OK
}

func (w *trialWorld) HTTPCall(uint32, *host.HTTPCall) (uint32, host.Status) {
	return 0, host.BadArgument // no upstream is known here
}

// Foreign takes notes; the rest would need a proxy.
func (w *trialWorld) Foreign(_ uint32, name string, args []byte) ([]byte, host.Status) {
	if name != abi.ForeignNote {
		return nil, host.NotFound
	}
	w.notes = append(w.notes, string(args))
	return nil, host.OK
}

// takeNotes returns the notes since the last call.
func (w *trialWorld) takeNotes() []string {
	notes := w.notes
	w.notes = nil
	return notes
}
