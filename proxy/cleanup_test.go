package proxy

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// leaving is a world in push mode whose clients leave while prefill computes. Prefill
// needs more time than the time for which the proxy repeats a clean-up.
type leaving struct {
	*world
	prefill *fakeEngine
	mu      sync.Mutex
	running int // number of prompts that have been computed again; guarded by mu
	most    int // number of prompts that are being computed again; guarded by mu
}

const (
	minPatience = 30 * time.Second // the shortest time for which the proxy repeats a clean-up
	maxPrompts  = 4                // maximum number of clean-ups that compute a prompt at the same time
	// The memory for the waiting clean-ups, and the smallest cost of one of them, in
	// bytes.
	maxQueued = 256 << 20
	minQueued = 64 << 10
)

const leavingPrefill = minPatience + 10*time.Second

func newLeaving(t *testing.T, clients int) *leaving {
	l := &leaving{}
	l.prefill = &fakeEngine{name: "p", role: "prefill", connector: "vllm-nixl-push", serve: func(c *engineConn, nth int) {
		if nth <= clients {
			c.hold()
			return
		}
		l.count(1)
		defer l.count(-1)
		time.Sleep(leavingPrefill)
		c.json(200, nixlAnswer)
	}}
	l.world = newWorld(t, setup{engines: []*fakeEngine{
		l.prefill,
		{name: "d", role: "decode", connector: "vllm-nixl-push", serve: func(c *engineConn, _ int) { c.hold() }},
	}})
	ctx, leave := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	for range clients {
		asked.Go(func() { ask(ctx, l.client, "POST", "http://proxy"+completionsPath, completions(true)) })
	}
	synctest.Wait()
	leave()
	asked.Wait()
	return l
}

// count adds to the number of prompts that are being computed again, and returns the
// maximum so far.
func (l *leaving) count(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running += n
	l.most = max(l.most, l.running)
	return l.most
}

func (w *world) cleaned(how string) float64 { return w.metric("pdproxy_kv_cleanups_total", how) }

// TestPromptsAgainHaveTheirTime: a clean-up that computes a prompt again may take longer
// than the time limit of other clean-ups. It may also wait longer for its turn.
func TestPromptsAgainHaveTheirTime(t *testing.T) {
	for name, clients := range map[string]int{"one": 1, "more than the limit": 3 * maxPrompts} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLeaving(t, clients)
				time.Sleep(time.Duration(clients+1) * leavingPrefill)
				if n := l.cleaned("prefill_again"); n != float64(clients) || l.cleaned("engine_timeout") != 0 {
					t.Errorf("got %v of %d freed, %v left to the time-out of the engine", n, clients, l.cleaned("engine_timeout"))
				}
				if most := l.count(0); most > maxPrompts {
					t.Errorf("got %d prompts at the same time", most)
				}
			})
		})
	}
}

// TestPromptsAgainWithoutMemory: decode in push mode waits for KV when the proxy gives its leg up,
// because memory for the stream is missing. Prefill computes the prompt again and writes the KV.
// Otherwise decode would hold its blocks without end.
func TestPromptsAgainWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world
		w = newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl-push", serve: func(c *engineConn, nth int) {
				if nth == 1 {
					c.hold()
					return
				}
				c.json(200, nixlAnswer)
			}},
			{name: "d", role: "decode", connector: "vllm-nixl-push", serve: func(c *engineConn, _ int) {
				time.Sleep(time.Second) // both legs have been sent
				taken := w.memory.Limit() - w.memory.Used()
				w.memory.Take(taken)
				c.send(streamHead)
				c.hold()
				w.memory.Release(taken)
			}},
		}})
		if a := w.post(completionsPath, completions(true)); a.status != 503 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if w.cleaned("prefill_again") != 1 || w.cleaned("engine_timeout") != 0 {
			t.Errorf("got %v prompts computed again, %v left to the time-out of the engine", w.cleaned("prefill_again"), w.cleaned("engine_timeout"))
		}
	})
}

// TestPromptsAgainForASilentDecode: decode in push mode stops while it waits for KV, and the client
// leaves. Prefill computes the prompt again when decode has resumed, because decode holds its
// blocks until prefill writes into them.
func TestPromptsAgainForASilentDecode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var resume func()
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl-push", serve: func(c *engineConn, nth int) {
				if nth == 1 {
					c.hold()
					return
				}
				c.json(200, nixlAnswer)
			}},
			{name: "d", role: "decode", connector: "vllm-nixl-push", serve: func(c *engineConn, _ int) {
				resume = sync.OnceFunc(c.e.stop())
				c.hold()
			}},
		}, config: func(c *config.Config) { c.Retry.Attempts, c.Health = 1, quickProbes }})
		time.Sleep(time.Second) // the proxy has probed all engines
		ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
		defer leave()
		ask(ctx, w.client, "POST", "http://proxy"+completionsPath, completions(true))
		time.Sleep(2 * time.Minute)
		if n := w.cleaned("prefill_again") + w.cleaned("engine_gone"); n != 0 {
			t.Errorf("got %v clean-ups before the engine resumed", n)
		}
		resume()
		time.Sleep(5 * time.Second)
		if w.cleaned("prefill_again") != 1 || w.cleaned("engine_gone") != 0 {
			t.Errorf("got %v prompts computed again, %v engines that have ended", w.cleaned("prefill_again"), w.cleaned("engine_gone"))
		}
	})
}

// TestPromptsAgainEndWithTheServer: the end of the server ends the clean-ups that run and
// those that wait for their turn.
func TestPromptsAgainEndWithTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeaving(t, 3*maxPrompts)
		time.Sleep(5 * time.Second)
		began, limit := time.Now(), time.Duration(l.cfg.Load().Timeouts.Cleanup)
		l.Wait()
		if took := time.Since(began); took > limit {
			t.Errorf("the end took %v, want at most %v", took, limit)
		}
		if n := l.cleaned("engine_timeout"); n != 3*maxPrompts {
			t.Errorf("got %v left to the time-out of the engine", n)
		}
	})
}

// TestPromptsAgainAreBounded: the clean-ups that wait to compute a prompt have a limited
// memory. If the memory is full, the proxy leaves a clean-up to the engine's time-out at
// once. Other clean-ups do not use this memory. The memory is free again at the end.
func TestPromptsAgainAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{name: "p", role: "prefill", connector: "vllm-nixl-push", serve: func(c *engineConn, _ int) {
			c.json(200, nixlAnswer)
		}}}})
		p := engine.Target{Instance: w.registry.Snapshot().Instance("p")}
		start := func(calls int, c connector.Cleanup) {
			job := &cleanup.Job{Connector: "vllm-nixl-push", Limit: time.Second, Prompt: time.Second}
			job.Add(slices.Repeat([]connector.Cleanup{c}, calls), p, p)
			w.cleanups.Start(job)
		}
		call := func(how string, body int, until connector.Until) connector.Cleanup {
			return connector.Cleanup{Phase: abi.Prefill, Leg: connector.Leg{Path: "/x", Body: make([]byte, body)}, How: how, Until: until}
		}
		// These calls hold memory until the proxy makes them, after one second.
		start(maxQueued/minQueued-1, connector.Cleanup{Phase: abi.Prefill, Until: connector.UntilServed, How: "filler"})
		start(1, call("too large", minQueued+1, connector.UntilServed))
		start(1, call("fits", 1, connector.UntilServed))
		start(1, call("too many", 1, connector.UntilServed))
		start(1, call("plain", minQueued+1, 0))
		if n := w.cleaned("engine_timeout"); n != 2 {
			t.Errorf("got %v left at once to the time-out of the engine", n)
		}
		time.Sleep(time.Minute)
		start(maxQueued/minQueued, connector.Cleanup{Phase: abi.Prefill, Until: connector.UntilServed, How: "all of it"})
		time.Sleep(time.Minute)
		for how, want := range map[string]float64{"filler": maxQueued/minQueued - 1, "fits": 1, "plain": 1, "all of it": maxQueued / minQueued, "engine_timeout": 2} {
			if n := w.cleaned(how); n != want {
				t.Errorf("%s: %v, want %v", how, n, want)
			}
		}
	})
}
