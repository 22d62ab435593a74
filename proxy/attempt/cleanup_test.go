package attempt_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// leaving is a world in push mode whose clients leave while prefill computes. Prefill
// needs more time than the time for which the proxy repeats a clean-up.
type leaving struct {
	*world.World
	prefill *world.Engine
	mu      sync.Mutex
	running int // number of prompts that have been computed again; guarded by mu
	most    int // number of prompts that are being computed again; guarded by mu
}

const (
	minPatience = 30 * time.Second // the shortest time for which the proxy repeats a clean-up
	maxPrompts  = 4                // maximum number of clean-ups that compute a prompt at the same time
)

const leavingPrefill = minPatience + 10*time.Second

func newLeaving(t *testing.T, clients int) *leaving {
	l := &leaving{}
	l.prefill = &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, nth int) {
		if nth <= clients {
			c.Hold()
			return
		}
		l.count(1)
		defer l.count(-1)
		time.Sleep(leavingPrefill)
		c.JSON(200, world.NIXLAnswer)
	}}
	l.World = world.New(t, world.Setup{Engines: []*world.Engine{
		l.prefill,
		{Name: "d", Role: "decode", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, _ int) { c.Hold() }},
	}})
	ctx, leave := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	for range clients {
		asked.Go(func() {
			world.Ask(ctx, l.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(true))
		})
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

// TestPromptsAgainHaveTheirTime: a clean-up that computes a prompt again may take longer
// than the time limit of other clean-ups. It may also wait longer for its turn.
func TestPromptsAgainHaveTheirTime(t *testing.T) {
	for name, clients := range map[string]int{"one": 1, "more than the limit": 3 * maxPrompts} {
		world.Run(t, name, func(t *testing.T) {
			l := newLeaving(t, clients)
			time.Sleep(time.Duration(clients+1) * leavingPrefill)
			if n := l.Cleaned("prefill_again"); n != float64(clients) || l.Cleaned("engine_timeout") != 0 {
				t.Errorf("got %v of %d freed, %v left to the time-out of the engine", n, clients, l.Cleaned("engine_timeout"))
			}
			if most := l.count(0); most > maxPrompts {
				t.Errorf("got %d prompts at the same time", most)
			}
		})
	}
}

// TestPromptsAgainWithoutMemory: decode in push mode waits for KV when the proxy gives its leg up,
// because memory for the stream is missing. Prefill computes the prompt again and writes the KV.
// Otherwise decode would hold its blocks without end.
func TestPromptsAgainWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world.World
		w = world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, nth int) {
				if nth == 1 {
					c.Hold()
					return
				}
				c.JSON(200, world.NIXLAnswer)
			}},
			{Name: "d", Role: "decode", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, _ int) {
				time.Sleep(time.Second) // both legs have been sent
				taken := w.Memory.Limit() - w.Memory.Used()
				w.Memory.Take(taken)
				c.Send(world.StreamHead)
				c.Hold()
				w.Memory.Release(taken)
			}},
		}})
		if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Status != 503 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if w.Cleaned("prefill_again") != 1 || w.Cleaned("engine_timeout") != 0 {
			t.Errorf("got %v prompts computed again, %v left to the time-out of the engine", w.Cleaned("prefill_again"), w.Cleaned("engine_timeout"))
		}
	})
}

// TestPromptsAgainForASilentDecode: decode in push mode stops while it waits for KV, and the client
// leaves. Prefill computes the prompt again when decode has resumed, because decode holds its
// blocks until prefill writes into them.
func TestPromptsAgainForASilentDecode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var resume func()
		w := world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, nth int) {
				if nth == 1 {
					c.Hold()
					return
				}
				c.JSON(200, world.NIXLAnswer)
			}},
			{Name: "d", Role: "decode", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, _ int) {
				resume = sync.OnceFunc(c.E.Stop())
				c.Hold()
			}},
		}, Config: func(c *config.Config) { c.Retry.Attempts, c.Health = 1, quickProbes }})
		time.Sleep(time.Second) // the proxy has probed all engines
		ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
		defer leave()
		world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(true))
		time.Sleep(2 * time.Minute)
		if n := w.Cleaned("prefill_again") + w.Cleaned("engine_gone"); n != 0 {
			t.Errorf("got %v clean-ups before the engine resumed", n)
		}
		resume()
		time.Sleep(5 * time.Second)
		if w.Cleaned("prefill_again") != 1 || w.Cleaned("engine_gone") != 0 {
			t.Errorf("got %v prompts computed again, %v engines that have ended", w.Cleaned("prefill_again"), w.Cleaned("engine_gone"))
		}
	})
}

// TestPromptsAgainEndWithTheServer: the end of the server ends the clean-ups that run and
// those that wait for their turn.
func TestPromptsAgainEndWithTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeaving(t, 3*maxPrompts)
		time.Sleep(5 * time.Second)
		began, limit := time.Now(), time.Duration(l.Config.Timeouts.Cleanup)
		l.Wait()
		if took := time.Since(began); took > limit {
			t.Errorf("the end took %v, want at most %v", took, limit)
		}
		if n := l.Cleaned("engine_timeout"); n != 3*maxPrompts {
			t.Errorf("got %v left to the time-out of the engine", n)
		}
	})
}
