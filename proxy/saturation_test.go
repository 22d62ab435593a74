package proxy

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// bySaturation configures a wait from two waiting requests on.
func bySaturation(c *config.Config) {
	c.Limits.SaturationQueueDepth, c.Limits.SaturationKVUsage = 2, 0.8
	c.Limits.QueueTimeout, c.Limits.DeadlineHeader = config.Duration(20*time.Second), "X-Deadline"
}

// says sets the report of an engine, which stays valid.
func (w *world) says(name string, running, waiting int32, usage float32) {
	c := &w.registry.Snapshot().Instance(name).Load[0]
	c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: running, Waiting: waiting, Queued: -1, Usage: usage}, c.Mark())
}

// TestSaturation: a request waits while the engines of its model are saturated, and goes on when
// they are not, when they do not report any more, and when they have died.
func TestSaturation(t *testing.T) {
	for _, tt := range []struct {
		name    string
		waiting int32
		usage   float32
		relief  func(w *world)
		status  int
	}{
		{"waiting requests", 2, 0, func(w *world) { w.says("e", 3, 1, 0) }, 200},
		{"KV memory", 0, 0.8, func(w *world) { w.says("e", 3, 0, 0.79) }, 200},
		{"restart of the engine", 9, 0, func(w *world) { w.registry.Snapshot().Instance("e").Load[0].Forget() }, 200},
		{"the engine leaves", 9, 0, func(w *world) {
			if err := w.registry.Apply(engine.SourceStatic, nil, 0); err != nil {
				w.t.Error(err)
			}
		}, 404},
		{"switched off", 9, 1, func(w *world) {
			cfg := *w.cfg.Load()
			cfg.Limits.SaturationQueueDepth, cfg.Limits.SaturationKVUsage = 0, 0
			w.Reload(&cfg, nil)
		}, 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				w := newWorld(t, setup{engines: []*fakeEngine{e}, config: bySaturation})
				w.says("e", 3, tt.waiting, tt.usage)
				before := len(e.seen())
				got := make(chan answer, 1)
				go func() { got <- w.post(completionsPath, completions(false)) }()
				time.Sleep(5 * time.Second)
				if n := w.metric("pdproxy_requests_waiting", "m", "saturated"); n != 1 {
					t.Errorf("%v requests are shown as held, want 1", n)
				}
				if n := len(e.seen()) - before; n != 0 {
					t.Errorf("the engine got %d requests", n)
				}
				tt.relief(w)
				if a := <-got; a.status != tt.status && tt.status == 200 || a.status == 200 && tt.status != 200 {
					t.Errorf("got %d %s", a.status, a.body)
				}
				if n := w.metric("pdproxy_requests_waiting", "m", "saturated"); n != 0 {
					t.Errorf("%v requests are shown as held after the end", n)
				}
				if notes := strings.Join(w.explained().Notes, "\n"); !strings.Contains(notes, "the engines of the model were saturated: the request waited for 5") {
					t.Errorf("explain has the notes %q", notes)
				}
			})
		})
	}
}

// TestNotSaturated: no request waits if the engines do not report, if one role has room, or if the
// request does not run in an engine.
func TestNotSaturated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		f := &fakeEngine{name: "f", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e, f}, config: bySaturation})
		for name, report := range map[string]func(){
			"no report":          func() {},
			"one of two reports": func() { w.says("e", 3, 3, 0) },
			"mean":               func() { w.says("f", 3, 0, 0) },
		} {
			report()
			began := time.Now()
			if a := w.post(completionsPath, completions(false)); a.status != 200 || time.Since(began) >= time.Second {
				t.Errorf("%s: %d after %v", name, a.status, time.Since(began))
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
			answer := func(c *engineConn, _ int) { c.json(200, nixlAnswer) }
			w := newWorld(t, setup{config: bySaturation, engines: []*fakeEngine{
				{name: "p", role: "prefill", connector: "vllm-nixl", serve: answer}, {name: "d", role: "decode", connector: "vllm-nixl", serve: answer},
			}})
			for _, name := range []string{"p", "d"} {
				if name == tt.engine {
					w.says(name, 3, tt.waiting, tt.usage)
				} else {
					w.says(name, 3, tt.other, 0)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if a := ask(ctx, w.client, "POST", "http://proxy"+completionsPath, completions(false)); (a.err != nil) != tt.held {
				t.Errorf("%+v: %d, %v", tt, a.status, a.err)
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
			e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
			w := newWorld(t, setup{engines: []*fakeEngine{e}, config: bySaturation})
			c := &w.registry.Snapshot().Instance("e").Load[0]
			c.Prefill.Measure(1000, time.Second)
			c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 4, Queued: tt.queued}, c.Mark())
			began := time.Now()
			a := w.post(completionsPath, completions(false), "X-Deadline", tt.deadline)
			var got struct{ Error struct{ Type, Code string } }
			if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 503 || got.Error.Code != "saturated" || a.header.Get("Retry-After") != tt.retry || time.Since(began) != 0 {
				t.Errorf("%d %v %s after %v", a.status, a.header, a.body, time.Since(began))
			}
			if n := w.metric("pdproxy_shed_total", "saturated"); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
			if notes := strings.Join(w.explained().Notes, "\n"); !strings.Contains(notes, "would have delayed the request by") {
				t.Errorf("explain has the notes %q", notes)
			}
		})
	}
}

// TestSaturationRetry: a retry keeps its place, though the engines have become saturated.
func TestSaturationRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world
		var legs atomic.Int32
		serve := func(c *engineConn, _ int) {
			if legs.Add(1) == 1 {
				w.says("e", 3, 9, 1)
				w.says("f", 3, 9, 1)
				c.json(500, `{}`)
				return
			}
			c.json(200, unary)
		}
		w = newWorld(t, setup{engines: []*fakeEngine{{serve: serve}, {name: "f", serve: serve}}, config: bySaturation})
		began := time.Now()
		if a := w.post(completionsPath, completions(false)); a.status != 200 || time.Since(began) >= 5*time.Second || legs.Load() != 2 {
			t.Errorf("%d %s after %v and %d legs", a.status, a.body, time.Since(began), legs.Load())
		}
	})
}

// TestSaturatedClientLeaves: nothing is left of a held request whose client has left.
func TestSaturatedClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: bySaturation})
		w.says("e", 3, 9, 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if a := ask(ctx, w.client, "POST", "http://proxy"+completionsPath, completions(false)); a.err == nil {
			t.Errorf("the client that left got %d", a.status)
		}
		synctest.Wait()
		if n := w.metric("pdproxy_requests_waiting", "m", "saturated"); n != 0 {
			t.Errorf("%v requests are shown as held", n)
		}
		w.says("e", 3, 0, 0)
		if a := w.post(completionsPath, completions(false)); a.status != 200 {
			t.Errorf("the next request: %d", a.status)
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
			e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
			w := newWorld(t, setup{engines: []*fakeEngine{e}, config: bySaturation})
			c := &w.registry.Snapshot().Instance("e").Load[0]
			c.Prefill.Measure(1000, time.Second)
			c.Placed(1000, time.Now())
			c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 4, Queued: 500}, c.Mark())
			first := make(chan answer, 2)
			for range cap(first) {
				go func() { first <- w.post(completionsPath, completions(false)) }()
			}
			synctest.Wait()
			began := time.Now()
			a := w.post(completionsPath, completions(false), "X-Deadline", tt.deadline)
			took := time.Since(began)
			if a.status != 503 || !strings.Contains(a.body, `"code":"saturated"`) || a.header.Get("Retry-After") != "3" || took < tt.after || took > tt.after+100*time.Millisecond {
				t.Errorf("%d %v %s after %v, want the refusal after %v", a.status, a.header, a.body, took, tt.after)
			}
			if n := w.metric("pdproxy_shed_total", "saturated"); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
			if notes := strings.Join(w.explained().Notes, "\n"); !strings.Contains(notes, "the request waited for") || !strings.Contains(notes, "would have delayed the request by 2.5s") {
				t.Errorf("explain has the notes %q", notes)
			}
			w.says("e", 3, 0, 0)
			for range cap(first) {
				if a := <-first; a.status != 200 {
					t.Errorf("a held request got %d %s", a.status, a.body)
				}
			}
			w.nothingHeld()
		})
	}
}

// TestSaturatedDeadline: a held request ends at its deadline, if the work of the engines does not
// show before that it comes too late.
func TestSaturatedDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: bySaturation})
		w.says("e", 3, 9, 0)
		before := len(e.seen())
		began := time.Now()
		a := w.post(completionsPath, completions(false), "X-Deadline", "1000")
		if took := time.Since(began); a.status != 503 || !strings.Contains(a.body, `"code":"deadline_exceeded"`) || a.header.Get("Retry-After") == "" || took != time.Second {
			t.Errorf("%d %v %s after %v", a.status, a.header, a.body, took)
		}
		if n := len(e.seen()) - before; n != 0 {
			t.Errorf("the engine got %d requests", n)
		}
		w.nothingHeld()
	})
}

// nothingHeld checks that no request waits, and that the next one is served.
func (w *world) nothingHeld() {
	w.t.Helper()
	if n := w.metric("pdproxy_requests_waiting", "m", "saturated"); n != 0 {
		w.t.Errorf("%v requests are shown as held", n)
	}
	w.says("e", 3, 0, 0)
	if a := w.post(completionsPath, completions(false)); a.status != 200 {
		w.t.Errorf("the next request: %d %s", a.status, a.body)
	}
}
