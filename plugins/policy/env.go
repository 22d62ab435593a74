package policy

import (
	"context"
	"log/slog"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// World is the environment that the VMs of one policy module share. A policy
// has its configuration, its log, metrics, and the shared data and queues of
// its vm_id. It has no streams, no ticks and no calls to upstreams; filters
// have those. It is safe for concurrent use: all VMs of a version use the same
// one.
type World struct {
	setting Setting
	space   *shared.Space
}

// Setting holds the parts of a World. All fields except the texts and those
// that may be nil are required.
type Setting struct {
	Name, Config, VMConfig, VMID, RootID string // as in the configuration of the plugin

	Level   host.LogLevel // the lowest level of the guest's log that is kept
	Log     *slog.Logger
	Store   *shared.Store
	Metrics *shared.MetricTable

	Conversations shared.Conversations // nil: none
	Host          *budget.Host         // nil: the World makes its own
}

var _ host.Env = (*World)(nil)

// NewWorld returns a World. The caller must call Close.
func NewWorld(s Setting) *World {
	if s.Host == nil {
		s.Host = budget.NewHost(0, nil)
	}
	return &World{setting: s, space: s.Store.Open(s.VMID)}
}

// Close releases the shared data, after the last VM has ended.
func (w *World) Close() { w.space.Release() }

// Log implements host.Env.
func (w *World) Log(level host.LogLevel, message string) {
	if !w.setting.Host.Log(time.Now(), message) {
		return
	}
	w.setting.Log.Log(context.Background(), level.Slog(), message)
}

// LogLevel implements host.Env.
func (w *World) LogLevel() host.LogLevel { return w.setting.Level }

// VMConfig implements host.Env.
func (w *World) VMConfig() []byte { return []byte(w.setting.VMConfig) }

// PluginConfig implements host.Env.
func (w *World) PluginConfig() []byte { return []byte(w.setting.Config) }

// SetTickPeriod implements host.Env.
func (w *World) SetTickPeriod(_ uint32, period time.Duration) {
	if period > 0 {
		w.setting.Log.Warn("the plugin requests ticks, but policies get none")
	}
}

// Stream implements host.Env.
func (w *World) Stream(uint32) host.Stream { return nil }

// Property implements host.Env.
func (w *World) Property(_ uint32, path []string) ([]byte, host.Status) {
	if len(path) != 1 {
		return nil, host.NotFound
	}
	switch path[0] {
	case "plugin_name":
		return []byte(w.setting.Name), host.OK
	case "plugin_root_id":
		return []byte(w.setting.RootID), host.OK
	case "plugin_vm_id":
		return []byte(w.setting.VMID), host.OK
	}
	return nil, host.NotFound
}

// SetProperty implements host.Env.
func (w *World) SetProperty(uint32, []string, []byte) host.Status { return host.NotFound }

// SharedData implements host.Env.
func (w *World) SharedData(key string) ([]byte, uint32, host.Status) { return w.space.Get(key) }

// SetSharedData implements host.Env.
func (w *World) SetSharedData(key string, value []byte, cas uint32) host.Status {
	return w.space.Set(key, value, cas)
}

// RegisterQueue implements host.Env. Policies get no callbacks for new items. So a policy
// must not replace a filter as the listener of a queue.
func (w *World) RegisterQueue(_ uint32, name string) uint32 {
	return w.space.Queue(name)
}

// ResolveQueue implements host.Env.
func (w *World) ResolveQueue(vmID, name string) (uint32, host.Status) {
	return w.space.Resolve(vmID, name)
}

// Enqueue implements host.Env.
func (w *World) Enqueue(queue uint32, value []byte) host.Status {
	return w.space.Enqueue(queue, value)
}

// Dequeue implements host.Env.
func (w *World) Dequeue(queue uint32) ([]byte, host.Status) { return w.space.Dequeue(queue) }

// DefineMetric implements host.Env.
func (w *World) DefineMetric(kind host.MetricKind, name string) (uint32, host.Status) {
	return w.setting.Metrics.Define(kind, name)
}

// RecordMetric implements host.Env.
func (w *World) RecordMetric(id uint32, value uint64) host.Status {
	return w.setting.Metrics.Record(id, value)
}

// IncrementMetric implements host.Env.
func (w *World) IncrementMetric(id uint32, delta int64) host.Status {
	return w.setting.Metrics.Increment(id, delta)
}

// Metric implements host.Env.
func (w *World) Metric(id uint32) (uint64, host.Status) { return w.setting.Metrics.Value(id) }

// HTTPCall implements host.Env.
func (w *World) HTTPCall(uint32, *host.HTTPCall) (uint32, host.Status) {
	return 0, host.Unimplemented
}

// Foreign implements host.Env.
func (w *World) Foreign(_ uint32, name string, args []byte) ([]byte, host.Status) {
	switch name {
	case abi.ForeignCounter:
		return w.setting.Metrics.Count(args)
	case abi.ForeignConversationGet:
		return shared.ConversationGet(w.setting.Conversations, args)
	case abi.ForeignConversationPut:
		return shared.ConversationPut(w.setting.Conversations, args)
	}
	return nil, host.NotFound
}
