package proxy

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// emptyWorld is a world whose engine has served model m and has left. back adds the
// engine again.
func emptyWorld(t *testing.T, timeout time.Duration, limits func(*config.Limits)) (w *world, e *fakeEngine, back func()) {
	t.Helper()
	e = &fakeEngine{serve: func(c *engineConn, _ int) {
		c.json(200, `{"id":"x","choices":[{"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`)
	}}
	w = newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) {
		c.Limits.NoEngineTimeout = config.Duration(timeout)
		if limits != nil {
			limits(&c.Limits)
		}
	}})
	apply := func(specs ...config.Engine) {
		if err := w.registry.Apply(engine.SourceStatic, specs, 0); err != nil {
			t.Fatal(err)
		}
	}
	apply()
	for len(w.registry.Snapshot().Instances) > 0 {
		time.Sleep(time.Millisecond)
	}
	return w, e, func() { apply(e.spec()) }
}

func asking(model string) string {
	return fmt.Sprintf(`{"model":%q,"prompt":"hi","max_tokens":5}`, model)
}

// TestWaitsForAnEngine: requests for a known model wait until an engine is ready. The
// proxy serves them in the order of their arrival.
func TestWaitsForAnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, e, back := emptyWorld(t, time.Hour, nil)
		if a := w.get("/v1/models"); !strings.Contains(a.body, `"id":"m"`) {
			t.Errorf("the list of models lacks the model: %s", a.body)
		}
		if a := w.get("/health"); a.status != 200 {
			t.Errorf("health without an engine: got %d %s", a.status, a.body)
		}
		const requests = 20
		var wg sync.WaitGroup
		for i := range requests {
			wg.Go(func() {
				body := asking("m")
				if i%2 == 1 {
					body = `{"prompt":"hi","max_tokens":5}` // the only known model
				}
				if a := w.post(completionsPath, body, "X-Request-Id", fmt.Sprintf("r%02d", i)); a.status != 200 {
					t.Errorf("request %d: got %d %s", i, a.status, a.body)
				}
			})
			synctest.Wait()
		}
		if n := w.metric("pdproxy_requests_waiting", "m", "no_engine"); n != requests {
			t.Errorf("got %v waiting requests, want %d", n, requests)
		}
		if n := w.metric("pdproxy_requests_running", "m"); n != 0 {
			t.Errorf("got %v running requests without an engine", n)
		}
		time.Sleep(time.Minute)
		if a := w.post(completionsPath, asking("invented")); a.status != 503 && a.status != 404 {
			t.Errorf("a model that no engine has served: got %d %s", a.status, a.body)
		}
		back()
		wg.Wait()
		if n := len(e.seen()); n != requests {
			t.Errorf("the engine got %d requests", n)
		}
		if n := w.metric("pdproxy_requests_waiting", "m") + w.metric("pdproxy_requests_running", "m"); n != 0 {
			t.Errorf("got %v counted requests after their end", n)
		}
		if n := w.metric("pdproxy_queue_wait_seconds", "m"); n != requests {
			t.Errorf("%v waits observed", n)
		}
	})
}

// TestWaitEnds: each event that ends the wait for an engine, and the client's answer.
func TestWaitEnds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		end    func(w *world)
		code   string
		within time.Duration
	}{
		{"time", func(*world) {}, "no_engine_timeout", time.Minute},
		{"drain", func(w *world) {
			time.Sleep(time.Second)
			if a := w.operate("POST", "/v1/drain", "{}"); a.status >= 300 {
				w.t.Errorf("drain: %d %s", a.status, a.body)
			}
		}, "draining", time.Second},
		{"shutdown", func(w *world) {
			time.Sleep(time.Second)
			w.end()
		}, "draining", time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, _, _ := emptyWorld(t, time.Minute, nil)
				began := time.Now()
				var wg sync.WaitGroup
				for i := range 3 {
					wg.Go(func() {
						body := asking("m")
						if i == 2 { // a stream keeps its status open while it waits
							body = `{"model":"m","prompt":"hi","max_tokens":5,"stream":true}`
						}
						a := w.post(completionsPath, body)
						if took := time.Since(began); a.status != 503 || !strings.Contains(a.body, `"code":"`+tt.code+`"`) || a.header.Get("Retry-After") == "" || took > tt.within+time.Second {
							t.Errorf("after %v: got %d %v %s %v", took, a.status, a.header, a.body, a.err)
						}
					})
				}
				tt.end(w)
				wg.Wait()
				if n := w.metric("pdproxy_shed_total", tt.code); n != 3 {
					t.Errorf("got %v requests counted as shed", n)
				}
			})
		})
	}
}

// TestWaitIsBounded: a waiting request occupies a place of limits.max_exchanges and of
// limits.per_client. A client that leaves frees both places.
func TestWaitIsBounded(t *testing.T) {
	for _, tt := range []struct {
		name   string
		limits func(*config.Limits)
		code   string
	}{
		{"max_exchanges", func(l *config.Limits) { l.MaxExchanges, l.Queue = 2, 0 }, "queue_full"},
		{"per_client", func(l *config.Limits) { l.PerClient = 2 }, "client_limit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, _, back := emptyWorld(t, time.Hour, tt.limits)
				ctx, leave := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { ask(ctx, w.client, "POST", "http://proxy"+completionsPath, asking("m")) })
				wg.Go(func() { w.post(completionsPath, asking("m")) })
				synctest.Wait()
				if a := w.post(completionsPath, asking("m")); a.status != 429 || !strings.Contains(a.body, tt.code) {
					t.Errorf("the third request: got %d %s", a.status, a.body)
				}
				leave()
				synctest.Wait()
				if n := w.metric("pdproxy_requests_waiting", "m"); n != 1 {
					t.Errorf("got %v waiting requests after one client has left", n)
				}
				wg.Go(func() {
					if a := w.post(completionsPath, asking("m")); a.status != 200 {
						t.Errorf("the next request: got %d %s", a.status, a.body)
					}
				})
				synctest.Wait()
				back()
				wg.Wait()
			})
		})
	}
}

// TestNoWaitByDefault: without limits.no_engine_timeout a request without an engine gets
// an error at once.
func TestNoWaitByDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := emptyWorld(t, 0, nil)
		if a := w.post(completionsPath, asking("m")); a.status != 503 || !strings.Contains(a.body, "no_target") {
			t.Errorf("%d %s", a.status, a.body)
		}
		if a := w.get("/v1/models"); strings.Contains(a.body, `"id":"m"`) {
			t.Errorf("the list of models contains a model without engines: %s", a.body)
		}
		if a := w.get("/health"); a.status != 503 {
			t.Errorf("health: %d", a.status)
		}
	})
}

// TestWaitOverSockets: a request waits over a real connection. If the client closes the
// connection, the wait ends.
func TestWaitOverSockets(t *testing.T) {
	e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, `{"id":"x","choices":[{"text":"x","finish_reason":"stop"}]}`) }}
	w := newWorld(t, setup{engines: []*fakeEngine{e}, sockets: true, config: func(c *config.Config) {
		c.Limits.NoEngineTimeout = config.Duration(time.Minute)
	}})
	if err := w.registry.Apply(engine.SourceStatic, nil, 0); err != nil {
		t.Fatal(err)
	}
	for len(w.registry.Snapshot().Instances) > 0 {
		time.Sleep(time.Millisecond)
	}
	waiting := func(want float64) {
		for w.metric("pdproxy_requests_waiting", "m", "no_engine") != want {
			time.Sleep(time.Millisecond)
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { ask(ctx, w.client, "POST", "http://proxy"+completionsPath, asking("m")) })
	wg.Go(func() {
		if a := w.post(completionsPath, asking("m")); a.status != 200 {
			t.Errorf("%d %s %v", a.status, a.body, a.err)
		}
	})
	waiting(2)
	leave()
	waiting(1)
	if err := w.registry.Apply(engine.SourceStatic, []config.Engine{e.spec()}, 0); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	waiting(0)
}

// TestInventedModels: model names that clients invent add no series.
func TestInventedModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, `{"id":"x","choices":[{"text":"x","finish_reason":"stop"}]}`) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		w.post(completionsPath, asking("m"))
		w.post(completionsPath, asking("invented"))
		before := w.series()
		for i := range 10_000 {
			if a := w.post(completionsPath, asking(fmt.Sprint("invented-", i))); a.status != 404 {
				t.Fatalf("request %d: got %d %s", i, a.status, a.body)
			}
		}
		if after := w.series(); after != before {
			t.Errorf("got %d series before 10,000 invented models, and %d after", before, after)
		}
		if n := w.metric("pdproxy_exchanges_total", "other", "client_error"); n != 10_001 {
			t.Errorf("got %v exchanges of other models", n)
		}
		if n := w.metric("pdproxy_exchanges_total", "m", "ok"); n != 1 {
			t.Errorf("got %v exchanges of the known model", n)
		}
	})
}

// series counts the series of all metrics.
func (w *world) series() (n int) {
	families, err := w.prom.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		n += len(f.GetMetric())
	}
	return n
}
