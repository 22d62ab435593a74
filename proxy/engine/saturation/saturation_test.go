package saturation

import (
	"math"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestSeconds: prefill counts the queue by the measured time of a token, or by that of the
// fleet without a measurement; decode counts its tokens by decodeMicros.
func TestSeconds(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		name string
		fill func(c *load.Counter)
		role abi.Role
		want float64 // seconds
	}{
		{"measured", func(c *load.Counter) { c.Prefill.Measure(1000, time.Second); c.HoldPrefill(3000, 2000) }, abi.RolePrefill, 2},
		{"by the fleet", func(c *load.Counter) { c.HoldPrefill(3000, 2000) }, abi.RolePrefill, 4},
		{"no queue at decode", func(c *load.Counter) { c.HoldPrefill(3000, 2000) }, abi.RoleDecode, 0},
		{"streams", func(c *load.Counter) { c.Hold(1_000_000) }, abi.RoleDecode, decodeMicros},
		{"both", func(c *load.Counter) { c.Prefill.Measure(1000, time.Second); c.HoldPrefill(3000, 2000) }, abi.RoleBoth, 2},
	} {
		i := &engine.Instance{Role: tt.role, Load: make([]load.Counter, 1)}
		tt.fill(&i.Load[0])
		var l Load
		l.add(i, 2000, Limits{}, now)
		if math.Abs(l.Seconds()-tt.want) > 0.01 || l.Running != 1 || l.Ready != 1 {
			t.Errorf("%s: %.3f s with %d requests in %d engines, want %.3f s with 1", tt.name, l.Seconds(), l.Running, l.Ready, tt.want)
		}
	}
}

// TestScore: a target is as saturated as its waiting requests or its KV memory, the pool as the
// mean of its targets. A target without a report is not saturated.
func TestScore(t *testing.T) {
	now := time.Now()
	said := func(running, waiting int32, usage float32) *load.Report {
		return &load.Report{At: now, Every: time.Second, Running: running, Waiting: waiting, Queued: -1, Usage: usage}
	}
	old := said(9, 9, 1)
	old.At = now.Add(-time.Minute)
	limits := Limits{QueueDepth: 5, KVUsage: 0.8}
	for _, tt := range []struct {
		name    string
		reports []*load.Report // nil: none
		role    abi.Role
		limits  Limits
		further int
		want    float64
	}{
		{"waiting", []*load.Report{said(3, 5, 0.1)}, abi.RolePrefill, limits, 0, 1},
		{"one less", []*load.Report{said(3, 4, 0.1)}, abi.RolePrefill, limits, 0, 0.8},
		{"KV memory", []*load.Report{said(3, 1, 0.8)}, abi.RoleDecode, limits, 0, 1},
		{"KV memory of both", []*load.Report{said(3, 0, 0.4)}, abi.RoleBoth, limits, 0, 0.5},
		{"KV memory of prefill does not count", []*load.Report{said(3, 1, 0.8)}, abi.RolePrefill, limits, 0, 0.2},
		{"KV memory is off", []*load.Report{said(3, 1, 1)}, abi.RoleDecode, Limits{QueueDepth: 5}, 0, 0.2},
		{"all is off", []*load.Report{said(3, 9, 1)}, abi.RoleDecode, Limits{}, 9, 0},
		{"mean", []*load.Report{said(3, 10, 0), said(3, 0, 0)}, abi.RolePrefill, limits, 0, 1},
		{"no report", []*load.Report{said(3, 8, 0), nil}, abi.RolePrefill, limits, 0, 0.8},
		{"old report", []*load.Report{old}, abi.RolePrefill, limits, 0, 0},
		{"no engine", nil, abi.RolePrefill, limits, 9, 0},
		{"further ones", []*load.Report{said(3, 2, 0), said(3, 2, 0)}, abi.RolePrefill, limits, 6, 1},
		{"further ones run at once", []*load.Report{said(3, 0, 0), said(3, 0, 0)}, abi.RolePrefill, limits, 6, 0},
		{"further ones fill the room", []*load.Report{said(3, 0, 0), said(3, 0, 0)}, abi.RolePrefill, limits, 16, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var l Load
			for _, r := range tt.reports {
				i := &engine.Instance{Role: tt.role, Load: make([]load.Counter, 1)}
				if r != nil {
					i.Load[0].Report(*r, i.Load[0].Mark())
				}
				l.add(i, 1, tt.limits, now)
			}
			if got := l.Score(tt.further, tt.limits); math.Abs(got-tt.want) > 1e-6 {
				t.Errorf("score %v, want %v", got, tt.want)
			}
		})
	}
}

// TestRanks: each rank of an engine is a target, and an engine counts once in the seconds.
func TestRanks(t *testing.T) {
	now := time.Now()
	i := &engine.Instance{Role: abi.RolePrefill, Load: make([]load.Counter, 2)}
	i.Load[0].Report(load.Report{At: now, Every: time.Second, Waiting: 10, Queued: -1}, i.Load[0].Mark())
	i.Load[0].HoldQueued(4000)
	var l Load
	l.add(i, 1000, Limits{QueueDepth: 5}, now)
	if l.Ready != 1 || l.Waiting != 10 || l.Seconds() != 2 {
		t.Errorf("%d engines, %d wait, %v s, want 1, 10 and 2", l.Ready, l.Waiting, l.Seconds())
	}
	if s := l.Score(0, Limits{QueueDepth: 5}); s < 0.999 || s > 1.201 { // 10 of rank 0, and none of rank 1
		t.Errorf("score %v", s)
	}
}

// TestOfUnknownModel: a model that no engine serves is not saturated.
func TestOfUnknownModel(t *testing.T) {
	r := engine.New(engine.Options{Health: config.Default().Health})
	if delay, each, saturated := Of(r.Snapshot(), "none", 100, Limits{QueueDepth: 1}, time.Now()); saturated || delay != 0 || each != 0 {
		t.Errorf("an unknown model is saturated for %v", delay)
	}
}

// TestStep: a further request has as many uncached tokens as the requests of late had in the mean,
// and all targets that run prefill compute the requests at the same time.
func TestStep(t *testing.T) {
	now := time.Now()
	type target struct {
		role     abi.Role
		placed   []int64 // uncached tokens of its requests
		measured time.Duration
	}
	const p, d, both = abi.RolePrefill, abi.RoleDecode, abi.RoleBoth
	for _, tt := range []struct {
		name    string
		targets []target
		want    float64
	}{
		{"no engine", nil, 0},
		{"no request", []target{{p, nil, time.Millisecond}}, 0},
		{"one engine", []target{{p, []int64{1000, 3000}, time.Millisecond}}, 2},
		{"the default time of a token", []target{{p, []int64{1000, 3000}, 0}}, 4},
		{"two engines", []target{{p, []int64{1000}, time.Millisecond}, {both, []int64{3000}, time.Millisecond}}, 1},
		{"different speeds", []target{{p, []int64{1000}, time.Millisecond}, {p, []int64{1000}, 3 * time.Millisecond}}, 0.75},
		{"decode does not compute prompts", []target{{p, []int64{1000}, time.Millisecond}, {d, []int64{9000}, time.Millisecond}}, 1},
	} {
		pool := &engine.Pool{}
		for _, of := range tt.targets {
			i := &engine.Instance{Role: of.role, Load: make([]load.Counter, 1)}
			for _, n := range of.placed {
				i.Load[0].Placed(n, now)
			}
			i.Load[0].Prefill.Measure(1, of.measured)
			pool.Ready = append(pool.Ready, engine.Row{Target: engine.Target{Instance: i}})
		}
		if got := step(pool, 2000, now); math.Abs(got-tt.want) > 0.001 {
			t.Errorf("%s: %v s, want %v s", tt.name, got, tt.want)
		}
	}
}
