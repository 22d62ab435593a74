package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

var errRefused = fmt.Errorf("dial: %w", syscall.ECONNREFUSED)

// TestRefusedProbe: an engine is unhealthy after one refused connection of a probe, and
// ready after one answered probe. Other failures need the configured number.
func TestRefusedProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		a := f.get(t, "a")
		f.said()
		f.engines.set(func() { f.engines.dialing["a:80"] = errRefused })
		time.Sleep(2 * time.Second)
		if synctest.Wait(); a.State() != Unhealthy {
			t.Errorf("%v after a refused probe", a.State())
		}
		f.engines.set(func() { f.engines.dialing["a:80"] = nil })
		time.Sleep(2 * time.Second)
		if synctest.Wait(); a.State() != Ready {
			t.Errorf("%v after an answered probe", a.State())
		}
		if got := f.said(); got != "a unhealthy, a restarted, a ready" {
			t.Errorf("hook calls %q", got)
		}
		for _, line := range []string{`level=INFO msg="engine is ready" engine=a`, `level=WARN msg="engine is unhealthy" engine=a`, `level=INFO msg="engine is ready again" engine=a`} {
			if n := strings.Count(f.logged(), line); n != 1 {
				t.Errorf("%d lines %s: %s", n, line, f.logged())
			}
		}
		f.engines.set(func() { f.engines.dialing["a:80"] = errors.New("connection reset") })
		time.Sleep(4 * time.Second)
		if synctest.Wait(); a.State() != Ready {
			t.Errorf("got %v after two other failures", a.State())
		}
	})
}

// TestRefusedLeg: a refused connection of a leg opens the circuit at once and causes a
// probe. An answered probe closes the circuit.
func TestRefusedLeg(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		h := *f.health.Load()
		h.SuspectInterval = config.Duration(250 * time.Millisecond)
		f.Configure(h, circuitOf3, config.Pairs{})
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("p", "prefill", "boot")}, 0))
		f.start(t)
		a, p := f.get(t, "a"), f.get(t, "p")
		time.Sleep(time.Millisecond)
		a.Refused()
		p.Refused()
		if a.Breaker.Circuit(time.Now()) != circuit.Open {
			t.Error("the circuit is not open")
		}
		time.Sleep(250 * time.Millisecond)
		if synctest.Wait(); a.Breaker.Circuit(time.Now()) != circuit.Closed || a.State() != Ready {
			t.Errorf("%v, circuit %v, though the engine answers", a.State(), a.Breaker.Circuit(time.Now()))
		}
		if p.Breaker.Circuit(time.Now()) != circuit.Open {
			t.Error("the answer of a bootstrap server closed the circuit of its engine")
		}
		time.Sleep(time.Second)
		f.engines.set(func() { f.engines.dialing["a:80"] = errRefused })
		a.Refused()
		if synctest.Wait(); a.State() != Unhealthy {
			t.Errorf("%v", a.State())
		}
	})
}

// TestProbeConnectionLost: when the connection of the probes ends, the registry probes
// the engine at once and requests its facts.
func TestProbeConnectionLost(t *testing.T) {
	var health, facts atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/facts" {
			facts.Add(1)
		} else {
			health.Add(1)
		}
		fmt.Fprintln(w, "model m")
	}))
	conns := make(chan net.Conn, 100)
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateNew {
			conns <- c
		}
	}
	s.Start()
	defer s.Close()
	r := New(Options{
		Health:    config.Health{Interval: config.Duration(200 * time.Millisecond), Timeout: config.Duration(10 * time.Second), UnhealthyAfter: 3, HealthyAfter: 2},
		Protocols: func(string) (Protocol, bool) { return fakeProtocol{health: "/live"}, true },
		NewClient: func(config.Engine) (upstream.Client, error) { return new(fakeClient), nil },
	})
	if err := r.Apply(SourceStatic, []config.Engine{{Name: "a", URL: s.URL, Role: "both", Connector: "fake", Ranks: 1}}, 0); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	defer func() { stop(); <-done }()
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("never: %s", what)
			}
		}
	}
	until("the connection has existed for an interval", func() bool { return health.Load() >= 3 })
	before, learned := health.Load(), facts.Load()
	(<-conns).Close()
	until("the facts are requested again", func() bool { return facts.Load() > learned })
	if n := health.Load() - before; n > 2 { // every fifteenth probe also requests facts
		t.Errorf("%d probes before that", n)
	}
}
