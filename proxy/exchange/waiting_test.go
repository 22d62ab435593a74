package exchange_test

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
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// adds makes the engines of list those of the configuration. The probes of stopped ones get no
// answer.
func adds(w *world.World, list ...*world.Engine) {
	w.T.Helper()
	next := *w.Config
	next.Engines = nil
	for _, e := range list {
		next.Engines = append(next.Engines, e.Spec())
	}
	if err := w.Registry.Apply(engine.SourceStatic, next.Instances(), 0); err != nil {
		w.T.Fatal(err)
	}
}

// TestAwaitsFirstProbe: a request whose engines have not been looked at yet waits for their first
// probes. It gets no error, and no other model.
func TestAwaitsFirstProbe(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer time.Duration // of the probes; 0: never
		model  string
		by     string // model of the answer; "": 503
		took   time.Duration
	}{
		{"its engine", 300 * time.Millisecond, "a", "a", 300 * time.Millisecond},
		{"without a fallback", 300 * time.Millisecond, "c", "c", 300 * time.Millisecond},
		{"another model", 300 * time.Millisecond, "b", "b", 0},
		{"a dead engine", 0, "a", "b", time.Second},
		{"a dead engine without a fallback", 0, "c", "", time.Second},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			a, b, c := world.Answering("a", "a"), world.Answering("b", "b"), world.Answering("c", "c")
			w := world.New(t, world.Setup{Engines: []*world.Engine{a, b, c}, Config: func(cfg *config.Config) {
				cfg.Models = []config.Model{{Name: "a", Fallback: []string{"b"}}}
			}})
			leave(w, b)
			answerA, answerC := a.Stop(), c.Stop()
			adds(w, a, b, c)
			if tt.answer > 0 {
				time.AfterFunc(tt.answer, answerA)
				time.AfterFunc(tt.answer, answerC)
			}
			began := time.Now()
			got := w.Post(world.CompletionsPath, world.Asking(tt.model))
			if took := time.Since(began); took != tt.took {
				t.Errorf("answered after %v, want %v", took, tt.took)
			}
			if tt.by == "" {
				if got.Status != 503 {
					t.Errorf("got %d %s", got.Status, got.Body)
				}
			} else if fellBack(w, got, tt.by, "failed", 0); tt.by == tt.model {
				fellBack(w, got, tt.by, "no_engine", 0)
			}
			if tt.answer == 0 {
				answerA()
				answerC()
			}
		})
	}
}

// TestWaitForFirstProbeEnds: a client that leaves ends the wait for the first probe.
func TestWaitForFirstProbeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, b := world.Answering("e", "m"), world.Answering("b", "b")
		w := world.New(t, world.Setup{Engines: []*world.Engine{e, b}})
		leave(w, b)
		defer e.Stop()()
		adds(w, e, b)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if got := world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Asking("m")); got.Err == nil {
			t.Errorf("got %d", got.Status)
		}
		synctest.Wait()
		if n := w.Running(); n != 0 {
			t.Errorf("%d requests run", n)
		}
	})
}

// TestWaitsForAnEngine: requests for a known model wait until an engine is ready. The
// proxy serves them in the order of their arrival.
func TestWaitsForAnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, e, back := world.EmptyWorld(t, time.Hour, nil)
		if a := w.Get("/v1/models"); !strings.Contains(a.Body, `"id":"m"`) {
			t.Errorf("the list of models lacks the model: %s", a.Body)
		}
		if a := w.Get("/health"); a.Status != 200 {
			t.Errorf("health without an engine: got %d %s", a.Status, a.Body)
		}
		const requests = 20
		var wg sync.WaitGroup
		for i := range requests {
			wg.Go(func() {
				body := world.Asking("m")
				if i%2 == 1 {
					body = `{"prompt":"hi","max_tokens":5}` // the only known model
				}
				if a := w.Post(world.CompletionsPath, body, "X-Request-Id", fmt.Sprintf("r%02d", i)); a.Status != 200 {
					t.Errorf("request %d: got %d %s", i, a.Status, a.Body)
				}
			})
			synctest.Wait()
		}
		if n := w.Metric("pdproxy_requests_waiting", "m", "no_engine"); n != requests {
			t.Errorf("got %v waiting requests, want %d", n, requests)
		}
		if n := w.Metric("pdproxy_requests_running", "m"); n != 0 {
			t.Errorf("got %v running requests without an engine", n)
		}
		time.Sleep(time.Minute)
		if a := w.Post(world.CompletionsPath, world.Asking("invented")); a.Status != 503 && a.Status != 404 {
			t.Errorf("a model that no engine has served: got %d %s", a.Status, a.Body)
		}
		back()
		wg.Wait()
		if n := len(e.Seen()); n != requests {
			t.Errorf("the engine got %d requests", n)
		}
		if n := w.Metric("pdproxy_requests_waiting", "m") + w.Metric("pdproxy_requests_running", "m"); n != 0 {
			t.Errorf("got %v counted requests after their end", n)
		}
		if n := w.Metric("pdproxy_queue_wait_seconds", "m"); n != requests {
			t.Errorf("%v waits observed", n)
		}
	})
}

// TestWaitEnds: each event that ends the wait for an engine, and the client's answer.
func TestWaitEnds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		end    func(w *world.World)
		code   string
		within time.Duration
	}{
		{"time", func(*world.World) {}, "no_engine_timeout", time.Minute},
		{"drain", func(w *world.World) {
			time.Sleep(time.Second)
			if a := w.Operate("POST", "/v1/drain", "{}"); a.Status >= 300 {
				w.T.Errorf("drain: %d %s", a.Status, a.Body)
			}
		}, "draining", time.Second},
		{"shutdown", func(w *world.World) {
			time.Sleep(time.Second)
			w.End()
		}, "draining", time.Second},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w, _, _ := world.EmptyWorld(t, time.Minute, nil)
			began := time.Now()
			var wg sync.WaitGroup
			for i := range 3 {
				wg.Go(func() {
					body := world.Asking("m")
					if i == 2 { // a stream keeps its status open while it waits
						body = `{"model":"m","prompt":"hi","max_tokens":5,"stream":true}`
					}
					a := w.Post(world.CompletionsPath, body)
					if took := time.Since(began); a.Status != 503 || !strings.Contains(a.Body, `"code":"`+tt.code+`"`) || a.Header.Get("Retry-After") == "" || took > tt.within+time.Second {
						t.Errorf("after %v: got %d %v %s %v", took, a.Status, a.Header, a.Body, a.Err)
					}
				})
			}
			tt.end(w)
			wg.Wait()
			if n := w.Metric("pdproxy_shed_total", tt.code); n != 3 {
				t.Errorf("got %v requests counted as shed", n)
			}
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
		world.Run(t, tt.name, func(t *testing.T) {
			w, _, back := world.EmptyWorld(t, time.Hour, tt.limits)
			ctx, leave := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Asking("m")) })
			wg.Go(func() { w.Post(world.CompletionsPath, world.Asking("m")) })
			synctest.Wait()
			if a := w.Post(world.CompletionsPath, world.Asking("m")); a.Status != 429 || !strings.Contains(a.Body, tt.code) {
				t.Errorf("the third request: got %d %s", a.Status, a.Body)
			}
			leave()
			synctest.Wait()
			if n := w.Metric("pdproxy_requests_waiting", "m"); n != 1 {
				t.Errorf("got %v waiting requests after one client has left", n)
			}
			wg.Go(func() {
				if a := w.Post(world.CompletionsPath, world.Asking("m")); a.Status != 200 {
					t.Errorf("the next request: got %d %s", a.Status, a.Body)
				}
			})
			synctest.Wait()
			back()
			wg.Wait()
		})
	}
}

// TestNoWaitByDefault: without limits.no_engine_timeout a request without an engine gets
// an error at once.
func TestNoWaitByDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := world.EmptyWorld(t, 0, nil)
		if a := w.Post(world.CompletionsPath, world.Asking("m")); a.Status != 503 || !strings.Contains(a.Body, "no_target") {
			t.Errorf("%d %s", a.Status, a.Body)
		}
		if a := w.Get("/v1/models"); strings.Contains(a.Body, `"id":"m"`) {
			t.Errorf("the list of models contains a model without engines: %s", a.Body)
		}
		if a := w.Get("/health"); a.Status != 503 {
			t.Errorf("health: %d", a.Status)
		}
	})
}

// TestWaitOverSockets: a request waits over a real connection. If the client closes the
// connection, the wait ends.
func TestWaitOverSockets(t *testing.T) {
	e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{"id":"x","choices":[{"text":"x","finish_reason":"stop"}]}`) }}
	w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Sockets: true, Config: func(c *config.Config) {
		c.Limits.NoEngineTimeout = config.Duration(time.Minute)
	}})
	if err := w.Registry.Apply(engine.SourceStatic, nil, 0); err != nil {
		t.Fatal(err)
	}
	for len(w.Registry.Snapshot().Instances) > 0 {
		time.Sleep(time.Millisecond)
	}
	waiting := func(want float64) {
		for w.Metric("pdproxy_requests_waiting", "m", "no_engine") != want {
			time.Sleep(time.Millisecond)
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Asking("m")) })
	wg.Go(func() {
		if a := w.Post(world.CompletionsPath, world.Asking("m")); a.Status != 200 {
			t.Errorf("%d %s %v", a.Status, a.Body, a.Err)
		}
	})
	waiting(2)
	leave()
	waiting(1)
	if err := w.Registry.Apply(engine.SourceStatic, []config.Engine{e.Spec()}, 0); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	waiting(0)
}

// TestInventedModels: model names that clients invent add no series.
func TestInventedModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{"id":"x","choices":[{"text":"x","finish_reason":"stop"}]}`) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}})
		w.Post(world.CompletionsPath, world.Asking("m"))
		w.Post(world.CompletionsPath, world.Asking("invented"))
		before := series(w)
		for i := range 10_000 {
			if a := w.Post(world.CompletionsPath, world.Asking(fmt.Sprint("invented-", i))); a.Status != 404 {
				t.Fatalf("request %d: got %d %s", i, a.Status, a.Body)
			}
		}
		if after := series(w); after != before {
			t.Errorf("got %d series before 10,000 invented models, and %d after", before, after)
		}
		if n := w.Metric("pdproxy_exchanges_total", "other", "client_error"); n != 10_001 {
			t.Errorf("got %v exchanges of other models", n)
		}
		if n := w.Metric("pdproxy_exchanges_total", "m", "ok"); n != 1 {
			t.Errorf("got %v exchanges of the known model", n)
		}
	})
}

// series counts the series of all metrics.
func series(w *world.World) (n int) {
	families, err := w.Prometheus.Gather()
	if err != nil {
		w.T.Fatal(err)
	}
	for _, f := range families {
		n += len(f.GetMetric())
	}
	return n
}
