package engine

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestProbeStates leads an instance through all states. There is a probe every 2 s. Each
// step changes the engine and then waits.
func TestProbeStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		spec := f.spec("a", "both", "fake")
		f.engines.down["a:80"] = true
		f.must(t, f.Apply(SourceStatic, []config.Engine{spec}, 0))
		f.start(t)
		a := f.get(t, "a")
		time.Sleep(time.Second) // later changes happen between two probes
		for n, s := range []struct {
			do   func()
			wait time.Duration
			want State
			said string
		}{
			{func() {}, 10 * time.Second, Down, ""},
			{func() { f.engines.down["a:80"] = false }, 2 * time.Second, Ready, "a ready"},
			// Two failures are fewer than the required three.
			{func() { f.engines.down["a:80"] = true }, 4 * time.Second, Ready, ""},
			{func() { f.engines.down["a:80"] = false }, 2 * time.Second, Ready, ""},
			{func() { f.engines.code["a:80"] = 503 }, 4 * time.Second, Ready, ""},
			{func() {}, 2 * time.Second, Unhealthy, "a unhealthy"},
			{func() { f.engines.code["a:80"] = 200 }, 2 * time.Second, Unhealthy, ""},
			{func() { f.engines.code["a:80"] = 500 }, 2 * time.Second, Unhealthy, ""},
			{func() { f.engines.code["a:80"] = 204 }, 2 * time.Second, Unhealthy, ""},
			{func() {}, 2 * time.Second, Ready, "a restarted, a ready"},
			// A probe without an answer fails after its own limit of one second.
			{func() { f.engines.delay["a:80"] = time.Minute }, 9 * time.Second, Unhealthy, "a unhealthy"},
		} {
			f.engines.set(s.do)
			time.Sleep(s.wait)
			synctest.Wait()
			if got := a.State(); got != s.want {
				t.Fatalf("step %d: state %v, want %v", n, got, s.want)
			}
			if got := f.said(); got != s.said {
				t.Fatalf("step %d: hook calls %q, want %q", n, got, s.said)
			}
		}
		if time.Since(a.Since()) > 3*time.Second {
			t.Errorf("since %v", a.Since())
		}
	})
}

// TestProbeReadyAtOnce: one successful probe makes a new instance ready.
func TestProbeReadyAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		if f.Snapshot().Ready() {
			t.Error("ready before the first probe")
		}
		f.start(t)
		if !f.Snapshot().Ready() || f.get(t, "a").State() != Ready {
			t.Error("not ready after the first probe")
		}
		if n := f.engines.count("a:80/live"); n != 1 {
			t.Errorf("got %d probes", n)
		}
	})
}

func TestProbeRestart(t *testing.T) {
	const base = "model m\npage 16\n"
	refuse := func(e *fakeEngines) { e.down["a:80"] = true }
	late := func(e *fakeEngines) { e.delay["a:80"] = time.Minute }
	for _, tt := range []struct {
		name          string
		before, after string
		away          time.Duration
		want          string
		fails         func(*fakeEngines)
	}{
		{"same epoch, was away", base + "epoch 1", base + "epoch 1", 6 * time.Second, "a unhealthy, a ready", refuse},
		{"other epoch", base + "epoch 1", base + "epoch 2", 6 * time.Second, "a unhealthy, a restarted, a ready", refuse},
		{"no epoch, was away", base, base, 6 * time.Second, "a unhealthy, a restarted, a ready", refuse},
		{"no epoch, one failed probe", base, base, 2 * time.Second, "", refuse},
		{"other epoch, one failed probe", base + "epoch 1", base + "epoch 2", 2 * time.Second, "a restarted", refuse},
		{"other facts, one failed probe", base, "model m\npage 32", 2 * time.Second, "a restarted, a ready", refuse},
		{"an adapter came, one failed probe", base, base + "model lora", 2 * time.Second, "a ready", refuse},
		{"same epoch, was late", base + "epoch 1", base + "epoch 1", 9 * time.Second, "a unhealthy, a ready", late},
		{"other epoch, was late", base + "epoch 1", base + "epoch 2", 9 * time.Second, "a unhealthy, a restarted, a ready", late},
		{"no epoch, was late", base, base, 9 * time.Second, "a unhealthy, a ready", late},
		{"no epoch, was late and other facts", base, "model m\npage 32", 9 * time.Second, "a unhealthy, a restarted, a ready", late},
		{"no epoch, refused once while late", base, base, 12 * time.Second, "a unhealthy, a restarted, a ready", func(e *fakeEngines) {
			late(e)
			time.AfterFunc(8*time.Second, func() { e.set(func() { e.delay["a:80"] = 0; refuse(e) }) })
			time.AfterFunc(10*time.Second, func() { e.set(func() { e.down["a:80"] = false; late(e) }) })
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.engines.facts["a:80"] = tt.before
				f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake")}, 0))
				f.start(t)
				a, b := f.get(t, "a"), f.get(t, "b")
				f.Pair(Target{Instance: a}, Target{Instance: b}).Success()
				for range 3 {
					a.Breaker.Failure()
				}
				f.said()
				time.Sleep(time.Second) // later changes happen between two probes
				f.engines.set(func() { tt.fails(f.engines) })
				time.Sleep(tt.away)
				f.engines.set(func() {
					f.engines.down["a:80"], f.engines.delay["a:80"], f.engines.facts["a:80"] = false, 0, tt.after
				})
				time.Sleep(6 * time.Second)
				synctest.Wait()
				if got := f.said(); got != tt.want {
					t.Errorf("hook calls %q, want %q", got, tt.want)
				}
				restarted := strings.Contains(tt.want, "restarted")
				if got := len(f.Pairs()) == 0; got != restarted {
					t.Errorf("pairs dropped: %v", got)
				}
				if got := a.Breaker.Failures() == 0; got != restarted {
					t.Errorf("breaker reset: %v", got)
				}
			})
		})
	}
}

// TestProbeEpochInHealth: if the health answer contains the epoch, the registry detects a
// restart even without a failed probe.
func TestProbeEpochInHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.engines.facts["a:80"] = "model m\nepoch 1"
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "epoch")}, 0))
		f.start(t)
		f.said()
		f.engines.set(func() { f.engines.facts["a:80"] = "model m\nepoch 2" })
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := f.said(); got != "a restarted" {
			t.Errorf("hook calls %q, want a restart", got)
		}
		if got := f.get(t, "a").Facts().Epoch; got != "2" {
			t.Errorf("epoch %q", got)
		}
		f.engines.set(func() { f.engines.facts["a:80"] = "bad" })
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if got := f.said(); got != "a unhealthy" {
			t.Errorf("hook calls %q, want unhealthy", got)
		}
	})
}

// TestProbeLearnsAnew: the registry requests the facts from time to time, even without a
// failed probe.
func TestProbeLearnsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		time.Sleep(20 * time.Second)
		if n := f.engines.count("a:80/facts"); n != 1 {
			t.Errorf("got %d requests for facts in 10 probes, want 1", n)
		}
		f.engines.set(func() { f.engines.facts["a:80"] = "model m\nmodel lora" })
		time.Sleep(relearnEvery * 2 * time.Second)
		synctest.Wait()
		if got := strings.Join(f.Snapshot().Models(), " "); got != "lora m" {
			t.Errorf("models %q", got)
		}
	})
}

// TestProbeNeedsFacts: an instance is not ready if its facts cannot be read or name no
// model, or have no room in a message to the workers.
func TestProbeNeedsFacts(t *testing.T) {
	for _, tt := range []struct {
		name, facts, model string
		want               State
	}{
		{"bad facts", "bad", "", Down},
		{"no model", "page 16", "", Down},
		{"no model, but configured", "page 16", "mine", Ready},
		{"a long name", "model " + strings.Repeat("<", 3<<20), "", Down},
		{"a long name, but configured", "model " + strings.Repeat("<", 3<<20), "mine", Down},
		{"many models", strings.Repeat("model m\n", maxModels+1), "", Down},
		{"as many models as possible", strings.Repeat("model m\n", maxModels-1) + "model m", "", Ready},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.engines.facts["a:80"] = tt.facts
				spec := f.spec("a", "both", "fake")
				spec.Model = tt.model
				f.must(t, f.Apply(SourceStatic, []config.Engine{spec}, 0))
				f.start(t)
				if got := f.get(t, "a").State(); got != tt.want {
					t.Errorf("state %v, want %v", got, tt.want)
				}
				if n := len(f.exportMembers()); n > 16<<20 { // link.MaxFrame
					t.Errorf("the membership has %d bytes", n)
				}
				if unlearned := f.Snapshot().Unlearned; unlearned != (tt.want == Down && tt.model == "") {
					t.Errorf("unlearned %v", unlearned)
				}
			})
		})
	}
}

// TestProbeBootstrap: a prefill instance is probed at its bootstrap port. The port comes
// from the facts. After a failure the facts are requested again.
func TestProbeBootstrap(t *testing.T) {
	for _, tt := range []struct {
		name, facts string
		host        string
		port        int
		want        string
	}{
		{"asked", "model m\nboot 9000", "", 0, "p:9000"},
		{"default", "model m", "", 0, "p:8998"},
		{"configured", "model m\nboot 9000", "10.0.0.9", 7000, "10.0.0.9:7000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.engines.facts["p:80"] = tt.facts
				p := f.spec("p", "prefill", "boot")
				p.BootstrapHost, p.BootstrapPort = tt.host, tt.port
				f.must(t, f.Apply(SourceStatic, []config.Engine{p, f.spec("d", "decode", "boot")}, 0))
				f.start(t)
				if n := f.engines.count(tt.want + "/health"); n != 1 {
					t.Errorf("%d probes at %s", n, tt.want)
				}
				if n := f.engines.count("d:80/health"); n != 1 {
					t.Errorf("%d probes of decode", n)
				}
				if !f.Snapshot().Ready() {
					t.Error("not ready")
				}
				if host, port := f.get(t, "p").bootstrap(f.get(t, "p").Facts()); net.JoinHostPort(host, strconv.Itoa(port)) != tt.want {
					t.Errorf("bootstrap at %s:%d", host, port)
				}
				if tt.port != 0 {
					return
				}
				time.Sleep(time.Second)
				f.engines.set(func() { f.engines.down["p:80"], f.engines.down[tt.want] = true, true })
				time.Sleep(6 * time.Second)
				f.engines.set(func() { f.engines.down["p:80"], f.engines.facts["p:80"] = false, "model m\nboot 9001" })
				time.Sleep(4 * time.Second)
				synctest.Wait()
				if got := f.get(t, "p").State(); got != Ready {
					t.Errorf("state %v after the bootstrap port moved", got)
				}
			})
		})
	}
}

// TestProbeRegistry: the facts of a prefill instance include the facts of its bootstrap
// registry. Without the registry's answer the instance is not ready.
func TestProbeRegistry(t *testing.T) {
	for name, tt := range map[string]struct {
		registry string
		down     bool
		want     State
	}{
		"asked":     {registry: "page 64", want: Ready},
		"not ready": {registry: "bad", want: Down},
		"away":      {down: true, want: Down},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.engines.facts["p:80"], f.engines.facts["d:80"] = "model m\nboot 9000\npage 16", "model m\nboot 9000\npage 64"
				f.engines.facts["p:9000"], f.engines.down["p:9000"] = tt.registry, tt.down
				f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "registry"), f.spec("d", "decode", "registry")}, 0))
				f.start(t)
				if got := f.get(t, "p").State(); got != tt.want {
					t.Errorf("prefill is %v, want %v", got, tt.want)
				}
				if f.Snapshot().Ready() != (tt.want == Ready) {
					t.Error("the pair is ready without the page size of the registry, or not ready with it")
				}
				if n := f.engines.count("d:9000/registry/facts"); n != 0 {
					t.Errorf("decode's registry got %d requests, want 0", n)
				}
			})
		})
	}
}

// TestRegistryProbed: every probe also requests a registry that reports the epoch.
// Without its answer the probe fails. A new epoch means that the engine has restarted.
func TestRegistryProbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.engines.facts["p:80"], f.engines.facts["d:80"], f.engines.facts["p:8998"] = "model m", "model m", "bad"
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "probed"), f.spec("d", "decode", "probed")}, 0))
		f.start(t)
		if got := f.get(t, "p").State(); got != Down || f.get(t, "d").State() != Ready {
			t.Errorf("prefill is %v, decode %v", got, f.get(t, "d").State())
		}
		f.engines.set(func() { f.engines.facts["p:8998"] = "epoch 1" })
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if got := f.get(t, "p"); got.State() != Ready || got.Facts().Epoch != "1" {
			t.Errorf("state %v, facts %+v", got.State(), got.Facts())
		}
		f.said()
		f.engines.set(func() { f.engines.facts["p:8998"] = "epoch 2" })
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if got := f.said(); !strings.Contains(got, "p restarted") || f.get(t, "p").Facts().Epoch != "2" {
			t.Errorf("hook calls %q", got)
		}
		f.engines.set(func() { f.engines.down["p:8998"] = true })
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if got := f.get(t, "p").State(); got != Unhealthy {
			t.Errorf("state %v without the bootstrap server", got)
		}
		if n := f.engines.count("d:8998/facts"); n != 0 {
			t.Errorf("decode's bootstrap port got %d requests, want 0", n)
		}
	})
}

// TestProbeRequest: the probe's path is below the path of the URL, the probe has the key,
// and it follows no redirect.
func TestProbeRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		spec := f.spec("a", "both", "fake")
		spec.URL = "http://a:80/base/"
		spec.APIKeyFile = "key"
		spec.HealthPath = "/mine"
		f.engines.code["a:80"] = 302
		f.must(t, f.Apply(SourceStatic, []config.Engine{spec}, 0))
		f.start(t)
		if n := f.engines.count("a:80/base/mine"); n != 1 {
			t.Errorf("%d probes at the configured path", n)
		}
		if f.engines.auth != "Bearer key" {
			t.Errorf("Authorization %q", f.engines.auth)
		}
		if got := f.get(t, "a").State(); got != Down {
			t.Errorf("a redirect made the engine %v", got)
		}
	})
}

func TestProbeIntervalFollowsConfigure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		h := *f.health.Load()
		h.Interval = config.Duration(10 * time.Second)
		f.Configure(h, circuitOf3, config.Pairs{})
		time.Sleep(2*time.Second + 30*time.Second)
		synctest.Wait()
		if n := f.engines.count("a:80/live"); n != 5 {
			t.Errorf("got %d probes, want one at 0 s, one at 2 s and three 10 s apart", n)
		}
	})
}

func TestProbeTakesConfiguredWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		spec := f.spec("a", "both", "fake")
		spec.Wire = "g3"
		f.must(t, f.Apply(SourceStatic, []config.Engine{spec}, 0))
		f.start(t)
		if got := f.get(t, "a").Facts().Wire; got != "g3" {
			t.Errorf("wire %q", got)
		}
	})
}

// TestProbeErrorsHideTheURL: log lines contain no URL, because a URL may contain a
// password.
func TestProbeErrorsHideTheURL(t *testing.T) {
	err := bare(&url.Error{Op: "Get", URL: "http://user:secret@a/", Err: context.DeadlineExceeded})
	if !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
	p := &prober{i: &Instance{asks: http.DefaultClient}}
	_, _, err = p.get(t.Context(), &config.Health{Timeout: config.Duration(time.Second)}, "http://user:secret@a\x7f", "/x")
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
}

// A probe that this host could not send does not change the state of the engine.
func TestProbeWithoutDescriptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		a := f.get(t, "a")
		time.Sleep(time.Second)
		full := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)}
		set := func(err error, code int) {
			f.engines.set(func() { f.engines.dialing["a:80"], f.engines.code["a:80"] = err, code })
			time.Sleep(20 * time.Second)
			synctest.Wait()
		}
		for n, s := range []struct {
			err  error
			code int
			want State
		}{
			{nil, 200, Ready},
			{full, 200, Ready},
			{errors.New("connection refused"), 200, Unhealthy},
			{full, 200, Unhealthy},
			{nil, 200, Ready},
		} {
			set(s.err, s.code)
			if got := a.State(); got != s.want {
				t.Errorf("step %d: %v, want %v", n, got, s.want)
			}
			if a.Unresponsive() {
				t.Errorf("step %d: the engine counts as silent", n)
			}
		}
	})
}
