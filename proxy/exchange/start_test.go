package exchange_test

import (
	"context"
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
