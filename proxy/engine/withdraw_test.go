package engine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestCallsAreWithdrawn: when an engine becomes unhealthy or its circuit opens, here or in the
// registry that a mirror follows, the calls to all engines are asked once whether they are
// wanted. Nothing else asks them.
func TestCallsAreWithdrawn(t *testing.T) {
	for name, tt := range map[string]struct {
		out  func(f *fleet, d *Instance)
		asks int
	}{
		"nothing":           {func(*fleet, *Instance) {}, 0},
		"a failure":         {func(_ *fleet, d *Instance) { d.Breaker.Failure() }, 0},
		"the circuit opens": {func(_ *fleet, d *Instance) { d.Breaker.Trip() }, 1},
		"the circuit opens by failures": {func(_ *fleet, d *Instance) {
			for range 10 {
				d.Breaker.Failure()
			}
		}, 1},
		"the engine does not answer well": {func(f *fleet, _ *Instance) { f.engines.set(func() { f.engines.code["d:80"] = 503 }) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake")}, 0))
				f.start(t)
				m := mirrorOf(f, new(hearing))
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() { m.Registry().Run(ctx); close(ended) }()
				defer func() { stop(); <-ended }()
				time.Sleep(time.Second)
				imports(t, m, f.Registry)
				asks := func(r *Registry) int { return r.Snapshot().Instance("p").Client.(*fakeClient).withdrawals() }
				if here, there := asks(f.Registry), asks(m.Registry()); here+there != 0 {
					t.Fatalf("the calls were asked %d and %d times while all engines are ready", here, there)
				}
				tt.out(f, f.get(t, "d"))
				time.Sleep(time.Minute)
				synctest.Wait()
				imports(t, m, f.Registry)
				synctest.Wait()
				if here, there := asks(f.Registry), asks(m.Registry()); here != tt.asks || there != tt.asks {
					t.Errorf("the calls were asked %d times, and %d times in the mirror, want %d", here, there, tt.asks)
				}
			})
		})
	}
}
