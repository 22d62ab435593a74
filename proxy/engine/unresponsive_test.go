package engine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// evictions returns how often the calls on i were checked since the last call of
// evictions.
func evictions(i *Instance) int { return i.Client.(*fakeClient).evictions() }

// TestSilence: an instance becomes silent when another instance answers and this
// one answers none of the probes that make it unhealthy. It stays silent until it
// answers a probe.
func TestSilence(t *testing.T) {
	hangs := func(e *fakeEngines, host string) { e.delay[host] = time.Minute }
	refuses := func(e *fakeEngines, host string) { e.down[host] = true }
	for name, tt := range map[string]struct {
		fails  func(e *fakeEngines, host string)
		others func(e *fakeEngines, host string) // nil: the other instances answer
		back   func(e *fakeEngines, host string) // nil: the instance answers
		silent bool
	}{
		"it hangs":                             {fails: hangs, silent: true},
		"it is not there":                      {fails: refuses, silent: true},
		"it is ill":                            {fails: func(e *fakeEngines, host string) { e.code[host] = 503 }},
		"it is slow":                           {fails: func(e *fakeEngines, host string) { e.delay[host] = 900 * time.Millisecond }},
		"nobody answers":                       {fails: hangs, others: hangs},
		"others are ill":                       {fails: hangs, others: func(e *fakeEngines, host string) { e.code[host] = 503 }, silent: true},
		"it is unhealthy after it has resumed": {fails: hangs, back: func(e *fakeEngines, host string) { e.code[host] = 503 }, silent: true},
		"it is a new process after it has resumed": {fails: refuses, back: hangs, silent: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "prefill", "fake"), f.spec("b", "decode", "fake")}, 0))
				f.start(t)
				a, b := f.get(t, "a"), f.get(t, "b")
				time.Sleep(time.Second)
				f.engines.set(func() {
					tt.fails(f.engines, "a:80")
					if tt.others != nil {
						tt.others(f.engines, "b:80")
					}
				})
				time.Sleep(4 * time.Second)
				synctest.Wait()
				if a.Unresponsive() || evictions(a)+evictions(b) > 0 {
					t.Fatal("silent after two probes")
				}
				time.Sleep(8 * time.Second)
				synctest.Wait()
				if a.Unresponsive() != tt.silent || b.Unresponsive() {
					t.Fatalf("silent: %t and %t, want %t and false", a.Unresponsive(), b.Unresponsive(), tt.silent)
				}
				if (evictions(a) > 10) != tt.silent || (evictions(b) > 10) != tt.silent {
					t.Error("evictions do not follow the silence of the instance")
				}
				if !tt.silent {
					return
				}
				f.engines.set(func() {
					f.engines.down["a:80"], f.engines.delay["a:80"] = false, 0
					if tt.back != nil {
						tt.back(f.engines, "a:80")
					}
				})
				time.Sleep(3 * time.Second)
				synctest.Wait()
				still := name == "it is a new process after it has resumed"
				evictions(a)
				time.Sleep(time.Second)
				if synctest.Wait(); a.Unresponsive() != still || (evictions(a) > 0) != still {
					t.Errorf("silent: %t, want %t", a.Unresponsive(), still)
				}
				f.must(t, f.Remove("a", time.Hour))
				if synctest.Wait(); a.Unresponsive() {
					t.Error("Unresponsive = true although no probe runs any more")
				}
			})
		})
	}
}

// TestOutageOfAll: this process is cut off from all engines for a while. Each engine is
// cut off, and back, at another moment between two probes. No engine is unresponsive.
func TestOutageOfAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		time.Sleep(100 * time.Millisecond) // the probes of b begin 0.1 s after those of a
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake")}, 0))
		a, b := f.get(t, "a"), f.get(t, "b")
		begin := time.Now().Add(-100 * time.Millisecond)
		for _, step := range []struct {
			at    time.Duration
			host  string
			delay time.Duration
		}{
			{1900 * time.Millisecond, "a:80", time.Minute}, {2200 * time.Millisecond, "b:80", time.Minute},
			{10050 * time.Millisecond, "b:80", 0}, {10500 * time.Millisecond, "a:80", 0},
		} {
			time.Sleep(time.Until(begin.Add(step.at)))
			f.engines.set(func() { f.engines.delay[step.host] = step.delay })
		}
		if a.State() != Unhealthy || b.State() != Unhealthy {
			t.Errorf("got states %v and %v", a.State(), b.State())
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if evictions(a)+evictions(b) > 0 || a.State() != Ready {
			t.Errorf("calls were given up after an outage of all engines; a is %v", a.State())
		}
	})
}

// TestSuspicion: the registry soon probes an instance again that did not answer,
// until its state is certain. A failed leg makes the next probe come sooner too.
// The number of failed legs does not make the probes more frequent.
func TestSuspicion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		h := *f.health.Load()
		h.SuspectInterval = config.Duration(250 * time.Millisecond)
		f.Configure(h, circuitOf3, config.Pairs{})
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake")}, 0))
		f.start(t)
		a := f.get(t, "a")
		time.Sleep(time.Millisecond) // just after a probe: the worst case
		f.engines.set(func() { f.engines.delay["a:80"] = time.Minute })
		const known = 2*time.Second + 3*time.Second + 2*250*time.Millisecond
		time.Sleep(known - 2*time.Millisecond)
		if synctest.Wait(); a.State() != Ready {
			t.Errorf("state %v, want Ready: the change came too early", a.State())
		}
		time.Sleep(2 * time.Millisecond)
		if synctest.Wait(); a.State() != Unhealthy || !a.Unresponsive() {
			t.Errorf("%v, silent %t, after %v", a.State(), a.Unresponsive(), known)
		}
		before := f.engines.count("a:80/live")
		time.Sleep(10 * time.Second)
		if n := f.engines.count("a:80/live") - before; n != 5 {
			t.Errorf("%d probes in ten seconds of a silent instance", n)
		}

		b := f.get(t, "b")
		before = f.engines.count("b:80/live")
		for range 1000 { // one leg fails each millisecond, for one second
			b.ProbeSoon()
			time.Sleep(time.Millisecond)
		}
		if n := f.engines.count("b:80/live") - before; n < 3 || n > 5 {
			t.Errorf("got %d probes in a second of failing legs", n)
		}
		h.SuspectInterval = 0
		f.Configure(h, circuitOf3, config.Pairs{})
		time.Sleep(2*time.Second + 100*time.Millisecond) // not at the time of a probe
		before = f.engines.count("b:80/live")
		for range 100 {
			b.ProbeSoon()
			time.Sleep(20 * time.Millisecond)
		}
		if n := f.engines.count("b:80/live") - before; n != 1 {
			t.Errorf("got %d probes in two seconds, want no early probe", n)
		}
	})
}

// TestProbeOfAStarvedProcess: a probe does not count as failed if its time-out fired
// much too late, because then the process itself had no processor time.
func TestProbeOfAStarvedProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		f.engines.set(func() { f.engines.stall = 1300 * time.Millisecond })
		time.Sleep(20 * time.Second)
		if synctest.Wait(); f.get(t, "a").State() != Ready {
			t.Error("probes count that ended late")
		}
		f.engines.set(func() { f.engines.stall = 1200 * time.Millisecond })
		time.Sleep(20 * time.Second)
		if synctest.Wait(); f.get(t, "a").State() != Unhealthy {
			t.Error("probes do not count that ended a little late")
		}
	})
}

// TestSilenceMirrored: a mirror abandons calls when its registry finds an instance
// silent. It stops when the instance answers the registry again.
func TestSilenceMirrored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "prefill", "fake"), f.spec("b", "decode", "fake")}, 0))
		f.start(t)
		m := mirrorOf(f, new(hearing))
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.Registry().Run(ctx) }()
		go f.Export(ctx, func(part Part, value []byte) {
			if err := m.Import(part, value); err != nil {
				t.Error(err)
			}
		})
		defer func() { stop(); <-done }()
		f.engines.set(func() { f.engines.delay["a:80"] = time.Minute })
		time.Sleep(20 * time.Second)
		synctest.Wait()
		a := m.Registry().Snapshot().Instance("a")
		if !a.Unresponsive() || evictions(a) == 0 {
			t.Fatalf("silent: %t", a.Unresponsive())
		}
		f.engines.set(func() { f.engines.delay["a:80"] = 0 })
		time.Sleep(3 * time.Second)
		evictions(a)
		time.Sleep(3 * time.Second)
		if synctest.Wait(); a.Unresponsive() || evictions(a) > 0 {
			t.Errorf("silent: %t", a.Unresponsive())
		}
	})
}

// TestDoubtIsReported: a failure on a mirror makes the registry probe sooner.
func TestDoubtIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		h := *f.health.Load()
		h.SuspectInterval = config.Duration(250 * time.Millisecond)
		f.Configure(h, circuitOf3, config.Pairs{})
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		m := mirrorOf(f, new(hearing))
		imports(t, m, f.Registry)
		time.Sleep(time.Second)
		before := f.engines.count("a:80/live")
		m.Registry().Snapshot().Instance("a").Breaker.Failure()
		f.must(t, f.Learn(1, observations(t, m.registry.reports.encode())))
		if synctest.Wait(); f.engines.count("a:80/live") != before+1 {
			t.Error("no early probe was sent")
		}
	})
}
