package exchange_test

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
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// fallbackTo makes b the fallback of model a.
func fallbackTo(c *config.Config) {
	c.Models = []config.Model{{Name: "a", Fallback: []string{"alias", "c"}}, {Name: "alias", AliasOf: "b"}}
}

// leave removes all engines but those given, and the remotes, from the registry. It returns
// when the others are ready.
func leave(w *world.World, stay ...*world.Engine) {
	w.T.Helper()
	next := *w.Config
	next.Engines = nil
	for _, e := range stay {
		next.Engines = append(next.Engines, e.Spec())
	}
	if err := w.Registry.Apply("static", next.Instances(), 0); err != nil {
		w.T.Fatal(err)
	}
	unsettled := func(i *engine.Instance) bool { return i.State() != engine.Ready }
	for len(w.Registry.Snapshot().Instances) > len(next.Instances()) || slices.ContainsFunc(w.Registry.Snapshot().Instances, unsettled) {
		time.Sleep(time.Millisecond)
	}
	w.Registry.Settle()
}

// fellBack asserts the answer of an engine, and the number of fallbacks for a reason.
func fellBack(w *world.World, a world.Answer, by, reason string, times float64) {
	w.T.Helper()
	if a.Status != 200 || !strings.Contains(a.Body, fmt.Sprintf(`"model":%q`, by)) {
		w.T.Errorf("got %d %s, want an answer of %s", a.Status, a.Body, by)
	}
	if n := w.Metric("pdproxy_fallbacks_total", "model", reason); n != times {
		w.T.Errorf("got %v fallbacks because of %s, want %v", n, reason, times)
	}
}

// TestFallback: a model without engines is replaced by the first fallback that has one, and
// only then.
func TestFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, c := world.Answering("a", "a"), world.Answering("b", "b"), world.Answering("c", "c")
		w := world.New(t, world.Setup{Engines: []*world.Engine{a, b, c}, Needs: abi.NeedConversation | abi.NeedPrompt, Config: fallbackTo})
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "a", "no_engine", 0)
		leave(w, b, c)
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "b", "no_engine", 1)
		if legs := b.Seen(); len(legs) != 1 || legs[0].Body != world.Asking("b") {
			t.Errorf("b got %+v", legs)
		}
		leave(w, c)
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "c", "no_engine", 3)
		if n := w.Metric("pdproxy_exchanges_total", "c"); n != 1 {
			t.Errorf("got %v exchanges of c", n)
		}
		for _, model := range []string{"a", "b", "c"} {
			if n := w.Metric("pdproxy_requests_running", model); n != 0 {
				t.Errorf("%v requests of %s run", n, model)
			}
		}
		if got := w.Get("/v1/models"); !strings.Contains(got.Body, `"id":"a"`) || strings.Contains(got.Body, "alias") {
			t.Errorf("models: %s", got.Body)
		}
		if got := w.Post(world.CompletionsPath, world.Asking("alias")); got.Status != 404 { // the fallbacks of a are not those of alias
			t.Errorf("alias: got %d %s", got.Status, got.Body)
		}
		leave(w)
		if got := w.Post(world.CompletionsPath, world.Asking("a")); got.Status != 503 {
			t.Errorf("without engines: got %d %s", got.Status, got.Body)
		}
	})
}

// TestFallbackOfAPair: a model without one of its phases is replaced, and both legs of the
// fallback get the name of the fallback.
func TestFallbackOfAPair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := func(model string) (p, d *world.Engine) {
			p, d = world.Answering("p"+model, model), world.Answering("d"+model, model)
			p.Role, p.Connector, p.Serve = "prefill", "vllm-nixl", world.PrefillAnswers
			d.Role, d.Connector = "decode", "vllm-nixl"
			return p, d
		}
		pa, da := pair("a")
		pb, db := pair("b")
		w := world.New(t, world.Setup{Engines: []*world.Engine{pa, da, pb, db}, Config: fallbackTo})
		leave(w, pa, pb, db)
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "db", "no_engine", 1)
		for _, e := range []*world.Engine{pb, db} {
			if legs := e.Seen(); len(legs) != 1 || !strings.Contains(legs[0].Body, `"model":"b"`) {
				t.Errorf("%s got %+v", e.Name, legs)
			}
		}
		if n := len(pa.Seen()); n != 0 {
			t.Errorf("prefill of a got %d requests, whose KV no engine reads", n)
		}
	})
}

// TestFallbackWhenDecodeFails: a request leaves a model when the only decode engine has
// failed it once. Another try with the KV of the same prefill engine would fail, too.
func TestFallbackWhenDecodeFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d, b := world.Answering("p", "a"), world.Answering("d", "a"), world.Answering("b", "b")
		p.Role, p.Connector, p.Serve = "prefill", "vllm-nixl", world.PrefillAnswers
		d.Role, d.Connector, d.Serve = "decode", "vllm-nixl", func(c *world.Conn, _ int) { c.HangUp() }
		w := world.New(t, world.Setup{Engines: []*world.Engine{p, d, b}, Config: fallbackTo})
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "b", "failed", 1)
		if n := w.Metric("pdproxy_retries_total"); n != 1 {
			t.Errorf("got %v retries, want only that with the fallback", n)
		}
	})
}

// TestFallbackWhenTheEngineFails: a request leaves a model when its only engine has failed
// the request, and later requests do not try the engine while its circuit is open. The
// trial of the circuit returns to the model.
func TestFallbackWhenTheEngineFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := world.Answering("a", "a"), world.Answering("b", "b")
		var works atomic.Bool
		answers := a.Serve
		a.Serve = func(c *world.Conn, nth int) {
			if works.Load() {
				answers(c, nth)
				return
			}
			c.HangUp()
		}
		w := world.New(t, world.Setup{Engines: []*world.Engine{a, b}, Config: func(c *config.Config) {
			fallbackTo(c)
			c.Circuit.Failures, c.Circuit.OpenFor = 1, config.Duration(time.Minute)
		}})
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "b", "failed", 1)
		tried := len(a.Seen())
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "b", "failed", 2)
		if n := len(a.Seen()); n != tried {
			t.Errorf("the engine with an open circuit got %d more requests", n-tried)
		}
		works.Store(true)
		time.Sleep(time.Minute)
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "a", "failed", 2)
		fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "a", "failed", 2)
	})
}

// TestNoFallback: an engine's refusal of the request, and a stream that breaks, are the
// answer: the fallback gets nothing.
func TestNoFallback(t *testing.T) {
	for name, tt := range map[string]struct {
		serve func(c *world.Conn, _ int)
		want  string
	}{
		"refused": {func(c *world.Conn, _ int) { c.JSON(400, `{"error":{"message":"too long"}}`) }, "too long"},
		"broken stream": {func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks("data: {\"model\":\"a\"}\n\n")
			c.HangUp()
		}, "not complete"},
	} {
		world.Run(t, name, func(t *testing.T) {
			a, b := world.Answering("a", "a"), world.Answering("b", "b")
			a.Serve = tt.serve
			w := world.New(t, world.Setup{Engines: []*world.Engine{a, b}, Config: fallbackTo})
			got := w.Post(world.CompletionsPath, `{"model":"a","prompt":"hi","stream":true}`)
			if !strings.Contains(got.Body, tt.want) || len(b.Seen()) != 0 {
				t.Errorf("got %d %s, and %d requests of b", got.Status, got.Body, len(b.Seen()))
			}
		})
	}
}

// TestFallbackThenWait: when no model of the list has an engine, the request waits for its
// first model.
func TestFallbackThenWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := world.Answering("a", "a"), world.Answering("b", "b")
		w := world.New(t, world.Setup{Engines: []*world.Engine{a, b}, Config: func(c *config.Config) {
			fallbackTo(c)
			c.Limits.NoEngineTimeout = config.Duration(time.Hour)
		}})
		leave(w)
		var wg sync.WaitGroup
		wg.Go(func() { fellBack(w, w.Post(world.CompletionsPath, world.Asking("a")), "a", "no_engine", 2) })
		synctest.Wait()
		if n := w.Metric("pdproxy_requests_waiting", "a", "no_engine"); n != 1 {
			t.Errorf("got %v requests that wait for a", n)
		}
		leave(w, a)
		wg.Wait()
		if n := w.Metric("pdproxy_requests_waiting"); n != 0 {
			t.Errorf("got %v requests that wait", n)
		}
		if n := len(b.Seen()); n != 0 {
			t.Errorf("b got %d requests", n)
		}
	})
}
