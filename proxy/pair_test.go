package proxy

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

const (
	doneAnswer = `{"choices":[{"text":"x","finish_reason":"length"}]}`
	nixlAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,` +
		`"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"p.test","remote_port":5600}}`
	trtAnswer = `{"choices":[{"text":"x","finish_reason":"length","disaggregated_params":{"request_type":"context_only",` +
		`"ctx_request_id":1,"disagg_request_id":1}}],"prompt_token_ids":[1]}`
)

// TestTransferTimesOut: after prefill's answer decode must begin its answer within
// timeouts.transfer. A new pair has timeouts.handshake more. A protocol in which prefill
// may answer early has timeouts.deferred_write more. The failure counts for both engines,
// because either may have caused it.
func TestTransferTimesOut(t *testing.T) {
	for _, tt := range []struct {
		connector, answer string
		fresh, known      time.Duration
	}{
		{"vllm-nixl", nixlAnswer, 3 * time.Second, 2 * time.Second},
		{"vllm-moriio", `{"kv_transfer_params":{}}`, 7 * time.Second, 6 * time.Second},
		{"sglang", doneAnswer, 3 * time.Second, 2 * time.Second},
		{"trtllm", trtAnswer, 3 * time.Second, 2 * time.Second},
	} {
		t.Run(tt.connector, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				hang := true
				hangs := func(yes bool) {
					mu.Lock()
					defer mu.Unlock()
					hang = yes
				}
				w := newWorld(t, setup{
					config: func(c *config.Config) {
						c.Timeouts.Handshake, c.Timeouts.Transfer = config.Duration(time.Second), config.Duration(2*time.Second)
						c.Timeouts.DeferredWrite = config.Duration(4 * time.Second)
						c.Retry.Attempts = 1
					},
					engines: []*fakeEngine{
						{name: "p", role: "prefill", connector: tt.connector, serve: func(c *engineConn, _ int) {
							if c.leg.path != "/abort_request" {
								time.Sleep(5 * time.Second) // the time of prefill does not count
							}
							c.json(200, tt.answer)
						}},
						{name: "d", role: "decode", connector: tt.connector, serve: func(c *engineConn, _ int) {
							mu.Lock()
							hung := hang
							mu.Unlock()
							switch {
							case c.leg.path == "/abort_request":
								c.json(200, "{}")
								return
							case hung:
								c.hold()
								return
							}
							if tt.connector == "vllm-moriio" || tt.connector == "sglang" {
								time.Sleep(5 * time.Second) // until prefill has answered
							}
							time.Sleep(time.Second)
							c.stream("data: "+doneAnswer+"\n\n", "data: [DONE]\n\n")
						}},
					},
				})
				spent := func(status int) time.Duration {
					t.Helper()
					began := time.Now()
					if a := w.post(completionsPath, completions(true)); a.status != status || status == 504 && !strings.Contains(a.body, "decode") {
						t.Errorf("got status %d: %s", a.status, a.body)
					}
					return time.Since(began) - 5*time.Second
				}
				pair := func() engine.PairRow { return w.registry.Pairs()[0] }
				if got := spent(504); got != tt.fresh {
					t.Errorf("limit of a fresh pair: got %v, want %v", got, tt.fresh)
				}
				if p := pair(); p.Failures != 1 || p.LastError != "kv_timeout" || p.State != "unknown" {
					t.Errorf("pair %+v", p)
				}
				hangs(false)
				spent(200)
				if p := pair(); p.State != "ready" {
					t.Errorf("pair %+v", p)
				}
				hangs(true)
				if got := spent(504); got != tt.known {
					t.Errorf("limit of a known pair: got %v, want %v", got, tt.known)
				}
				if n := w.metric("pdproxy_leg_errors_total", "decode", "kv_timeout"); n != 2 {
					t.Errorf("got %v counted legs", n)
				}
				time.Sleep(time.Minute) // clean-ups
			})
		})
	}
}

// A decode engine of vllm-moriio-read does not renew the lease of prefill's blocks. If a
// stream has not begun at the end of the lease, decode may read other data, so the proxy
// retries the request. A nixl decode renews the lease, so its stream may begin later.
func TestStreamBeginsAfterTheLease(t *testing.T) {
	const moriioAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,` +
		`"remote_block_ids":[1],"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5","remote_handshake_port":6301,"remote_notify_port":61005}}`
	for _, tt := range []struct {
		connector, answer string
		retries           float64
	}{
		{"vllm-nixl", nixlAnswer, 0},
		{"vllm-moriio-read", moriioAnswer, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			begin := func(c *engineConn, nth int) {
				if nth == 1 { // waits in the queue of the engine
					time.Sleep(5 * time.Second)
				}
				c.stream("data: "+doneAnswer+"\n\n", "data: [DONE]\n\n")
			}
			w := newWorld(t, setup{engines: []*fakeEngine{
				{name: "p", role: "prefill", connector: tt.connector, kvLease: 4 * time.Second, serve: func(c *engineConn, _ int) { c.json(200, tt.answer) }},
				{name: "d", role: "decode", connector: tt.connector, serve: begin},
			}})
			if a := w.post(completionsPath, completions(true)); a.status != 200 {
				t.Errorf("%s: got status %d: %s", tt.connector, a.status, a.body)
			}
			if n := w.metric("pdproxy_retries_total", "decode"); n != tt.retries {
				t.Errorf("%s: got %v retries, want %v", tt.connector, n, tt.retries)
			}
			time.Sleep(time.Minute) // clean-ups
		})
	}
}

// TestWarmUp: two engines need two seconds to connect. With warm-up the first user's
// request takes as long as the hundredth. Without it, the first request takes two seconds
// longer.
func TestWarmUp(t *testing.T) {
	for _, warm := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			const connect, prompt, first = 2 * time.Second, 30 * time.Millisecond, 10 * time.Millisecond
			var once sync.Once
			engines := []*fakeEngine{
				{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
					time.Sleep(prompt)
					c.json(200, nixlAnswer)
				}},
				{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
					once.Do(func() { time.Sleep(connect) })
					time.Sleep(first)
					c.json(200, doneAnswer)
				}},
			}
			w := newWorld(t, setup{config: func(c *config.Config) { c.Pairs.WarmUp = warm }, engines: engines})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			var running sync.WaitGroup
			running.Go(func() { w.Warm(ctx) })
			time.Sleep(10 * time.Second)
			if rows := w.registry.Pairs(); warm && (len(rows) != 1 || rows[0].State != "ready") || !warm && len(rows) != 0 {
				t.Errorf("pairs %+v", rows)
			}
			var times []time.Duration
			for range 100 {
				began := time.Now()
				if a := w.post(completionsPath, completions(false)); a.status != 200 {
					t.Fatalf("got status %d: %s", a.status, a.body)
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
			if n := w.metric("pdproxy_exchanges_total"); n != 100 {
				t.Errorf("got %v counted exchanges", n)
			}
			if n := w.metric("pdproxy_pair_warmups_total"); warm != (n == 1) {
				t.Errorf("warm-up %t: got %v counted", warm, n)
			}
			for _, e := range engines {
				for n, leg := range e.seen() { // the first one is the warm-up
					if got := leg.header["Content-Type"]; len(got) != 1 || got[0] != "application/json" {
						t.Errorf("warm-up %t: leg %d of engine %s has a body of type %q", warm, n, e.name, got)
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
		w := newWorld(t, setup{
			config: func(c *config.Config) {
				c.Pairs.WarmUp = true
				c.Timeouts.Handshake = config.Duration(7 * time.Second)
			},
			engines: []*fakeEngine{
				{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, nixlAnswer) }},
				{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.hold() }},
			},
		})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); w.Warm(ctx) }()
		failed := func() float64 { return w.metric("pdproxy_pair_warmups_total", "failed") }
		time.Sleep(7*time.Second - time.Millisecond)
		if failed() != 0 {
			t.Error("failed too soon")
		}
		time.Sleep(2 * time.Millisecond)
		if failed() != 1 {
			t.Errorf("got %v failed warm-ups", failed())
		}
		if p := w.registry.Pairs(); p[0].LastError != "timeout" && p[0].Failures != 0 {
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
		"no parameters":  {doneAnswer, "unknown", "", 0},
		"a foreign host": {strings.Replace(nixlAnswer, "p.test", "169.254.169.254", 1), "broken", "foreign_host", 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{
					config: func(c *config.Config) { c.Pairs.WarmUp = true },
					engines: []*fakeEngine{
						{name: "p", role: "prefill", connector: "vllm-nixl", kvHosts: "p.test", serve: func(c *engineConn, _ int) { c.json(200, tt.answer) }},
						{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
							if strings.Contains(c.leg.body, "kv_transfer_params") {
								t.Errorf("decode received %s", c.leg.body)
							}
							c.json(200, doneAnswer)
						}},
					},
				})
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan struct{})
				go func() { defer close(done); w.Warm(ctx) }()
				time.Sleep(time.Second)
				if n := w.metric("pdproxy_pair_warmups_total", "failed"); n != 1 {
					t.Errorf("got %v failed warm-ups", n)
				}
				if p := w.registry.Pairs()[0]; p.State != tt.state || p.Failures != tt.failures || p.LastError != tt.last {
					t.Errorf("pair %+v", p)
				}
				cancel()
				<-done
			})
		})
	}
}

// stalePair is a world of two SGLang prefill engines and one decode engine, which keeps the address
// of an earlier process of p: both legs of the pair wait. heal repairs the pair. waited returns the
// number of requests of p that have waited, refuse makes p refuse requests without a client's key.
type stalePair struct {
	*world
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
func (s *stalePair) serve(c *engineConn, p bool) {
	s.mu.Lock()
	stale := !s.healed && c.leg.path != "/abort_request" && (p || strings.Contains(c.leg.body, "p.test"))
	refuses := s.refuses && strings.Contains(c.leg.body, "is to bring two engines together")
	if stale && !refuses && p {
		s.waited++
	}
	s.mu.Unlock()
	switch {
	case c.leg.path == "/abort_request":
		c.json(200, "{}")
	case refuses:
		c.json(401, `{"error":{"message":"no key"}}`)
	case stale:
		c.hold()
	default:
		c.json(200, doneAnswer)
	}
}

func newStalePair(t *testing.T, warmUp bool) *stalePair {
	s := new(stalePair)
	s.world = newWorld(t, setup{
		config: func(c *config.Config) {
			c.Pairs.WarmUp = warmUp
			c.Policy.Place = "round_robin"
			c.Timeouts.Handshake, c.Timeouts.Prefill = config.Duration(15*time.Second), config.Duration(30*time.Second)
		},
		engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "sglang", serve: func(c *engineConn, _ int) { s.serve(c, true) }},
			{name: "q", role: "prefill", connector: "sglang", serve: func(c *engineConn, _ int) { c.json(200, doneAnswer) }},
			{name: "d", role: "decode", connector: "sglang", serve: func(c *engineConn, _ int) { s.serve(c, false) }},
		},
	})
	return s
}

// slow sends a request each second for that long, and returns how many took more than 5 s.
func (s *stalePair) slow(t *testing.T, during time.Duration) (n int) {
	t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(time.Second) {
		began := time.Now()
		if a := s.post(completionsPath, completions(false)); a.status != 200 {
			t.Errorf("got status %d: %s", a.status, a.body)
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
			if n := s.waits(); n < 5 || n > 12 || s.metric("pdproxy_pair_warmups_total", "failed") != float64(n-want) {
				t.Errorf("warm-up %t: %d requests waited, %v failed trials", warmUp, n, s.metric("pdproxy_pair_warmups_total", "failed"))
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
			if s.registry.PairsInTrouble() {
				t.Errorf("warm-up %t: pairs %+v", warmUp, s.registry.Pairs())
			}
			cancel()
			<-done
			time.Sleep(time.Minute) // clean-ups
			for _, e := range s.registry.Snapshot().Instances {
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
		if n := s.metric("pdproxy_pair_warmups_total"); n != 0 {
			t.Errorf("%v trials are counted", n)
		}
		time.Sleep(time.Minute) // clean-ups
		for _, e := range s.registry.Snapshot().Instances {
			if !e.Free(time.Now()) {
				t.Errorf("engine %s has requests", e.Spec.Name)
			}
		}
	})
}
