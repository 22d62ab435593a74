package plugins

import (
	"context"
	"encoding/binary"
	"log/slog"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// policyEnv is the world of a policy's VM. Beside its configuration and its log
// a policy has the shared data and the queues of its vm_id and metrics; it has
// no streams, no ticks and no calls to upstreams, for which there are filters.
// It is safe for concurrent use: all VMs of a version have the same one.
type policyEnv struct {
	spec    *Spec
	log     *slog.Logger
	level   host.LogLevel
	store   *shared.Store
	space   *shared.Space
	metrics *metricTable
}

var _ host.Env = (*policyEnv)(nil)

// levels are the guests' log levels as the log knows them.
var levels = [...]slog.Level{
	host.LogTrace: slog.LevelDebug - 4, host.LogDebug: slog.LevelDebug, host.LogInfo: slog.LevelInfo,
	host.LogWarn: slog.LevelWarn, host.LogError: slog.LevelError, host.LogCritical: slog.LevelError + 4,
}

// lowest is the lowest level that the log keeps.
func lowest(log *slog.Logger) host.LogLevel {
	for level, l := range levels {
		if log.Enabled(context.Background(), l) {
			return host.LogLevel(level)
		}
	}
	return host.LogCritical
}

// Log implements host.Env.
func (e *policyEnv) Log(level host.LogLevel, message string) {
	e.log.Log(context.Background(), levels[min(level, host.LogCritical)], message)
}

// LogLevel implements host.Env.
func (e *policyEnv) LogLevel() host.LogLevel { return e.level }

// VMConfig implements host.Env.
func (e *policyEnv) VMConfig() []byte { return []byte(e.spec.VMConfig) }

// PluginConfig implements host.Env.
func (e *policyEnv) PluginConfig() []byte { return []byte(e.spec.Config) }

// SetTickPeriod implements host.Env.
func (e *policyEnv) SetTickPeriod(_ uint32, period time.Duration) {
	if period > 0 {
		e.log.Warn("the plugin asks for ticks, which policies do not get")
	}
}

// Stream implements host.Env.
func (e *policyEnv) Stream(uint32) host.Stream { return nil }

// Property implements host.Env.
func (e *policyEnv) Property(_ uint32, path []string) ([]byte, host.Status) {
	if len(path) != 1 {
		return nil, host.NotFound
	}
	switch path[0] {
	case "plugin_name":
		return []byte(e.spec.Name), host.OK
	case "plugin_root_id":
		return []byte(e.spec.RootID), host.OK
	case "plugin_vm_id":
		return []byte(e.spec.VMID), host.OK
	}
	return nil, host.NotFound
}

// SetProperty implements host.Env.
func (e *policyEnv) SetProperty(uint32, []string, []byte) host.Status { return host.NotFound }

// SharedData implements host.Env.
func (e *policyEnv) SharedData(key string) ([]byte, uint32, host.Status) { return e.space.Get(key) }

// SetSharedData implements host.Env.
func (e *policyEnv) SetSharedData(key string, value []byte, cas uint32) host.Status {
	return e.space.Set(key, value, cas)
}

// RegisterQueue implements host.Env. Policies are not told of items, so that one
// must not take a queue from a filter that is.
func (e *policyEnv) RegisterQueue(_ uint32, name string) uint32 {
	if queue, status := e.store.Resolve(e.spec.VMID, name); status == host.OK {
		return queue
	}
	return e.space.Register(name, e, func(uint32) {})
}

// ResolveQueue implements host.Env.
func (e *policyEnv) ResolveQueue(vmID, name string) (uint32, host.Status) {
	if vmID == "" {
		vmID = e.spec.VMID
	}
	return e.store.Resolve(vmID, name)
}

// Enqueue implements host.Env.
func (e *policyEnv) Enqueue(queue uint32, value []byte) host.Status {
	return e.store.Enqueue(queue, value)
}

// Dequeue implements host.Env.
func (e *policyEnv) Dequeue(queue uint32) ([]byte, host.Status) { return e.store.Dequeue(queue) }

// DefineMetric implements host.Env.
func (e *policyEnv) DefineMetric(kind host.MetricKind, name string) (uint32, host.Status) {
	return e.metrics.define(kind, name)
}

// RecordMetric implements host.Env.
func (e *policyEnv) RecordMetric(id uint32, value uint64) host.Status {
	return e.metrics.with(id, func(m filter.Metric) { m.Record(value) }, func(host.MetricKind) bool { return false })
}

// IncrementMetric implements host.Env. A counter cannot shrink, and a histogram
// has nothing to add to.
func (e *policyEnv) IncrementMetric(id uint32, delta int64) host.Status {
	return e.metrics.with(id, func(m filter.Metric) { m.Add(delta) }, func(k host.MetricKind) bool {
		return k == host.Histogram || k == host.Counter && delta < 0
	})
}

// Metric implements host.Env. A histogram has no value.
func (e *policyEnv) Metric(id uint32) (value uint64, status host.Status) {
	status = e.metrics.with(id, func(m filter.Metric) { value = m.Value() },
		func(k host.MetricKind) bool { return k == host.Histogram })
	return value, status
}

// HTTPCall implements host.Env.
func (e *policyEnv) HTTPCall(uint32, *host.HTTPCall) (uint32, host.Status) {
	return 0, host.Unimplemented
}

// Foreign implements host.Env.
func (e *policyEnv) Foreign(_ uint32, name string, args []byte) ([]byte, host.Status) {
	if name == abi.ForeignCounter {
		return e.count(args)
	}
	return nil, host.NotFound
}

// count adds to a counter of the plugin's and returns its value. args is what to
// add, 8 bytes, and the name.
func (e *policyEnv) count(args []byte) ([]byte, host.Status) {
	if len(args) < 9 {
		return nil, host.BadArgument
	}
	id, status := e.DefineMetric(host.Counter, string(args[8:]))
	if status == host.OK {
		status = e.IncrementMetric(id, int64(binary.LittleEndian.Uint64(args)))
	}
	if status != host.OK {
		return nil, status
	}
	value, status := e.Metric(id)
	return binary.LittleEndian.AppendUint64(nil, value), status
}

// close gives the shared data back.
func (e *policyEnv) close() {
	e.space.Forget(e)
	e.space.Release()
}
