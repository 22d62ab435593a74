package attempt_test

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// outWorld is a world with one prefill engine and one or two decode engines. The decode engine
// d goes out while prefill computes.
type outWorld struct {
	*world.World
	p, d    *world.Engine
	proceed func() // ends the silence of d
}

// longPrompt is a request whose prefill takes 10 s on an engine of 10 ms per token.
var longPrompt = fmt.Sprintf(`{"model":"m","prompt":%q,"max_tokens":5}`, strings.Repeat("word", 1000))

// newOutWorld starts a world whose prefill engine serves legs with serve. If there are more
// engines, d refuses the connections of legs.
func newOutWorld(t *testing.T, serve func(*world.Conn, int), edit func(*config.Config), more ...*world.Engine) *outWorld {
	w := &outWorld{
		p: &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: serve},
		d: &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
			<-c.E.Stopped()
			if strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
				c.Send(world.StreamHead)
				c.Hold()
				return
			}
			c.JSON(200, world.DoneAnswer)
		}},
	}
	if len(more) > 0 {
		w.d.Dialing = syscall.ECONNREFUSED
	}
	w.World = world.New(t, world.Setup{Engines: append([]*world.Engine{w.p, w.d}, more...), Config: func(c *config.Config) {
		c.Health = config.Health{
			Interval: config.Duration(100 * time.Millisecond), Timeout: config.Duration(50 * time.Millisecond),
			UnhealthyAfter: 1, HealthyAfter: 1,
		}
		c.Circuit.OpenFor = config.Duration(time.Minute)
		if edit != nil {
			edit(c)
		}
	}})
	return w
}

// measured makes the speed of prefill known: 10 ms per token.
func (w *outWorld) measured() {
	for range 20 {
		w.Registry.Snapshot().Instance("p").Load[0].Prefill.Measure(1000, 10*time.Second)
	}
}

// silent stops d, and returns when the proxy has noticed that.
func (w *outWorld) silent() {
	w.proceed = w.d.Stop()
	time.Sleep(time.Second)
}

// ends makes d refuse connections, and returns when the proxy has noticed that.
func (w *outWorld) ends() {
	w.d.End()
	time.Sleep(200 * time.Millisecond)
}

// refuses makes d refuse connections, first that of a leg.
func (w *outWorld) refuses() {
	w.d.End()
	w.Registry.Snapshot().Instance("d").Refused()
}

// opens opens the circuit of d.
func (w *outWorld) opens() { w.Registry.Snapshot().Instance("d").Breaker.Trip() }

// closes closes the circuit of d.
func (w *outWorld) closes() { w.Registry.Snapshot().Instance("d").Breaker.Success() }

// begin sends a request, and returns when prefill has computed for a second.
func (w *outWorld) begin(body string) (result func() world.Answer) {
	var a world.Answer
	var asked sync.WaitGroup
	asked.Go(func() { a = w.Post(world.CompletionsPath, body) })
	time.Sleep(time.Second)
	return func() world.Answer { asked.Wait(); synctest.Wait(); return a }
}

// noTarget asserts that the answer is the one of a request without a decode engine.
func noTarget(t *testing.T, a world.Answer) {
	t.Helper()
	if a.Status != 503 || !strings.Contains(a.Body, `"no_target"`) || !strings.Contains(a.Body, "for the decode of") {
		t.Errorf("got %d %s %v", a.Status, a.Body, a.Err)
	}
}

// TestPrefillWithoutDecodeIsAborted: the only decode engine goes out. The proxy closes the
// connection of a prefill that is far from its end, and the engine frees the blocks itself. The
// proxy waits for a prefill that may be near its end, as after the client has left, unless the
// process of decode has ended.
func TestPrefillWithoutDecodeIsAborted(t *testing.T) {
	for name, tt := range map[string]struct {
		body string
		out  func(*outWorld)
		open time.Duration // from the moment when decode is out until the connection is closed
	}{
		"the circuit opens":              {longPrompt, (*outWorld).opens, 0},
		"decode has ended":               {world.Completions(false), (*outWorld).ends, 0},
		"decode refuses a leg":           {world.Completions(false), (*outWorld).refuses, 0},
		"decode stops, then ends":        {longPrompt, func(w *outWorld) { w.silent(); w.ends() }, 0},
		"the prompt is short, no answer": {world.Completions(false), (*outWorld).opens, cleanup.PrefillLinger},
	} {
		world.Run(t, name, func(t *testing.T) {
			closed := make(chan time.Time, 2)
			w := newOutWorld(t, func(c *world.Conn, _ int) { c.Hold(); closed <- time.Now() }, nil)
			w.measured()
			result := w.begin(tt.body)
			tt.out(w)
			out := time.Now()
			noTarget(t, result())
			if open := (<-closed).Sub(out); open > tt.open || tt.open > 0 && open < tt.open {
				t.Errorf("prefill's connection was open for %v, want %v", open, tt.open)
			}
			if legs, n := len(w.p.Seen())+len(w.d.Seen()), w.Metric("pdproxy_kv_cleanups_total"); legs != 1 || n != 0 {
				t.Errorf("%d legs, %v clean-ups", legs, n)
			}
			if n := w.Metric("pdproxy_leg_errors_total"); n != 0 {
				t.Errorf("%v legs count as failed", n)
			}
		})
	}
}

// TestPrefillWithAnotherDecode: a decode engine is left when one goes out, prefill is near its end
// and answers, or decode only does not respond. Prefill is not aborted, and the request succeeds:
// decode is back, or its circuit is open and the leg goes to it nevertheless.
func TestPrefillWithAnotherDecode(t *testing.T) {
	for name, tt := range map[string]struct {
		body  string
		other bool
		out   func(*outWorld)
		back  func(*outWorld)
	}{
		"two decode engines":             {longPrompt, true, (*outWorld).opens, nil},
		"the only decode engine is back": {world.Completions(false), false, (*outWorld).opens, (*outWorld).closes},
		"the only circuit is open":       {world.Completions(false), false, (*outWorld).opens, nil},
		"decode does not respond":        {longPrompt, false, (*outWorld).silent, func(w *outWorld) { w.proceed() }},
	} {
		world.Run(t, name, func(t *testing.T) {
			var more []*world.Engine
			if tt.other {
				more = append(more, &world.Engine{Name: "d2", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }})
			}
			w := newOutWorld(t, func(c *world.Conn, _ int) { time.Sleep(2 * time.Second); c.JSON(200, world.NamedAnswer) }, nil, more...)
			w.measured()
			result := w.begin(tt.body)
			tt.out(w)
			if synctest.Wait(); tt.back != nil {
				tt.back(w)
			}
			if a := result(); a.Status != 200 || len(w.p.Seen()) != 1 {
				t.Errorf("got %d %s after %d prefill legs", a.Status, a.Body, len(w.p.Seen()))
			}
		})
	}
}

// TestAbortedPrefillStartsAgain: with limits.no_engine_timeout a request whose prefill was
// aborted waits for a decode engine, as a request that comes later.
func TestAbortedPrefillStartsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newOutWorld(t, func(c *world.Conn, nth int) {
			if nth == 1 {
				c.Hold()
				return
			}
			c.JSON(200, world.NamedAnswer)
		}, func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(time.Minute) })
		w.measured()
		result := w.begin(longPrompt)
		w.ends()
		out := time.Now()
		w.d.Begin()
		a := result()
		if took := time.Since(out); took > 5*time.Second {
			t.Errorf("the answer came %v after decode was back", took)
		}
		if a.Status != 200 || len(w.p.Seen()) != 2 || len(w.d.Seen()) != 1 {
			t.Errorf("got %d %s after %d prefill legs", a.Status, a.Body, len(w.p.Seen()))
		}
	})
}
