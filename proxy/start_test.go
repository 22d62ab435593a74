package proxy

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// adds makes the engines of list those of the configuration. The probes of stopped ones get no
// answer.
func (w *world) adds(list ...*fakeEngine) {
	w.t.Helper()
	next := *w.cfg.Load()
	next.Engines = nil
	for _, e := range list {
		next.Engines = append(next.Engines, e.spec())
	}
	if err := w.registry.Apply(engine.SourceStatic, next.Instances(), 0); err != nil {
		w.t.Fatal(err)
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
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b, c := answering("a", "a"), answering("b", "b"), answering("c", "c")
				w := newWorld(t, setup{engines: []*fakeEngine{a, b, c}, config: func(cfg *config.Config) {
					cfg.Models = []config.Model{{Name: "a", Fallback: []string{"b"}}}
				}})
				w.leave(b)
				answerA, answerC := a.stop(), c.stop()
				w.adds(a, b, c)
				if tt.answer > 0 {
					time.AfterFunc(tt.answer, answerA)
					time.AfterFunc(tt.answer, answerC)
				}
				began := time.Now()
				got := w.post(completionsPath, asking(tt.model))
				if took := time.Since(began); took != tt.took {
					t.Errorf("answered after %v, want %v", took, tt.took)
				}
				if tt.by == "" {
					if got.status != 503 {
						t.Errorf("got %d %s", got.status, got.body)
					}
				} else if w.fellBack(got, tt.by, "failed", 0); tt.by == tt.model {
					w.fellBack(got, tt.by, "no_engine", 0)
				}
				if tt.answer == 0 {
					answerA()
					answerC()
				}
			})
		})
	}
}

// TestWaitForFirstProbeEnds: a client that leaves ends the wait for the first probe.
func TestWaitForFirstProbeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, b := answering("e", "m"), answering("b", "b")
		w := newWorld(t, setup{engines: []*fakeEngine{e, b}})
		w.leave(b)
		defer e.stop()()
		w.adds(e, b)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if got := ask(ctx, w.client, "POST", "http://proxy"+completionsPath, asking("m")); got.err == nil {
			t.Errorf("got %d", got.status)
		}
		synctest.Wait()
		if n := w.books.Running.Len(); n != 0 {
			t.Errorf("%d requests run", n)
		}
	})
}

// TestHealthAwaitsFirstProbes: the proxy is not ready before every engine has been looked at, also
// if requests may wait for engines.
func TestHealthAwaitsFirstProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, b := answering("e", "m"), answering("b", "b")
		w := newWorld(t, setup{engines: []*fakeEngine{e, b}, config: func(cfg *config.Config) {
			cfg.Limits.NoEngineTimeout = config.Duration(time.Minute)
		}})
		if got := w.get("/health"); got.status != 200 {
			t.Errorf("got %d %s", got.status, got.body)
		}
		defer e.stop()()
		late := engine.New(engine.Options{
			Health: w.cfg.Load().Health, Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
			NewClient: func(config.Engine) (upstream.Client, error) { return upstream.New(upstream.Options{}), nil },
			NewProbe:  func(config.Engine) (http.RoundTripper, error) { return probes{e.host(): e}, nil },
		})
		late.Know([]engine.Known{{Model: "m"}})
		if err := late.Apply(engine.SourceStatic, []config.Engine{e.spec()}, 0); err != nil {
			t.Fatal(err)
		}
		w.options.Registry, w.options.Coordinator = late, coordinator.NewLocal(late, w.decider, w.decider, coordinator.State{}, nil, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { late.Run(ctx); close(done) }()
		defer func() { cancel(); <-done; w.options.Registry, w.options.Coordinator = w.registry, w.local }()
		if got := w.get("/health"); got.status != 503 {
			t.Errorf("before the first probe: got %d %s", got.status, got.body)
		}
	})
}
