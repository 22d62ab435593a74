package proxy

import (
	"context"
	"strings"
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

// TestPrefillThatDiesIsCounted: a prefill engine that received the leg may hold the
// prompt's KV, even if it never answered.
func TestPrefillThatDiesIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "trtllm", serve: func(c *engineConn, _ int) { c.hangUp() }},
			{name: "d", role: "decode", connector: "trtllm"},
		}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
		if a := w.post(completionsPath, completions(false)); a.status != 502 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		synctest.Wait()
		if n := w.metric("pdproxy_kv_cleanups_total", "trtllm", "engine_timeout"); n != 1 {
			t.Errorf("got %v counted clean-ups", n)
		}
	})
}

// TestRetryAwaitsTheAbort: the proxy sends the legs of a retry only after the engines
// have answered the aborts of the previous attempt.
func TestRetryAwaitsTheAbort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var aborted, again time.Time
		serve := func(c *engineConn, nth int) {
			switch {
			case c.leg.path == "/abort_request":
				time.Sleep(300 * time.Millisecond)
				mu.Lock()
				aborted = time.Now()
				mu.Unlock()
				c.json(200, "{}")
			case nth == 1 && c.e.role == "prefill":
				time.Sleep(10 * time.Millisecond) // decode has received its leg
				c.send("HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno")
			case nth == 1:
				c.hold()
			default:
				mu.Lock()
				again = time.Now()
				mu.Unlock()
				c.json(200, doneAnswer)
			}
		}
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "sglang", serve: serve},
			{name: "d", role: "decode", connector: "sglang", serve: serve},
		}})
		if a := w.post(completionsPath, completions(false)); a.status != 200 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		mu.Lock()
		defer mu.Unlock()
		if aborted.IsZero() || again.Before(aborted) {
			t.Errorf("aborted at %v, next leg at %v", aborted, again)
		}
	})
}

// TestDecodeThatWasHungUpOnHasTime: the proxy closed the connection of a decode leg. It sends the
// clean-up of the blocks to no other decode engine as long as the first decode engine may read
// them.
func TestDecodeThatWasHungUpOnHasTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		freed := make(chan time.Time, 1)
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, namedAnswer) }},
			{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
				if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
					freed <- time.Now()
					c.send(streamHead)
				}
				c.hold()
			}},
		}})
		ctx, leave := context.WithCancel(t.Context())
		var asked sync.WaitGroup
		asked.Go(func() { ask(ctx, w.client, "POST", "http://proxy"+completionsPath, completions(true)) })
		synctest.Wait()
		left := time.Now()
		leave()
		asked.Wait()
		if waited := (<-freed).Sub(left); waited < cleanup.Yield || waited > 2*cleanup.Yield {
			t.Errorf("the clean-up arrived %v after the client had left", waited)
		}
		synctest.Wait()
		if n := w.cleaned("abort_decode"); n != 1 {
			t.Errorf("got %v counted clean-ups", n)
		}
	})
}

// TestKeyOfACleanup: a clean-up has the client's Authorization, as the leg had it. A
// clean-up never has an API key of the proxy.
func TestKeyOfACleanup(t *testing.T) {
	for name, tt := range map[string]struct{ keys, want string }{
		"of the client": {"", "Bearer secret"},
		"of the proxy":  {keyLine("alice", "secret"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sent := make(chan string, 1)
				w := newWorld(t, setup{keys: tt.keys, engines: []*fakeEngine{
					{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, namedAnswer) }},
					{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, nth int) {
						if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
							sent <- c.leg.header.Get("Authorization")
							c.send(streamHead)
							c.hold()
							return
						}
						c.hangUp()
					}},
				}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
				if a := w.post(completionsPath, completions(false), "Authorization", "Bearer secret"); a.status != 502 {
					t.Errorf("got status %d: %s", a.status, a.body)
				}
				if got := <-sent; got != tt.want {
					t.Errorf("Authorization of the clean-up: got %q, want %q", got, tt.want)
				}
			})
		})
	}
}

// TestDecodeThatFailedIsAskedLast: a decode engine could not load the blocks. The proxy first sends
// the clean-up to another decode engine, which makes prefill free the blocks.
func TestDecodeThatFailedIsAskedLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var failed string
		asked := make(chan string, 2)
		serve := func(c *engineConn, _ int) {
			if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
				asked <- c.e.name
				c.send(streamHead)
				c.hold()
				return
			}
			mu.Lock()
			failed = c.e.name
			mu.Unlock()
			c.send("HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno")
		}
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, namedAnswer) }},
			{name: "d0", role: "decode", connector: "vllm-nixl", serve: serve},
			{name: "d1", role: "decode", connector: "vllm-nixl", serve: serve},
		}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
		if a := w.post(completionsPath, completions(false)); a.status != 502 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		if first := <-asked; first == failed || failed == "" {
			t.Errorf("%q failed, and the proxy called %q", failed, first)
		}
	})
}

// TestCleanupIsRepeated: the proxy repeats a clean-up that an engine answers with a
// failure, also if the engine is draining.
func TestCleanupIsRepeated(t *testing.T) {
	for _, draining := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p := &fakeEngine{name: "p", role: "prefill", connector: "sglang", serve: func(c *engineConn, nth int) {
				if nth < 3 {
					c.send("HTTP/1.1 503 x\r\nContent-Length: 2\r\n\r\nno")
					return
				}
				c.json(200, "{}")
			}}
			w := newWorld(t, setup{engines: []*fakeEngine{p}})
			target := engine.Target{Instance: w.registry.Snapshot().Instance("p")}
			if draining {
				target.Pin() // the engine drains as long as it holds the blocks
				defer target.Unpin()
				if err := w.registry.Remove("p", time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			job := &cleanup.Job{Connector: "sglang", Limit: time.Second}
			job.Add([]connector.Cleanup{{Phase: abi.Prefill, Leg: connector.Leg{Path: "/x"}, How: "abort_rid"}}, target, target)
			w.cleanups.Start(job)
			time.Sleep(minPatience)
			synctest.Wait()
			if n := w.cleaned("abort_rid"); n != 1 || len(p.seen()) != 3 {
				t.Errorf("draining %v: got %v clean-ups after %d calls", draining, n, len(p.seen()))
			}
		})
	}
}

// TestPrefillThatOutlastsDecode: decode has answered, so it has the KV, but prefill never answers.
// The proxy ends prefill's leg. No engine holds blocks then: the proxy counts none as left to the
// engines, and sends decode, which is done, nothing.
func TestPrefillThatOutlastsDecode(t *testing.T) {
	for name, aborts := range map[string]int{"vllm-moriio": 0, "vllm-nixl-push": 0, "sglang": 1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &fakeEngine{name: "p", role: "prefill", connector: name, serve: func(c *engineConn, _ int) {
					if c.leg.path == "/abort_request" {
						c.json(200, "{}")
						return
					}
					c.hold()
				}}
				d := &fakeEngine{name: "d", role: "decode", connector: name, serve: func(c *engineConn, _ int) {
					time.Sleep(10 * time.Millisecond)
					c.json(200, doneAnswer)
				}}
				w := newWorld(t, setup{engines: []*fakeEngine{p, d}})
				if a := w.post(completionsPath, completions(false)); a.status != 200 {
					t.Errorf("got status %d: %s", a.status, a.body)
				}
				time.Sleep(minPatience)
				synctest.Wait()
				if n := w.metric("pdproxy_kv_cleanups_total"); int(n) != aborts || len(p.seen()) != 1+aborts || len(d.seen()) != 1 {
					t.Errorf("got %v counted clean-ups, %d requests to prefill and %d to decode", n, len(p.seen()), len(d.seen()))
				}
			})
		})
	}
}
