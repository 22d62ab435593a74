package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestSettled: a registry is settled when the first probe of each instance has ended, at the latest
// after health.timeout, and when the expected lists have come.
func TestSettled(t *testing.T) {
	for _, tt := range []struct {
		name  string
		slow  time.Duration // until the second engine answers a request of its probe
		fails bool          // the second engine refuses the probe
		list  time.Duration // until an expected list comes; 0: none is expected
		want  time.Duration
	}{
		{name: "at once"},
		{name: "slow", slow: 300 * time.Millisecond, want: 600 * time.Millisecond}, // two requests
		{name: "refused", fails: true},
		{name: "silent", slow: time.Hour, want: time.Second},
		{name: "facts are late", slow: 700 * time.Millisecond, want: time.Second},
		{name: "list", list: 2 * time.Second, want: 2 * time.Second},
		{name: "no list", list: time.Hour, want: FirstList},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				a, b := f.spec("a", "both", "none"), f.spec("b", "both", "none")
				f.engines.facts["b:80"] = "model other\n"
				f.engines.delay["b:80"] = tt.slow
				if tt.fails {
					f.engines.dialing["b:80"] = errors.New("connection refused")
				}
				f.must(t, f.Apply(SourceStatic, []config.Engine{a, b}, 0))
				if tt.list > 0 {
					time.AfterFunc(tt.list, f.Expect(FirstList))
				}
				if f.Settled() {
					t.Error("settled before Run")
				}
				began := time.Now()
				f.start(t)
				for !f.Settled() {
					if !f.Snapshot().Awaits("other") {
						t.Fatal("not settled, but no engine of the model is awaited")
					}
					<-f.Changed()
					synctest.Wait()
				}
				if took := time.Since(began); took != tt.want {
					t.Errorf("settled after %v, want %v", took, tt.want)
				}
				if f.Snapshot().Awaits("") {
					t.Error("settled, but engines are awaited")
				}
				time.Sleep(2 * time.Hour) // the timers of the test
			})
		})
	}
}

// TestAwaits: an engine that comes later is awaited for its models, or for all while they are not
// known, and does not make the registry unsettled.
func TestAwaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		a := f.spec("a", "both", "none")
		f.must(t, f.Apply(SourceStatic, []config.Engine{a}, 0))
		f.start(t)
		named, unnamed, encoder := f.spec("named", "both", "none"), f.spec("unnamed", "both", "none"), f.spec("encoder", "encode", "none")
		named.Model, encoder.Model = "x", "y"
		for _, e := range []config.Engine{named, unnamed, encoder} {
			f.engines.set(func() { f.engines.delay[e.Name+":80"] = 400 * time.Millisecond })
		}
		check := func(want map[string]bool) {
			t.Helper()
			for model, want := range want {
				if got := f.Snapshot().Awaits(model); got != want {
					t.Errorf("awaits %q: %v, want %v", model, got, want)
				}
			}
			if !f.Settled() {
				t.Error("not settled any more")
			}
		}
		f.must(t, f.Apply(SourceStatic, []config.Engine{a, named, encoder}, 0))
		check(map[string]bool{"x": true, "y": false, "m": false})
		f.must(t, f.Apply(SourceStatic, []config.Engine{a, named, encoder, unnamed}, 0))
		check(map[string]bool{"x": true, "y": true, "m": true, "z": true})
		time.Sleep(900 * time.Millisecond)
		synctest.Wait()
		check(map[string]bool{"": false, "x": false, "z": false})
		if s := f.get(t, "named").State(); s != Ready {
			t.Errorf("named is %v", s)
		}
	})
}

// TestMirrorSettles: a mirror is settled when it has the engines, and the exporting registry has
// looked at all of them. After a change of the configuration it awaits the engines that it lacks.
func TestMirrorSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		a := f.spec("a", "both", "none")
		f.engines.delay["a:80"] = 100 * time.Millisecond
		f.must(t, f.Apply(SourceStatic, []config.Engine{a}, 0))
		f.start(t)
		var heard hearing
		m := mirrorOf(f, &heard)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.Registry().Run(ctx) }()
		defer func() { stop(); <-done }()
		here := m.Registry()
		synctest.Wait()
		if here.Settled() || !here.Snapshot().Awaits("m") {
			t.Error("settled without an import")
		}
		imports(t, m, f.Registry)
		if here.Settled() || !here.Snapshot().Awaits("m") {
			t.Error("settled before the probe")
		}
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		imports(t, m, f.Registry)
		if !here.Settled() || here.Snapshot().Awaits("") {
			t.Error("not settled after the probe")
		}

		m.Await([]string{"a"})
		if here.Snapshot().Awaits("x") {
			t.Error("awaits an engine that it has")
		}
		m.Await([]string{"a", "b"})
		if !here.Snapshot().Awaits("x") {
			t.Error("does not await the new engine")
		}
		f.must(t, f.Apply(SourceStatic, []config.Engine{a, f.spec("b", "both", "none")}, 0))
		synctest.Wait()
		imports(t, m, f.Registry)
		if here.Snapshot().Awaits("x") {
			t.Error("awaits the new engine, which has come")
		}
		m.Await([]string{"never"})
		time.Sleep(FirstList)
		synctest.Wait()
		if here.Snapshot().Awaits("x") {
			t.Error("awaits an engine without end")
		}
	})
}
