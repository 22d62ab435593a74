package exchange_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestWarmUp: two engines need two seconds to connect. With warm-up the first user's
// request takes as long as the hundredth. Without it, the first request takes two seconds
// longer.
func TestWarmUp(t *testing.T) {
	for _, warm := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			const connect, prompt, first = 2 * time.Second, 30 * time.Millisecond, 10 * time.Millisecond
			var once sync.Once
			engines := []*world.Engine{
				{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
					time.Sleep(prompt)
					c.JSON(200, world.NIXLAnswer)
				}},
				{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
					once.Do(func() { time.Sleep(connect) })
					time.Sleep(first)
					c.JSON(200, world.DoneAnswer)
				}},
			}
			w := world.New(t, world.Setup{Config: func(c *config.Config) { c.Pairs.WarmUp = warm }, Engines: engines})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			var running sync.WaitGroup
			running.Go(func() { w.Warm(ctx) })
			time.Sleep(10 * time.Second)
			if rows := w.Registry.Pairs(); warm && (len(rows) != 1 || rows[0].State != "ready") || !warm && len(rows) != 0 {
				t.Errorf("pairs %+v", rows)
			}
			var times []time.Duration
			for range 100 {
				began := time.Now()
				if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
					t.Fatalf("got status %d: %s", a.Status, a.Body)
				}
				times = append(times, time.Since(began))
			}
			want := prompt + first
			if !warm {
				want += connect
			}
			if times[0] != want || times[99] != prompt+first {
				t.Errorf("warm-up %t: the first request took %v, the hundredth %v", warm, times[0], times[99])
			}
			if n := w.Metric("pdproxy_exchanges_total"); n != 100 {
				t.Errorf("got %v counted exchanges", n)
			}
			if n := w.Metric("pdproxy_pair_warmups_total"); warm != (n == 1) {
				t.Errorf("warm-up %t: got %v counted", warm, n)
			}
			for _, e := range engines {
				for n, leg := range e.Seen() { // the first one is the warm-up
					if got := leg.Header["Content-Type"]; len(got) != 1 || got[0] != "application/json" {
						t.Errorf("warm-up %t: leg %d of engine %s has a body of type %q", warm, n, e.Name, got)
					}
				}
			}
			cancel()
			running.Wait()
		})
	}
}

// TestWarmUpEnds: a warm-up that hangs ends after timeouts.handshake, and at once if the
// proxy ends.
func TestWarmUpEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{
			Config: func(c *config.Config) {
				c.Pairs.WarmUp = true
				c.Timeouts.Handshake = config.Duration(7 * time.Second)
			},
			Engines: []*world.Engine{
				{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.NIXLAnswer) }},
				{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.Hold() }},
			},
		})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); w.Warm(ctx) }()
		failed := func() float64 { return w.Metric("pdproxy_pair_warmups_total", "failed") }
		time.Sleep(7*time.Second - time.Millisecond)
		if failed() != 0 {
			t.Error("failed too soon")
		}
		time.Sleep(2 * time.Millisecond)
		if failed() != 1 {
			t.Errorf("got %v failed warm-ups", failed())
		}
		if p := w.Registry.Pairs(); p[0].LastError != "timeout" && p[0].Failures != 0 {
			t.Errorf("pairs %+v", p)
		}
		time.Sleep(3 * time.Second) // the next warm-up runs
		cancel()
		<-done
		time.Sleep(time.Minute) // clean-ups
	})
}

// TestWarmUpWithoutKV: if no KV was transferred, the pair is not ready, even if decode
// has answered. If the answer of prefill shows a fault, the pair is broken.
func TestWarmUpWithoutKV(t *testing.T) {
	for name, tt := range map[string]struct {
		answer, state, last string
		failures            int
	}{
		"no parameters":  {world.DoneAnswer, "unknown", "", 0},
		"a foreign host": {strings.Replace(world.NIXLAnswer, "p.test", "169.254.169.254", 1), "broken", "foreign_host", 1},
	} {
		world.Run(t, name, func(t *testing.T) {
			w := world.New(t, world.Setup{
				Config: func(c *config.Config) { c.Pairs.WarmUp = true },
				Engines: []*world.Engine{
					{Name: "p", Role: "prefill", Connector: "vllm-nixl", KVHosts: "p.test", Serve: func(c *world.Conn, _ int) { c.JSON(200, tt.answer) }},
					{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
						if strings.Contains(c.Leg.Body, "kv_transfer_params") {
							t.Errorf("decode received %s", c.Leg.Body)
						}
						c.JSON(200, world.DoneAnswer)
					}},
				},
			})
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() { defer close(done); w.Warm(ctx) }()
			time.Sleep(time.Second)
			if n := w.Metric("pdproxy_pair_warmups_total", "failed"); n != 1 {
				t.Errorf("got %v failed warm-ups", n)
			}
			if p := w.Registry.Pairs()[0]; p.State != tt.state || p.Failures != tt.failures || p.LastError != tt.last {
				t.Errorf("pair %+v", p)
			}
			cancel()
			<-done
		})
	}
}

// stalePair is a world of two SGLang prefill engines and one decode engine, which keeps the address
// of an earlier process of p: both legs of the pair wait. heal repairs the pair. waited returns the
// number of requests of p that have waited, refuse makes p refuse requests without a client's key.
type stalePair struct {
	*world.World
	mu      sync.Mutex
	healed  bool // guarded by mu
	refuses bool // guarded by mu
	waited  int  // guarded by mu
}

func (s *stalePair) set(healed, refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.healed, s.refuses = healed, refuses
}

func (s *stalePair) waits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waited
}

// serve is the answer of p, and of d for a request of p.
func (s *stalePair) serve(c *world.Conn, p bool) {
	s.mu.Lock()
	stale := !s.healed && c.Leg.Path != "/abort_request" && (p || strings.Contains(c.Leg.Body, "p.test"))
	refuses := s.refuses && strings.Contains(c.Leg.Body, "is to bring two engines together")
	if stale && !refuses && p {
		s.waited++
	}
	s.mu.Unlock()
	switch {
	case c.Leg.Path == "/abort_request":
		c.JSON(200, "{}")
	case refuses:
		c.JSON(401, `{"error":{"message":"no key"}}`)
	case stale:
		c.Hold()
	default:
		c.JSON(200, world.DoneAnswer)
	}
}

func newStalePair(t *testing.T, warmUp bool) *stalePair {
	s := new(stalePair)
	s.World = world.New(t, world.Setup{
		Config: func(c *config.Config) {
			c.Pairs.WarmUp = warmUp
			c.Policy.Place = "round_robin"
			c.Timeouts.Handshake, c.Timeouts.Prefill = config.Duration(15*time.Second), config.Duration(30*time.Second)
		},
		Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "sglang", Serve: func(c *world.Conn, _ int) { s.serve(c, true) }},
			{Name: "q", Role: "prefill", Connector: "sglang", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }},
			{Name: "d", Role: "decode", Connector: "sglang", Serve: func(c *world.Conn, _ int) { s.serve(c, false) }},
		},
	})
	return s
}

// slow sends a request each second for that long, and returns how many took more than 5 s.
func (s *stalePair) slow(t *testing.T, during time.Duration) (n int) {
	t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(time.Second) {
		began := time.Now()
		if a := s.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
		}
		if time.Since(began) > 5*time.Second {
			n++
		}
	}
	return n
}

// TestBrokenPairIsTriedByTheProxy: one user's request finds that a pair is broken, or none with
// pairs.warm_up. Then the proxy tries the pair itself, and users are sent to the pair again after
// a good trial. If the engines refuse the proxy's request, a user's request is the trial.
func TestBrokenPairIsTriedByTheProxy(t *testing.T) {
	for _, warmUp := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := newStalePair(t, warmUp)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() { defer close(done); s.Warm(ctx) }()
			want := 1
			if warmUp {
				want = 0
				time.Sleep(20 * time.Second) // the warm-up fails
			}
			if n := s.slow(t, 10*time.Minute); n != want {
				t.Errorf("warm-up %t: %d requests were slow, want %d", warmUp, n, want)
			}
			if n := s.waits(); n < 5 || n > 12 || s.Metric("pdproxy_pair_warmups_total", "failed") != float64(n-want) {
				t.Errorf("warm-up %t: %d requests waited, %v failed trials", warmUp, n, s.Metric("pdproxy_pair_warmups_total", "failed"))
			}
			before := s.waits()
			s.set(false, true)
			if n := s.slow(t, 4*time.Minute); n < 1 || n > 2 || s.waits() != before+n {
				t.Errorf("warm-up %t: the engines refuse trials: %d requests were slow", warmUp, n)
			}
			s.set(true, false)
			if n := s.slow(t, 3*time.Minute); n != 0 {
				t.Errorf("warm-up %t: %d requests were slow after the repair", warmUp, n)
			}
			if s.Registry.PairsInTrouble() {
				t.Errorf("warm-up %t: pairs %+v", warmUp, s.Registry.Pairs())
			}
			cancel()
			<-done
			time.Sleep(time.Minute) // clean-ups
			for _, e := range s.Registry.Snapshot().Instances {
				if !e.Free(time.Now()) {
					t.Errorf("warm-up %t: engine %s has requests", warmUp, e.Spec.Name)
				}
			}
		})
	}
}

// TestTrialEndsWithTheProxy: the end of the proxy ends a running trial, and its legs are aborted.
func TestTrialEndsWithTheProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStalePair(t, false)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); s.Warm(ctx) }()
		s.slow(t, 42*time.Second)
		for s.waits() < 2 {
			time.Sleep(100 * time.Millisecond)
		}
		began := time.Now()
		cancel()
		<-done
		if took := time.Since(began); took > time.Second {
			t.Errorf("the trial ended after %v", took)
		}
		if n := s.Metric("pdproxy_pair_warmups_total"); n != 0 {
			t.Errorf("%v trials are counted", n)
		}
		time.Sleep(time.Minute) // clean-ups
		for _, e := range s.Registry.Snapshot().Instances {
			if !e.Free(time.Now()) {
				t.Errorf("engine %s has requests", e.Spec.Name)
			}
		}
	})
}
