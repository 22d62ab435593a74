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

// TestPrefillThatDiesIsCounted: a prefill that had the leg may hold the prompt's KV,
// although it never answered.
func TestPrefillThatDiesIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "trtllm", serve: func(c *engineConn, _ int) { c.hangUp() }},
			{name: "d", role: "decode", connector: "trtllm"},
		}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
		if a := w.post(completionsPath, completions(false)); a.status != 502 {
			t.Errorf("status %d: %s", a.status, a.body)
		}
		synctest.Wait()
		if n := w.metric("pdproxy_kv_cleanups_total", "trtllm", "engine_timeout"); n != 1 {
			t.Errorf("%v clean-ups are counted", n)
		}
	})
}

// TestRetryAwaitsTheAbort: engines do not get the legs of a retry before they have
// answered the aborts of the attempt before.
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
				time.Sleep(10 * time.Millisecond) // decode has its leg
				c.say("HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno")
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
			t.Errorf("status %d: %s", a.status, a.body)
		}
		mu.Lock()
		defer mu.Unlock()
		if aborted.IsZero() || again.Before(aborted) {
			t.Errorf("aborted at %v, sent again at %v", aborted, again)
		}
	})
}

// TestDecodeThatWasHungUpOnHasTime: another decode is not asked to free the blocks as
// long as the one that was hung up on may read them.
func TestDecodeThatWasHungUpOnHasTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		freed := make(chan time.Time, 1)
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, namedAnswer) }},
			{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
				if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
					freed <- time.Now()
					c.say(streamHead)
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
			t.Errorf("the clean-up came %v after the client had left", waited)
		}
		synctest.Wait()
		if n := w.cleaned("abort_decode"); n != 1 {
			t.Errorf("%v clean-ups are counted", n)
		}
	})
}

// TestKeyOfACleanup: an engine gets the client's Authorization with a clean-up, as it
// got it with the leg, but never a key of the proxy.
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
							c.say(streamHead)
							c.hold()
							return
						}
						c.hangUp()
					}},
				}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
				if a := w.post(completionsPath, completions(false), "Authorization", "Bearer secret"); a.status != 502 {
					t.Errorf("status %d: %s", a.status, a.body)
				}
				if got := <-sent; got != tt.want {
					t.Errorf("the clean-up has the key %q, want %q", got, tt.want)
				}
			})
		})
	}
}

// TestDecodeThatFailedIsAskedLast: a decode that could not load the blocks is not asked
// first to have prefill free them.
func TestDecodeThatFailedIsAskedLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var failed string
		asked := make(chan string, 2)
		serve := func(c *engineConn, _ int) {
			if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
				asked <- c.e.name
				c.say(streamHead)
				c.hold()
				return
			}
			mu.Lock()
			failed = c.e.name
			mu.Unlock()
			c.say("HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno")
		}
		w := newWorld(t, setup{engines: []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, namedAnswer) }},
			{name: "d0", role: "decode", connector: "vllm-nixl", serve: serve},
			{name: "d1", role: "decode", connector: "vllm-nixl", serve: serve},
		}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
		if a := w.post(completionsPath, completions(false)); a.status != 502 {
			t.Errorf("status %d: %s", a.status, a.body)
		}
		if first := <-asked; first == failed || failed == "" {
			t.Errorf("%q failed, and %q was asked", failed, first)
		}
	})
}

// TestCleanupIsRepeated: a clean-up that an engine answers with a failure is sent again,
// also to one that only drains.
func TestCleanupIsRepeated(t *testing.T) {
	for _, draining := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p := &fakeEngine{name: "p", role: "prefill", connector: "sglang", serve: func(c *engineConn, nth int) {
				if nth < 3 {
					c.say("HTTP/1.1 503 x\r\nContent-Length: 2\r\n\r\nno")
					return
				}
				c.json(200, "{}")
			}}
			w := newWorld(t, setup{engines: []*fakeEngine{p}})
			target := engine.Target{Instance: w.registry.Snapshot().Instance("p")}
			if draining {
				target.Pin() // it drains until nobody has its blocks
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
				t.Errorf("draining %v: %v clean-ups after %d calls", draining, n, len(p.seen()))
			}
		})
	}
}
