package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// moves returns how often the streams of i were asked to move since the last call of moves.
func moves(i *Instance) int {
	c := i.Client.(*fakeClient)
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.moved
	c.moved = 0
	return n
}

// moveAfter is the time after which the streams of a fleet of newMoving move.
const moveAfter = 5 * time.Second

// newMoving returns a fleet with the engines a, which has a request in flight, and b.
func newMoving(t *testing.T) (f *fleet, a *Instance) {
	f = newFleet(t)
	f.o.MoveAfter = func() time.Duration { return moveAfter }
	f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake")}, 0))
	f.start(t)
	a = f.get(t, "a")
	a.Load[0].Hold(1)
	return f, a
}

// TestMoves: the streams of a move moveAfter after the begin of a drain that says so, or of its
// leave.
func TestMoves(t *testing.T) {
	a := func(f *fleet) config.Engine { return f.spec("a", "both", "fake") }
	for name, tt := range map[string]struct {
		do    func(f *fleet) error
		after func(f *fleet) error // half of moveAfter later; nil: nothing
		want  bool
	}{
		"a drain":                {do: func(f *fleet) error { return f.Drain("a", true) }, want: true},
		"a drain without a move": {do: func(f *fleet) error { return f.Drain("a", false) }},
		"another drain":          {do: func(f *fleet) error { return f.Drain("b", true) }},
		"the same drain again": {
			do:    func(f *fleet) error { return f.Drain("a", true) },
			after: func(f *fleet) error { return f.Drain("a", true) }, want: true,
		},
		"a drain, then without a move": {
			do:    func(f *fleet) error { return f.Drain("a", true) },
			after: func(f *fleet) error { return f.Drain("a", false) },
		},
		"a drain that is cancelled": {
			do:    func(f *fleet) error { return f.Drain("a", true) },
			after: func(f *fleet) error { return f.Undrain("a") },
		},
		"a drain, then it leaves": {
			do:    func(f *fleet) error { return f.Drain("a", true) },
			after: func(f *fleet) error { return f.Remove("a", time.Minute) }, want: true,
		},
		"it is removed": {do: func(f *fleet) error { return f.Remove("a", time.Minute) }, want: true},
		"it is removed and added again": {
			do:    func(f *fleet) error { return f.Remove("a", time.Minute) },
			after: func(f *fleet) error { return f.Add(a(f)) },
		},
		"its source drops it": {
			do: func(f *fleet) error {
				return f.Apply(SourceStatic, []config.Engine{f.spec("b", "both", "fake")}, time.Minute)
			},
			want: true,
		},
		"its configuration changes": {do: func(f *fleet) error {
			changed := a(f)
			changed.Weight = 2
			return f.Apply(SourceStatic, []config.Engine{changed, f.spec("b", "both", "fake")}, time.Minute)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, a := newMoving(t)
				f.must(t, tt.do(f))
				time.Sleep(moveAfter / 2)
				if tt.after != nil {
					f.must(t, tt.after(f))
				}
				time.Sleep(moveAfter/2 - time.Millisecond)
				if synctest.Wait(); moves(a) > 0 {
					t.Error("the streams move too early")
				}
				time.Sleep(moveAfter)
				if n := moves(a); (n > 10) != tt.want || !tt.want && n > 0 {
					t.Errorf("the streams were asked %d times to move", n)
				}
			})
		})
	}
}

// TestDrain: a drained engine gets no requests until the end of the drain. It stays, and its probes
// go on.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, a := newMoving(t)
		ready := func() int {
			pool, _ := f.Snapshot().Pool("m")
			return len(pool.Ready)
		}
		f.must(t, f.Drain("a", true))
		if a.State() != Draining || ready() != 1 {
			t.Errorf("a is %s, %d engines are ready", a.State(), ready())
		}
		time.Sleep(time.Minute)
		if f.get(t, "a") != a || a.State() != Draining || a.Gone() {
			t.Errorf("a is %s", a.State())
		}
		f.must(t, f.Apply(SourceStatic, []config.Engine{a.Spec, f.get(t, "b").Spec}, 0)) // its source knows nothing of it
		if f.get(t, "a") != a || len(f.Snapshot().Instances) != 2 {
			t.Error("a was replaced")
		}
		f.engines.set(func() { f.engines.down["a:80"] = true })
		time.Sleep(20 * time.Second)
		if a.State() != Draining || a.probed() != Unhealthy || !a.Unresponsive() {
			t.Errorf("a is %s, for the probes %s", a.State(), a.probed())
		}
		f.must(t, f.Undrain("a"))
		if a.State() != Unhealthy {
			t.Errorf("a is %s", a.State())
		}
		f.must(t, f.Drain("a", true))
		f.engines.set(func() { f.engines.down["a:80"] = false })
		time.Sleep(20 * time.Second)
		if a.State() != Draining || ready() != 1 {
			t.Errorf("a is %s, %d engines are ready", a.State(), ready())
		}
		f.must(t, f.Undrain("a"))
		synctest.Wait()
		moves(a)
		time.Sleep(time.Minute)
		if a.State() != Ready || ready() != 2 || moves(a) > 0 {
			t.Errorf("a is %s, %d engines are ready", a.State(), ready())
		}
		f.must(t, f.Remove("a", time.Second))
		for _, err := range []error{f.Drain("a", true), f.Undrain("a"), f.Drain("x", false)} {
			if !errors.Is(err, ErrUnknown) {
				t.Errorf("got %v", err)
			}
		}
	})
}

// TestDrainMirrored: a mirror moves the streams of an engine that its registry drains, and does so
// no more when the drain ends.
func TestDrainMirrored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := newMoving(t)
		m := mirrorOf(f, new(hearing))
		m.registry.o.MoveAfter = f.o.MoveAfter
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.Registry().Run(ctx) }()
		go f.Export(ctx, func(part Part, value []byte) {
			if err := m.Import(part, value); err != nil {
				t.Error(err)
			}
		})
		defer func() { stop(); <-done }()
		time.Sleep(time.Second)
		a, b := m.Registry().Snapshot().Instance("a"), m.Registry().Snapshot().Instance("b")
		a.Load[0].Hold(1)
		b.Load[0].Hold(1)
		f.must(t, f.Drain("a", true))
		time.Sleep(moveAfter - time.Millisecond)
		if a.State() != Draining || moves(a) > 0 {
			t.Errorf("a is %s", a.State())
		}
		time.Sleep(time.Second)
		if moves(a) == 0 || moves(b) > 0 {
			t.Error("the streams do not move")
		}
		f.must(t, f.Undrain("a"))
		time.Sleep(time.Second)
		moves(a)
		time.Sleep(time.Minute)
		if a.State() != Ready || moves(a) > 0 {
			t.Errorf("a is %s, and its streams move", a.State())
		}
		f.must(t, f.Remove("b", time.Minute)) // the home forgets it before its request here has ended
		time.Sleep(moveAfter + time.Second)
		if b.State() != Draining || moves(b) == 0 {
			t.Error("the streams of an engine that has left do not move")
		}
	})
}
