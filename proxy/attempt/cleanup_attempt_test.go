package attempt_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestPrefillThatDiesIsCounted: a prefill engine that received the leg may hold the
// prompt's KV, even if it never answered.
func TestPrefillThatDiesIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "trtllm", Serve: func(c *world.Conn, _ int) { c.HangUp() }},
			{Name: "d", Role: "decode", Connector: "trtllm"},
		}, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 502 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
		}
		synctest.Wait()
		if n := w.Metric("pdproxy_kv_cleanups_total", "trtllm", "engine_timeout"); n != 1 {
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
		serve := func(c *world.Conn, nth int) {
			switch {
			case c.Leg.Path == "/abort_request":
				time.Sleep(300 * time.Millisecond)
				mu.Lock()
				aborted = time.Now()
				mu.Unlock()
				c.JSON(200, "{}")
			case nth == 1 && c.E.Role == "prefill":
				time.Sleep(10 * time.Millisecond) // decode has received its leg
				c.Send("HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno")
			case nth == 1:
				c.Hold()
			default:
				mu.Lock()
				again = time.Now()
				mu.Unlock()
				c.JSON(200, world.DoneAnswer)
			}
		}
		w := world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "sglang", Serve: serve},
			{Name: "d", Role: "decode", Connector: "sglang", Serve: serve},
		}})
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
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
		w := world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.NamedAnswer) }},
			{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
				if strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
					freed <- time.Now()
					c.Send(world.StreamHead)
				}
				c.Hold()
			}},
		}})
		ctx, leave := context.WithCancel(t.Context())
		var asked sync.WaitGroup
		asked.Go(func() {
			world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(true))
		})
		synctest.Wait()
		left := time.Now()
		leave()
		asked.Wait()
		if waited := (<-freed).Sub(left); waited < cleanup.Yield || waited > 2*cleanup.Yield {
			t.Errorf("the clean-up arrived %v after the client had left", waited)
		}
		synctest.Wait()
		if n := w.Cleaned("abort_decode"); n != 1 {
			t.Errorf("got %v counted clean-ups", n)
		}
	})
}

// TestKeyOfACleanup: a clean-up has the client's Authorization, as the leg had it. A
// clean-up never has an API key of the proxy.
func TestKeyOfACleanup(t *testing.T) {
	for name, tt := range map[string]struct{ keys, want string }{
		"of the client": {"", "Bearer secret"},
		"of the proxy":  {world.KeyLine("alice", "secret"), ""},
	} {
		world.Run(t, name, func(t *testing.T) {
			sent := make(chan string, 1)
			w := world.New(t, world.Setup{Keys: tt.keys, Engines: []*world.Engine{
				{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.NamedAnswer) }},
				{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
					if strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
						sent <- c.Leg.Header.Get("Authorization")
						c.Send(world.StreamHead)
						c.Hold()
						return
					}
					c.HangUp()
				}},
			}, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
			if a := w.Post(world.CompletionsPath, world.Completions(false), "Authorization", "Bearer secret"); a.Status != 502 {
				t.Errorf("got status %d: %s", a.Status, a.Body)
			}
			if got := <-sent; got != tt.want {
				t.Errorf("Authorization of the clean-up: got %q, want %q", got, tt.want)
			}
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
		serve := func(c *world.Conn, _ int) {
			if strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
				asked <- c.E.Name
				c.Send(world.StreamHead)
				c.Hold()
				return
			}
			mu.Lock()
			failed = c.E.Name
			mu.Unlock()
			c.Send("HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno")
		}
		w := world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.NamedAnswer) }},
			{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: serve},
			{Name: "d1", Role: "decode", Connector: "vllm-nixl", Serve: serve},
		}, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 502 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
		}
		if first := <-asked; first == failed || failed == "" {
			t.Errorf("%q failed, and the proxy called %q", failed, first)
		}
	})
}

// TestPrefillThatOutlastsDecode: decode has answered, so it has the KV, but prefill never answers.
// The proxy ends prefill's leg. No engine holds blocks then: the proxy counts none as left to the
// engines, and sends decode, which is done, nothing.
func TestPrefillThatOutlastsDecode(t *testing.T) {
	for name, aborts := range map[string]int{"vllm-moriio": 0, "vllm-nixl-push": 0, "sglang": 1} {
		world.Run(t, name, func(t *testing.T) {
			p := &world.Engine{Name: "p", Role: "prefill", Connector: name, Serve: world.Aborting(func(c *world.Conn, _ int) {
				c.Hold()
			})}
			d := &world.Engine{Name: "d", Role: "decode", Connector: name, Serve: func(c *world.Conn, _ int) {
				time.Sleep(10 * time.Millisecond)
				c.JSON(200, world.DoneAnswer)
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
				t.Errorf("got status %d: %s", a.Status, a.Body)
			}
			time.Sleep(minPatience)
			synctest.Wait()
			if n := w.Metric("pdproxy_kv_cleanups_total"); int(n) != aborts || len(p.Seen()) != 1+aborts || len(d.Seen()) != 1 {
				t.Errorf("got %v counted clean-ups, %d requests to prefill and %d to decode", n, len(p.Seen()), len(d.Seen()))
			}
		})
	}
}

// localAnswer names a host that means prefill only for engines on the same host.
var localAnswer = strings.Replace(world.NIXLAnswer, "p.test", "localhost", 1)

// TestMovedDecodeIsSentToPrefillOnly: the host in prefill's answer is right for the first
// decode engine, which is on prefill's host. That engine accepts no connection, so the
// proxy moves the leg to an engine on another host. There the name would mean that
// engine's own host.
func TestMovedDecodeIsSentToPrefillOnly(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			d2 := &world.Engine{Name: "d2", At: "127.0.0.2:80", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
				if strings.Contains(c.Leg.Body, `"stream":true`) {
					c.Stream(`data: {"choices":[{"text":"right"}]}`+"\n\n", "data: [DONE]\n\n")
					return
				}
				c.JSON(200, `{"choices":[{"text":"right"}]}`)
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{
				{Name: "p", At: "127.0.0.1:80", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, localAnswer) }},
				{Name: "d1", At: "127.0.0.1:81", Role: "decode", Connector: "vllm-nixl", Refuse: true},
				d2,
			}})
			moved := 0
			for range 4 { // the first placement of some requests is d2
				a := w.Post(world.CompletionsPath, world.Completions(stream))
				if a.Status != 200 || !strings.Contains(a.Body, "right") {
					t.Fatalf("got status %d: %s", a.Status, a.Body)
				}
			}
			for _, row := range w.Ended() {
				e, _ := w.Explain(row.RequestID)
				for _, l := range e.Legs {
					if l.Engine == "d1" {
						moved++
					}
				}
			}
			for _, l := range d2.Seen() {
				if strings.Contains(l.Body, "localhost") || strings.Contains(l.Body, "kv_transfer_params") {
					t.Errorf("d2 received %s", l.Body)
				}
			}
			if n := w.Metric("pdproxy_fallbacks_total", "kv_transfer", "foreign_host"); moved == 0 || n != 4 {
				t.Errorf("got %d moved legs and %v fallbacks", moved, n)
			}
			time.Sleep(time.Minute) // clean-ups
			if n := len(d2.Seen()); n != 4 {
				t.Errorf("d2 received %d calls", n)
			}
		})
	}
}
