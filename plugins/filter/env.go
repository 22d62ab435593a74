package filter

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// vm implements host.Env. All of these methods run inside a guest call, in the
// goroutine that holds v.lock.
var (
	_ host.Env     = (*vm)(nil)
	_ host.RootEnv = (*vm)(nil)
)

// Log implements host.Env.
func (v *vm) Log(level host.LogLevel, message string) {
	if !v.p.served.Load() {
		v.complaint = max(v.complaint, complaintIn(message))
	}
	if !v.p.deps.Host.Log(time.Now(), message) {
		return
	}
	v.p.deps.Log.Log(context.Background(), level.Slog(), message)
}

// LogLevel implements host.Env.
func (v *vm) LogLevel() host.LogLevel { return host.LowestLevel(v.p.deps.Log) }

// VMConfig implements host.Env.
func (v *vm) VMConfig() []byte { return []byte(v.p.spec.VMConfig) }

// PluginConfig implements host.Env.
func (v *vm) PluginConfig() []byte { return []byte(v.p.spec.Config) }

// Stream implements host.Env.
func (v *vm) Stream(ctx uint32) host.Stream {
	if f := v.stream(ctx); f != nil && !f.dead.Load() {
		return f
	}
	return nil // also when the stream continues without the filter
}

func (v *vm) stream(ctx uint32) *filter {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.streams[ctx]
}

// SetTickPeriod implements host.Env.
func (v *vm) SetTickPeriod(_ uint32, period time.Duration) {
	v.mu.Lock()
	v.period, v.rearm = period, true
	v.mu.Unlock()
	v.wakeBackground()
}

// SharedData implements host.Env.
func (v *vm) SharedData(key string) ([]byte, uint32, host.Status) { return v.p.space.Get(key) }

// SetSharedData implements host.Env.
func (v *vm) SetSharedData(key string, value []byte, cas uint32) host.Status {
	return v.p.space.Set(key, value, cas)
}

// RegisterQueue implements host.Env.
func (v *vm) RegisterQueue(_ uint32, name string) uint32 {
	if v.probing { // only VMs that serve may receive items
		return v.p.space.Queue(name)
	}
	return v.p.space.Register(name, v, v.queueReady)
}

// ResolveQueue implements host.Env.
func (v *vm) ResolveQueue(vmID, name string) (uint32, host.Status) {
	return v.p.space.Resolve(vmID, name)
}

// Enqueue implements host.Env.
func (v *vm) Enqueue(queue uint32, value []byte) host.Status {
	return v.p.space.Enqueue(queue, value)
}

// Dequeue implements host.Env.
func (v *vm) Dequeue(queue uint32) ([]byte, host.Status) { return v.p.space.Dequeue(queue) }

// DefineMetric implements host.Env.
func (v *vm) DefineMetric(kind host.MetricKind, name string) (uint32, host.Status) {
	return v.p.metrics.Define(kind, name)
}

// RecordMetric implements host.Env.
func (v *vm) RecordMetric(id uint32, value uint64) host.Status { return v.p.metrics.Record(id, value) }

// IncrementMetric implements host.Env.
func (v *vm) IncrementMetric(id uint32, delta int64) host.Status {
	return v.p.metrics.Increment(id, delta)
}

// Metric implements host.Env.
func (v *vm) Metric(id uint32) (uint64, host.Status) { return v.p.metrics.Value(id) }

// RootDone implements host.RootEnv.
func (v *vm) RootDone(uint32) host.Status {
	if v.rootDone == nil {
		return host.NotFound
	}
	close(v.rootDone)
	v.rootDone = nil
	return host.OK
}
