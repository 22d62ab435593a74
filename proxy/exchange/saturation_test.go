package exchange_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestSaturation: a request waits while the engines of its model are saturated, and goes on when
// they are not, when they do not report any more, and when they have died.
func TestSaturation(t *testing.T) {
	for _, tt := range []struct {
		name    string
		waiting int32
		usage   float32
		relief  func(w *world.World)
		status  int
	}{
		{"waiting requests", 2, 0, func(w *world.World) { w.Says("e", 3, 1, 0) }, 200},
		{"KV memory", 0, 0.8, func(w *world.World) { w.Says("e", 3, 0, 0.79) }, 200},
		{"restart of the engine", 9, 0, func(w *world.World) { w.Registry.Snapshot().Instance("e").Load[0].Forget() }, 200},
		{"the engine leaves", 9, 0, func(w *world.World) {
			if err := w.Registry.Apply(engine.SourceStatic, nil, 0); err != nil {
				w.T.Error(err)
			}
		}, 404},
		{"switched off", 9, 1, func(w *world.World) {
			cfg := *w.Config
			cfg.Limits.SaturationQueueDepth, cfg.Limits.SaturationKVUsage = 0, 0
			w.Reload(&cfg, nil)
		}, 200},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: world.BySaturation})
			w.Says("e", 3, tt.waiting, tt.usage)
			before := len(e.Seen())
			got := make(chan world.Answer, 1)
			go func() { got <- w.Post(world.CompletionsPath, world.Completions(false)) }()
			time.Sleep(5 * time.Second)
			if n := w.Metric("pdproxy_requests_waiting", "m", "saturated"); n != 1 {
				t.Errorf("%v requests are shown as held, want 1", n)
			}
			if n := len(e.Seen()) - before; n != 0 {
				t.Errorf("the engine got %d requests", n)
			}
			tt.relief(w)
			if a := <-got; a.Status != tt.status && tt.status == 200 || a.Status == 200 && tt.status != 200 {
				t.Errorf("got %d %s", a.Status, a.Body)
			}
			if n := w.Metric("pdproxy_requests_waiting", "m", "saturated"); n != 0 {
				t.Errorf("%v requests are shown as held after the end", n)
			}
			if notes := strings.Join(w.Explained().Notes, "\n"); !strings.Contains(notes, "the engines of the model were saturated: the request waited for 5") {
				t.Errorf("explain has the notes %q", notes)
			}
		})
	}
}

// TestNotSaturated: no request waits if the engines do not report, if one role has room, or if the
// request does not run in an engine.
func TestNotSaturated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		f := &world.Engine{Name: "f", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e, f}, Config: world.BySaturation})
		for name, report := range map[string]func(){
			"no report":          func() {},
			"one of two reports": func() { w.Says("e", 3, 3, 0) },
			"mean":               func() { w.Says("f", 3, 0, 0) },
		} {
			report()
			began := time.Now()
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || time.Since(began) >= time.Second {
				t.Errorf("%s: %d after %v", name, a.Status, time.Since(began))
			}
		}
	})
}

// TestSaturatedRole: prefill and decode are saturated separately.
func TestSaturatedRole(t *testing.T) {
	for _, tt := range []struct {
		engine         string
		waiting, other int32
		usage          float32
		held           bool
	}{
		{"p", 2, 0, 0, true}, {"d", 2, 0, 0, true}, {"d", 0, 0, 0.9, true}, {"p", 0, 0, 0.9, false}, {"p", 1, 1, 0, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			answer := func(c *world.Conn, _ int) { c.JSON(200, world.NIXLAnswer) }
			w := world.New(t, world.Setup{Config: world.BySaturation, Engines: []*world.Engine{
				{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: answer}, {Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: answer},
			}})
			for _, name := range []string{"p", "d"} {
				if name == tt.engine {
					w.Says(name, 3, tt.waiting, tt.usage)
				} else {
					w.Says(name, 3, tt.other, 0)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if a := world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(false)); (a.Err != nil) != tt.held {
				t.Errorf("%+v: %d, %v", tt, a.Status, a.Err)
			}
		})
	}
}

// TestSaturationSheds: a request whose engines delay it beyond its deadline or queue_timeout is
// refused at once, with the delay in Retry-After.
func TestSaturationSheds(t *testing.T) {
	for _, tt := range []struct {
		queued   int64 // tokens, 1 ms each
		deadline string
		retry    string
	}{{2500, "2000", "3"}, {20_500, "", "21"}} {
		synctest.Test(t, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: world.BySaturation})
			c := &w.Registry.Snapshot().Instance("e").Load[0]
			c.Prefill.Measure(1000, time.Second)
			c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 4, Queued: tt.queued}, c.Mark())
			began := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", tt.deadline)
			var got struct{ Error struct{ Type, Code string } }
			if err := json.Unmarshal([]byte(a.Body), &got); err != nil || a.Status != 503 || got.Error.Code != "saturated" || a.Header.Get("Retry-After") != tt.retry || time.Since(began) != 0 {
				t.Errorf("%d %v %s after %v", a.Status, a.Header, a.Body, time.Since(began))
			}
			if n := w.Metric("pdproxy_shed_total", "saturated"); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
			if notes := strings.Join(w.Explained().Notes, "\n"); !strings.Contains(notes, "would have delayed the request by") {
				t.Errorf("explain has the notes %q", notes)
			}
		})
	}
}

// TestSaturationRetry: a retry keeps its place, though the engines have become saturated.
func TestSaturationRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world.World
		var legs atomic.Int32
		serve := func(c *world.Conn, _ int) {
			if legs.Add(1) == 1 {
				w.Says("e", 3, 9, 1)
				w.Says("f", 3, 9, 1)
				c.JSON(500, `{}`)
				return
			}
			c.JSON(200, world.Unary)
		}
		w = world.New(t, world.Setup{Engines: []*world.Engine{{Serve: serve}, {Name: "f", Serve: serve}}, Config: world.BySaturation})
		began := time.Now()
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || time.Since(began) >= 5*time.Second || legs.Load() != 2 {
			t.Errorf("%d %s after %v and %d legs", a.Status, a.Body, time.Since(began), legs.Load())
		}
	})
}

// TestSaturatedClientLeaves: nothing is left of a held request whose client has left.
func TestSaturatedClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: world.BySaturation})
		w.Says("e", 3, 9, 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if a := world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(false)); a.Err == nil {
			t.Errorf("the client that left got %d", a.Status)
		}
		synctest.Wait()
		if n := w.Metric("pdproxy_requests_waiting", "m", "saturated"); n != 0 {
			t.Errorf("%v requests are shown as held", n)
		}
		w.Says("e", 3, 0, 0)
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
			t.Errorf("the next request: %d", a.Status)
		}
	})
}

// TestSaturationShedsHeld: a held request is refused as soon as the engines, and the requests that
// are held before it, delay it beyond its deadline.
func TestSaturationShedsHeld(t *testing.T) {
	for _, tt := range []struct {
		deadline string
		after    time.Duration // of the refusal
	}{{"2000", 0}, {"4000", 1500 * time.Millisecond}} {
		synctest.Test(t, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: world.BySaturation})
			c := &w.Registry.Snapshot().Instance("e").Load[0]
			c.Prefill.Measure(1000, time.Second)
			c.Placed(1000, time.Now())
			c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 4, Queued: 500}, c.Mark())
			first := make(chan world.Answer, 2)
			for range cap(first) {
				go func() { first <- w.Post(world.CompletionsPath, world.Completions(false)) }()
			}
			synctest.Wait()
			began := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", tt.deadline)
			took := time.Since(began)
			if a.Status != 503 || !strings.Contains(a.Body, `"code":"saturated"`) || a.Header.Get("Retry-After") != "3" || took < tt.after || took > tt.after+100*time.Millisecond {
				t.Errorf("%d %v %s after %v, want the refusal after %v", a.Status, a.Header, a.Body, took, tt.after)
			}
			if n := w.Metric("pdproxy_shed_total", "saturated"); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
			if notes := strings.Join(w.Explained().Notes, "\n"); !strings.Contains(notes, "the request waited for") || !strings.Contains(notes, "would have delayed the request by 2.5s") {
				t.Errorf("explain has the notes %q", notes)
			}
			w.Says("e", 3, 0, 0)
			for range cap(first) {
				if a := <-first; a.Status != 200 {
					t.Errorf("a held request got %d %s", a.Status, a.Body)
				}
			}
			nothingHeld(w)
		})
	}
}

// TestSaturatedDeadline: a held request ends at its deadline, if the work of the engines does not
// show before that it comes too late.
func TestSaturatedDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: world.BySaturation})
		w.Says("e", 3, 9, 0)
		before := len(e.Seen())
		began := time.Now()
		a := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", "1000")
		if took := time.Since(began); a.Status != 503 || !strings.Contains(a.Body, `"code":"deadline_exceeded"`) || a.Header.Get("Retry-After") == "" || took != time.Second {
			t.Errorf("%d %v %s after %v", a.Status, a.Header, a.Body, took)
		}
		if n := len(e.Seen()) - before; n != 0 {
			t.Errorf("the engine got %d requests", n)
		}
		nothingHeld(w)
	})
}

// nothingHeld checks that no request waits, and that the next one is served.
func nothingHeld(w *world.World) {
	w.T.Helper()
	if n := w.Metric("pdproxy_requests_waiting", "m", "saturated"); n != 0 {
		w.T.Errorf("%v requests are shown as held", n)
	}
	w.Says("e", 3, 0, 0)
	if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
		w.T.Errorf("the next request: %d %s", a.Status, a.Body)
	}
}
