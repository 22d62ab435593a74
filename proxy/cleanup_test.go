package proxy

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// leaving is a world in push mode whose prefill takes longer than a clean-up is
// tried for, and clients who leave while it computes.
type leaving struct {
	*world
	prefill *fakeEngine
	mu      sync.Mutex
	running int // prompts computed again; guarded by mu
	most    int // of them at once; guarded by mu
}

const leavingPrefill = cleanupPatience + 10*time.Second

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

// count changes how many prompts are computed again, and returns the most so far.
func (l *leaving) count(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running += n
	l.most = max(l.most, l.running)
	return l.most
}

func (w *world) cleaned(how string) float64 { return w.metric("pdproxy_kv_cleanups_total", how) }

// TestPromptsAgainHaveTheirTime: a prompt that is computed again may take longer than
// other clean-ups are tried for, and so may its turn be in coming.
func TestPromptsAgainHaveTheirTime(t *testing.T) {
	for name, clients := range map[string]int{"one": 1, "more than may run": 3 * cleanupPrompts} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLeaving(t, clients)
				time.Sleep(time.Duration(clients+1) * leavingPrefill)
				if n := l.cleaned("prefill_again"); n != float64(clients) || l.cleaned("engine_timeout") != 0 {
					t.Errorf("%v of %d are freed; %v are left to the engine", n, clients, l.cleaned("engine_timeout"))
				}
				if most, held := l.count(0), l.janitor.queued.Load(); most > cleanupPrompts || held != 0 {
					t.Errorf("%d prompts at once, %d bytes are held", most, held)
				}
			})
		})
	}
}

// TestPromptsAgainEndWithTheServer: those that run and those that wait for their
// turn do not outlive it.
func TestPromptsAgainEndWithTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeaving(t, 3*cleanupPrompts)
		time.Sleep(5 * time.Second)
		began, limit := time.Now(), time.Duration(l.cfg.Load().Timeouts.Cleanup)
		l.Wait()
		if took := time.Since(began); took > limit {
			t.Errorf("it has taken %v, more than %v", took, limit)
		}
		if n := l.cleaned("engine_timeout"); n != 3*cleanupPrompts {
			t.Errorf("%v are left to the engine", n)
		}
	})
}

// TestPromptsAgainAreBounded: what would wait in more memory than is set aside for
// it is left to the engine at once; other clean-ups are not concerned.
func TestPromptsAgainAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{name: "p", role: "prefill", connector: "vllm-nixl-push", serve: func(c *engineConn, _ int) {
			c.json(200, nixlAnswer)
		}}}})
		w.janitor.queued.Store(cleanupQueue - cleanupFloor)
		p := engine.Target{Instance: w.registry.Snapshot().Instance("p")}
		for _, tt := range []struct {
			body int
			slow bool
			how  string
		}{{1, true, "slow"}, {cleanupFloor + 1, true, "engine_timeout"}, {cleanupFloor + 1, false, "plain"}} {
			call := connector.Cleanup{Phase: abi.Prefill, Leg: connector.Leg{Path: "/x", Body: make([]byte, tt.body)}, How: tt.how}
			if tt.how == "engine_timeout" {
				call.How = "too much"
			}
			if tt.slow {
				call.Until = connector.UntilServed
			}
			job := &cleanupJob{connector: "vllm-nixl-push", limit: time.Second, whole: time.Second}
			job.add([]connector.Cleanup{call}, p, p)
			<-w.janitor.start(job)
			synctest.Wait()
			if w.cleaned(tt.how) != 1 {
				t.Errorf("%s: %v", tt.how, w.cleaned(tt.how))
			}
		}
		w.janitor.queued.Store(0)
	})
}
