package exchange_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// evicting configures one place, the classes of these tests, and the policy lowest_youngest.
func evicting(s world.Setup) world.Setup {
	edit := s.Config
	s.Config = func(c *config.Config) {
		classes(true)(c)
		c.Limits.MaxExchanges, c.Policy.Evict = 1, "lowest_youngest"
		if edit != nil {
			edit(c)
		}
	}
	decide, _ := policies.Evict("lowest_youngest")
	s.Options = func(o *proxy.Options) {
		o.Evict = func(f *abi.EvictFacts) (int32, string, bool) { return decide(f), "lowest_youngest", true }
	}
	return s
}

// evicted is the message of an evicted request.
const evicted = `"message":"the proxy ended the request, because a request of a higher class needs its place"`

// urgently sends a request of the class interactive, which the engines recognize by its prompt, and
// checks that it gets its answer at once. If the other request is in prefill, the proxy first waits for
// the names of its blocks, at most for cleanup.PrefillLinger.
func urgently(w *world.World) {
	w.T.Helper()
	began := time.Now()
	if a := w.Post(world.CompletionsPath, `{"model":"m","prompt":"urgent","max_tokens":2}`, "X-Priority", "interactive"); a.Status != 200 || time.Since(began) > cleanup.PrefillLinger {
		w.T.Errorf("the request of the higher class got %d %s after %v", a.Status, a.Body, time.Since(began))
	}
}

// serving answers the urgent request, and the other one with serve.
func serving(serve func(c *world.Conn, nth int)) func(c *world.Conn, nth int) {
	return func(c *world.Conn, nth int) {
		switch {
		case strings.Contains(c.Leg.Body, "urgent") && strings.Contains(c.Leg.Body, `"do_remote_decode":true`):
			c.JSON(200, world.NIXLAnswer)
		case strings.Contains(c.Leg.Body, "urgent"), c.Leg.Path == "/abort_request":
			c.JSON(200, world.Unary)
		default:
			serve(c, nth)
		}
	}
}

// evicts sends a request of the class batch, lets an urgent one evict it after a second, and returns its
// answer. It checks what is counted and shown.
func evicts(w *world.World, path, body string) world.Answer {
	w.T.Helper()
	got := make(chan world.Answer, 1)
	go func() { got <- w.Post(path, body, "X-Priority", "batch", "X-Request-Id", "low") }()
	time.Sleep(time.Second)
	urgently(w)
	a := <-got
	synctest.Wait()
	if n := w.Metric("pdproxy_evictions_total", "batch", "max_exchanges"); n != 1 {
		w.T.Errorf("%v evictions are counted", n)
	}
	if n := w.Metric("pdproxy_leg_errors_total") + w.Metric("pdproxy_retries_total"); n != 0 {
		w.T.Errorf("%v failures and retries are counted", n)
	}
	e, _ := w.Explain("low")
	if e.ErrorCode != "evicted" || !strings.Contains(strings.Join(e.Notes, "\n"), "the policy lowest_youngest ended the request, because a request of the class interactive waited (max_exchanges)") {
		w.T.Errorf("explained as %q %q", e.ErrorCode, e.Notes)
	}
	return a
}

// refusal checks the answer of a request that was evicted before its first byte.
func refusal(t *testing.T, a world.Answer) {
	t.Helper()
	if a.Status != 429 || a.Header.Get("Retry-After") != "1" || !strings.Contains(a.Body, evicted) || !strings.Contains(a.Body, `"code":"evicted"`) {
		t.Errorf("got %d %v %s", a.Status, a.Header, a.Body)
	}
}

// TestEvictedBeforeFirstByte: a request ends with 429 in each wait and in each leg before its first
// byte. No leg is retried.
func TestEvictedBeforeFirstByte(t *testing.T) {
	hold := func(c *world.Conn, _ int) { c.Hold() }
	pair := func(p, d func(*world.Conn, int)) []*world.Engine {
		return []*world.Engine{{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: serving(p)}, {Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: serving(d)}}
	}
	for name, engines := range map[string][]*world.Engine{
		"one leg":          {{Serve: serving(hold)}},
		"prefill":          pair(hold, hold),
		"decode":           pair(func(c *world.Conn, _ int) { c.JSON(200, world.NIXLAnswer) }, hold),
		"head of a stream": {{Serve: serving(func(c *world.Conn, _ int) { c.Send(world.StreamHead); c.Chunks(world.Opening); c.Hold() })}},
		"half an answer":   {{Serve: serving(func(c *world.Conn, _ int) { c.Send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"); c.Hold() })}},
	} {
		world.Run(t, name, func(t *testing.T) {
			w := world.New(t, evicting(world.Setup{Engines: engines}))
			body := world.Completions(strings.Contains(name, "stream"))
			refusal(t, evicts(w, world.CompletionsPath, body))
			for _, e := range engines {
				if n := len(e.Seen()); n > 3 {
					t.Errorf("%s got %d requests", e.Name, n)
				}
			}
			if n := w.Metric("pdproxy_exchanges_total", "shed"); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
		})
	}
}

// TestEvictedWhileItWaits: a request that has a place and waits for an engine, or for the plan policy,
// ends too.
func TestEvictedWhileItWaits(t *testing.T) {
	world.Run(t, "engine", func(t *testing.T) {
		e, other := world.Answering("e", "m"), world.Answering("o", "other")
		w := world.New(t, evicting(world.Setup{Engines: []*world.Engine{e, other}, Config: func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(time.Minute) }}))
		leave(w, e) // the model other is known and has no engine
		refusal(t, evicts(w, world.CompletionsPath, world.Asking("other")))
		if n := w.Metric("pdproxy_shed_total"); n != 0 {
			t.Errorf("%v requests are counted as refused", n)
		}
	})
	world.Run(t, "policy", func(t *testing.T) {
		w := world.New(t, evicting(world.Setup{Engines: []*world.Engine{world.Answering("e", "m")}}))
		first := true
		w.Decider.Hold = func(*abi.PlanFacts) (bool, time.Duration) {
			held := first
			first = w.Metric("pdproxy_evictions_total") == 0 && w.Waiting() < 2 && first
			return held, time.Minute
		}
		refusal(t, evicts(w, world.CompletionsPath, world.Completions(true)))
	})
}

// TestEvictedStream: a stream that has begun ends with an error event in the form of its API. The proxy
// cuts the connection within an event.
func TestEvictedStream(t *testing.T) {
	event := `data: {"error":{` + evicted + `,"type":"rate_limit_error","param":null,"code":"evicted"}}` + "\n\n"
	for _, tt := range []struct {
		name, path, body string
		events           []string
		want             string // end of the body; "": the connection is cut
	}{
		{"completions", world.CompletionsPath, world.Completions(true), []string{world.EventA}, world.EventA + event},
		{"chat", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}`, []string{`data: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n"}, event},
		{"responses", "/v1/responses", `{"model":"m","input":"x","stream":true}`, []string{"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":4,\"delta\":\"a\"}\n\n"}, evicted + `,"param":null}}` + "\n\n"},
		{"messages", "/v1/messages", `{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"x"}],"stream":true}`, []string{"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n"}, "\n\n"},
		{"within an event", world.CompletionsPath, world.Completions(true), []string{world.EventA, `data: {"choices":[{"te`}, ""},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w := world.New(t, evicting(world.Setup{Engines: []*world.Engine{{Serve: serving(func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(tt.events...)
				c.Hold()
			})}}}))
			a := evicts(w, tt.path, tt.body)
			if tt.want == "" {
				tt.want = event // the half event has not been sent yet
			}
			if a.Status != 200 || a.Err != nil || !strings.HasSuffix(a.Body, tt.want) || !strings.Contains(a.Body, "a request of a higher class needs its place") {
				t.Errorf("got %d %v %s", a.Status, a.Err, a.Body)
			}
			if n := w.Metric("pdproxy_broken_streams_total", "evicted"); n != 1 || w.Metric("pdproxy_exchanges_total", "broken") != 1 {
				t.Errorf("%v streams are counted as evicted", n)
			}
		})
	}
}

// TestEvictedContinuation: the proxy does not continue an evicted stream, also if the stream has broken
// off before and its next leg runs.
func TestEvictedContinuation(t *testing.T) {
	for name, second := range map[string]func(c *world.Conn){
		"first engine": nil,
		"next engine":  func(c *world.Conn) { c.Hold() },
	} {
		world.Run(t, name, func(t *testing.T) {
			streams := 0
			serve := serving(func(c *world.Conn, _ int) {
				if strings.HasSuffix(c.Leg.Path, "tokenize") {
					c.JSON(200, `{"prompt":"x a"}`)
					return
				}
				if streams++; streams > 1 {
					second(c)
					return
				}
				c.Send(world.StreamHead)
				c.Chunks(keptEvent(" a", "1,2", 3))
				if second == nil {
					c.Hold()
				}
				c.HangUp()
			})
			const vllm = `"owned_by":"vllm"`
			w := world.New(t, evicting(world.Setup{Engines: []*world.Engine{{Name: "a", Cards: vllm, Serve: serve}, {Name: "b", Cards: vllm, Serve: serve}}}))
			got := make(chan world.Answer, 1)
			go func() { got <- w.Post(world.CompletionsPath, sampled, "X-Priority", "batch") }()
			time.Sleep(time.Second)
			urgently(w)
			if a := <-got; !strings.HasSuffix(a.Body, `"code":"evicted"}}`+"\n\n") || strings.Contains(a.Body, "not_continued") {
				t.Errorf("got %d %s", a.Status, a.Body)
			}
			synctest.Wait()
			if want := map[string]int{"first engine": 1, "next engine": 2}[name]; streams != want || w.Metric("pdproxy_evictions_total", "batch") != 1 {
				t.Errorf("%d streams, want %d", streams, want)
			}
		})
	}
}

// TestEvictionIsOff: by default no request is evicted.
func TestEvictionIsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, evicting(world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { time.Sleep(3 * time.Second); c.JSON(200, world.Unary) }}}, Config: func(c *config.Config) { c.Policy.Evict = config.EvictNone }}))
		got := make(chan world.Answer, 1)
		go func() { got <- w.Post(world.CompletionsPath, world.Completions(false), "X-Priority", "batch") }()
		time.Sleep(time.Second)
		w.Post(world.CompletionsPath, world.Completions(false), "X-Priority", "interactive")
		if a := <-got; a.Status != 200 {
			t.Errorf("got %d %s", a.Status, a.Body)
		}
	})
}
