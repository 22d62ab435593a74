package proxy

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// fallbackTo makes b the fallback of model a.
func fallbackTo(c *config.Config) {
	c.Models = []config.Model{{Name: "a", Fallback: []string{"alias", "c"}}, {Name: "alias", AliasOf: "b"}}
}

// leave removes all engines but those given, and the remotes, from the registry. It returns
// when the others are ready.
func (w *world) leave(stay ...*fakeEngine) {
	w.t.Helper()
	next := *w.cfg.Load()
	next.Engines = nil
	for _, e := range stay {
		next.Engines = append(next.Engines, e.spec())
	}
	if err := w.registry.Apply("static", next.Instances(), 0); err != nil {
		w.t.Fatal(err)
	}
	unsettled := func(i *engine.Instance) bool { return i.State() != engine.Ready }
	for len(w.registry.Snapshot().Instances) > len(next.Instances()) || slices.ContainsFunc(w.registry.Snapshot().Instances, unsettled) {
		time.Sleep(time.Millisecond)
	}
	w.registry.Settle()
}

// fellBack asserts the answer of an engine, and the number of fallbacks for a reason.
func (w *world) fellBack(a answer, by, reason string, times float64) {
	w.t.Helper()
	if a.status != 200 || !strings.Contains(a.body, fmt.Sprintf(`"model":%q`, by)) {
		w.t.Errorf("got %d %s, want an answer of %s", a.status, a.body, by)
	}
	if n := w.metric("pdproxy_fallbacks_total", "model", reason); n != times {
		w.t.Errorf("got %v fallbacks because of %s, want %v", n, reason, times)
	}
}

// TestFallback: a model without engines is replaced by the first fallback that has one, and
// only then.
func TestFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, c := answering("a", "a"), answering("b", "b"), answering("c", "c")
		w := newWorld(t, setup{engines: []*fakeEngine{a, b, c}, needs: abi.NeedConversation | abi.NeedPrompt, config: fallbackTo})
		w.fellBack(w.post(completionsPath, asking("a")), "a", "no_engine", 0)
		w.leave(b, c)
		w.fellBack(w.post(completionsPath, asking("a")), "b", "no_engine", 1)
		if legs := b.seen(); len(legs) != 1 || legs[0].body != asking("b") {
			t.Errorf("b got %+v", legs)
		}
		w.leave(c)
		w.fellBack(w.post(completionsPath, asking("a")), "c", "no_engine", 3)
		if n := w.metric("pdproxy_exchanges_total", "c"); n != 1 {
			t.Errorf("got %v exchanges of c", n)
		}
		for _, model := range []string{"a", "b", "c"} {
			if n := w.metric("pdproxy_requests_running", model); n != 0 {
				t.Errorf("%v requests of %s run", n, model)
			}
		}
		if got := w.get("/v1/models"); !strings.Contains(got.body, `"id":"a"`) || strings.Contains(got.body, "alias") {
			t.Errorf("models: %s", got.body)
		}
		if got := w.post(completionsPath, asking("alias")); got.status != 404 { // the fallbacks of a are not those of alias
			t.Errorf("alias: got %d %s", got.status, got.body)
		}
		w.leave()
		if got := w.post(completionsPath, asking("a")); got.status != 503 {
			t.Errorf("without engines: got %d %s", got.status, got.body)
		}
	})
}

// TestFallbackOfAPair: a model without one of its phases is replaced, and both legs of the
// fallback get the name of the fallback.
func TestFallbackOfAPair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := func(model string) (p, d *fakeEngine) {
			p, d = answering("p"+model, model), answering("d"+model, model)
			p.role, p.connector, p.serve = "prefill", "vllm-nixl", prefillAnswers
			d.role, d.connector = "decode", "vllm-nixl"
			return p, d
		}
		pa, da := pair("a")
		pb, db := pair("b")
		w := newWorld(t, setup{engines: []*fakeEngine{pa, da, pb, db}, config: fallbackTo})
		w.leave(pa, pb, db)
		w.fellBack(w.post(completionsPath, asking("a")), "db", "no_engine", 1)
		for _, e := range []*fakeEngine{pb, db} {
			if legs := e.seen(); len(legs) != 1 || !strings.Contains(legs[0].body, `"model":"b"`) {
				t.Errorf("%s got %+v", e.name, legs)
			}
		}
		if n := len(pa.seen()); n != 0 {
			t.Errorf("prefill of a got %d requests, whose KV no engine reads", n)
		}
	})
}

// TestFallbackWhenDecodeFails: a request leaves a model when the only decode engine has
// failed it once. Another try with the KV of the same prefill engine would fail, too.
func TestFallbackWhenDecodeFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d, b := answering("p", "a"), answering("d", "a"), answering("b", "b")
		p.role, p.connector, p.serve = "prefill", "vllm-nixl", prefillAnswers
		d.role, d.connector, d.serve = "decode", "vllm-nixl", func(c *engineConn, _ int) { c.hangUp() }
		w := newWorld(t, setup{engines: []*fakeEngine{p, d, b}, config: fallbackTo})
		w.fellBack(w.post(completionsPath, asking("a")), "b", "failed", 1)
		if n := w.metric("pdproxy_retries_total"); n != 1 {
			t.Errorf("got %v retries, want only that with the fallback", n)
		}
	})
}

// TestFallbackWhenTheEngineFails: a request leaves a model when its only engine has failed
// the request, and later requests do not try the engine while its circuit is open. The
// trial of the circuit returns to the model.
func TestFallbackWhenTheEngineFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := answering("a", "a"), answering("b", "b")
		var works atomic.Bool
		answers := a.serve
		a.serve = func(c *engineConn, nth int) {
			if works.Load() {
				answers(c, nth)
				return
			}
			c.hangUp()
		}
		w := newWorld(t, setup{engines: []*fakeEngine{a, b}, config: func(c *config.Config) {
			fallbackTo(c)
			c.Circuit.Failures, c.Circuit.OpenFor = 1, config.Duration(time.Minute)
		}})
		w.fellBack(w.post(completionsPath, asking("a")), "b", "failed", 1)
		tried := len(a.seen())
		w.fellBack(w.post(completionsPath, asking("a")), "b", "failed", 2)
		if n := len(a.seen()); n != tried {
			t.Errorf("the engine with an open circuit got %d more requests", n-tried)
		}
		works.Store(true)
		time.Sleep(time.Minute)
		w.fellBack(w.post(completionsPath, asking("a")), "a", "failed", 2)
		w.fellBack(w.post(completionsPath, asking("a")), "a", "failed", 2)
	})
}

// TestNoFallback: an engine's refusal of the request, and a stream that breaks, are the
// answer: the fallback gets nothing.
func TestNoFallback(t *testing.T) {
	for name, tt := range map[string]struct {
		serve func(c *engineConn, _ int)
		want  string
	}{
		"refused": {func(c *engineConn, _ int) { c.json(400, `{"error":{"message":"too long"}}`) }, "too long"},
		"broken stream": {func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks("data: {\"model\":\"a\"}\n\n")
			c.hangUp()
		}, "not complete"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := answering("a", "a"), answering("b", "b")
				a.serve = tt.serve
				w := newWorld(t, setup{engines: []*fakeEngine{a, b}, config: fallbackTo})
				got := w.post(completionsPath, `{"model":"a","prompt":"hi","stream":true}`)
				if !strings.Contains(got.body, tt.want) || len(b.seen()) != 0 {
					t.Errorf("got %d %s, and %d requests of b", got.status, got.body, len(b.seen()))
				}
			})
		})
	}
}

// TestFallbackThenWait: when no model of the list has an engine, the request waits for its
// first model.
func TestFallbackThenWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := answering("a", "a"), answering("b", "b")
		w := newWorld(t, setup{engines: []*fakeEngine{a, b}, config: func(c *config.Config) {
			fallbackTo(c)
			c.Limits.NoEngineTimeout = config.Duration(time.Hour)
		}})
		w.leave()
		var wg sync.WaitGroup
		wg.Go(func() { w.fellBack(w.post(completionsPath, asking("a")), "a", "no_engine", 2) })
		synctest.Wait()
		if n := w.metric("pdproxy_requests_waiting", "a", "no_engine"); n != 1 {
			t.Errorf("got %v requests that wait for a", n)
		}
		w.leave(a)
		wg.Wait()
		if n := w.metric("pdproxy_requests_waiting"); n != 0 {
			t.Errorf("got %v requests that wait", n)
		}
		if n := len(b.seen()); n != 0 {
			t.Errorf("b got %d requests", n)
		}
	})
}
