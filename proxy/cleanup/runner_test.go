package cleanup_test

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

const (
	minPatience = 30 * time.Second // the shortest time for which the proxy repeats a clean-up
	// The memory for the waiting clean-ups, and the smallest cost of one of them, in bytes.
	maxQueued = 256 << 20
	minQueued = 64 << 10
)

// status is an engine's answer that consists of a status only.
func status(code int) string {
	return fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Length: 2\r\n\r\n{}", code)
}

// chunk is an event of a stream.
func chunk(event string) string { return fmt.Sprintf("%x\r\n%s\n\n\r\n", len(event)+2, event) }

// newRunner returns a runner of clean-ups on the engines of w. The end of the test waits for them.
func newRunner(w *world.World) *cleanup.Runner {
	r := cleanup.New(cleanup.Options{Registry: w.Registry, Memory: w.Memory, Metrics: w.Metrics, Log: slog.New(slog.DiscardHandler)})
	w.T.Cleanup(func() { r.Wait(time.Minute) })
	return r
}

// TestCleanupsAreRepeated: the proxy repeats a clean-up until an engine's answer shows
// that the blocks are free. Then the proxy stops.
func TestCleanupsAreRepeated(t *testing.T) {
	for name, tt := range map[string]struct {
		until   connector.Until
		answers []string // one for each call
	}{
		"the head frees":  {connector.UntilHead, []string{status(500), status(404), world.StreamHead}},
		"a refusal frees": {connector.UntilRefused, []string{status(500), status(400)}},
		"a refusal for lack of room frees nothing": {connector.UntilRefused, []string{status(429), status(408), status(400)}},
		"no refusal frees":                         {connector.UntilRefused, []string{status(200), status(422)}},
		"the answer frees":                         {0, []string{status(400), status(200)}},
		"an event frees": {connector.UntilEvent, []string{
			world.StreamHead + chunk(`data: {"error":{"message":"no","type":"x","code":500}}`), world.StreamHead + chunk(`data: {"choices":[{"text":"x"}]}`),
		}},
	} {
		world.Run(t, name, func(t *testing.T) {
			d := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
				c.Send(tt.answers[min(nth, len(tt.answers))-1])
				c.Hold()
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{d, {Name: "p", Role: "prefill", Connector: "vllm-nixl"}}})
			target := func(name string) engine.Target { return engine.Target{Instance: w.Registry.Snapshot().Instance(name)} }
			job := &cleanup.Job{Connector: "vllm-nixl", Limit: time.Second}
			job.Add([]connector.Cleanup{{Phase: abi.Decode, Leg: connector.Leg{Path: "/x"}, Until: tt.until, How: "test"}}, target("p"), target("d"))
			newRunner(w).Start(job)
			time.Sleep(time.Minute)
			if n, calls := w.Cleaned("test"), len(d.Seen()); n != 1 || calls != len(tt.answers) {
				t.Errorf("got %v clean-ups after %d calls, want 1 after %d", n, calls, len(tt.answers))
			}
		})
	}
}

// TestCleanupOfAFullEngine: while an engine refuses a clean-up for lack of room, the pauses grow.
// The clean-up follows soon after the engine has room again, whether a request of this proxy ended or
// the engine reports that no request waits. A failed call beside it keeps the usual pace.
func TestCleanupOfAFullEngine(t *testing.T) {
	const (
		full   = "HTTP/1.1 503 x\r\nContent-Length: 26\r\n\r\nThe request queue is full."
		begins = 12300 * time.Millisecond // when there is room
	)
	for name, tt := range map[string]struct {
		other  string // the answer of the other decode engine; "": there is none
		room   func(d *load.Counter, h *load.Hold)
		within time.Duration // of begins
		calls  int           // of d at most, before begins
	}{
		"no sign of room": {"", nil, 4 * time.Second, 9},
		"a request ends":  {"", func(_ *load.Counter, h *load.Hold) { h.Drop() }, time.Second, 9},
		"the engine reports it": {"", func(d *load.Counter, _ *load.Hold) {
			d.Report(load.Report{At: time.Now(), Every: time.Second}, load.Mark{})
		}, time.Second, 9},
		"the other is full too":  {full, func(_ *load.Counter, h *load.Hold) { h.Drop() }, time.Second, 9},
		"the other is defective": {status(500), nil, time.Second, 20},
	} {
		world.Run(t, name, func(t *testing.T) {
			room := time.Now().Add(begins)
			var freed time.Time
			d := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
				if time.Now().Before(room) {
					c.Send(full)
					return
				}
				freed = time.Now()
				c.JSON(200, world.DoneAnswer)
			}}
			engines := []*world.Engine{d, {Name: "p", Role: "prefill", Connector: "vllm-nixl"}}
			if tt.other != "" {
				engines = append(engines, &world.Engine{Name: "e", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.Send(tt.other) }})
			}
			w := world.New(t, world.Setup{Engines: engines})
			target := func(name string) engine.Target { return engine.Target{Instance: w.Registry.Snapshot().Instance(name)} }
			counter := &target("d").Load[0]
			counter.Report(load.Report{At: time.Now(), Every: time.Second, Running: 4, Waiting: 2}, counter.Mark())
			hold := counter.Hold(1)
			job := &cleanup.Job{Connector: "vllm-nixl", Limit: time.Second}
			job.Add([]connector.Cleanup{{Phase: abi.Decode, AnyTarget: true, Leg: connector.Leg{Path: "/x"}, Until: connector.UntilHead, How: "test"}}, target("p"), target("d"))
			newRunner(w).Start(job)
			time.Sleep(time.Until(room))
			if n := len(d.Seen()); n < 3 || n > tt.calls {
				t.Errorf("%d calls while the engine is full, want at most %d", n, tt.calls)
			}
			if tt.room != nil {
				tt.room(counter, &hold)
			}
			time.Sleep(minPatience)
			synctest.Wait()
			if after := freed.Sub(room); w.Cleaned("test") != 1 || after < 0 || after > tt.within {
				t.Errorf("%v clean-ups, %v after there was room", w.Cleaned("test"), after)
			}
		})
	}
}

// TestCleanupOfAnUnhealthyEngine: if an engine answers no probes, the proxy calls no
// engine to free its blocks.
func TestCleanupOfAnUnhealthyEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.NamedAnswer) }}
		d := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.Send(status(500)) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Config: func(c *config.Config) {
			c.Retry.Attempts = 1
			c.Health.Interval, c.Health.Timeout, c.Health.UnhealthyAfter = config.Duration(time.Second), config.Duration(time.Second), 1
		}})
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 502 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
		}
		defer p.Stop()()
		time.Sleep(minPatience / 2)
		if n := w.Cleaned("engine_gone"); n != 1 {
			t.Errorf("got %v clean-ups with the result engine_gone and %d calls", n, len(d.Seen())-1)
		}
		calls := len(d.Seen())
		time.Sleep(time.Minute)
		if n := len(d.Seen()); n != calls {
			t.Errorf("%d calls follow", n-calls)
		}
	})
}

// TestCleanupIsRepeated: the proxy repeats a clean-up that an engine answers with a
// failure, also if the engine is draining.
func TestCleanupIsRepeated(t *testing.T) {
	for _, draining := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p := &world.Engine{Name: "p", Role: "prefill", Connector: "sglang", Serve: func(c *world.Conn, nth int) {
				if nth < 3 {
					c.Send("HTTP/1.1 503 x\r\nContent-Length: 2\r\n\r\nno")
					return
				}
				c.JSON(200, "{}")
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p}})
			target := engine.Target{Instance: w.Registry.Snapshot().Instance("p")}
			if draining {
				target.Pin() // the engine drains as long as it holds the blocks
				defer target.Unpin()
				if err := w.Registry.Remove("p", time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			job := &cleanup.Job{Connector: "sglang", Limit: time.Second}
			job.Add([]connector.Cleanup{{Phase: abi.Prefill, Leg: connector.Leg{Path: "/x"}, How: "abort_rid"}}, target, target)
			newRunner(w).Start(job)
			time.Sleep(minPatience)
			synctest.Wait()
			if n := w.Cleaned("abort_rid"); n != 1 || len(p.Seen()) != 3 {
				t.Errorf("draining %v: got %v clean-ups after %d calls", draining, n, len(p.Seen()))
			}
		})
	}
}

// TestPromptsAgainAreBounded: the clean-ups that wait to compute a prompt have a limited
// memory. If the memory is full, the proxy leaves a clean-up to the engine's time-out at
// once. Other clean-ups do not use this memory. The memory is free again at the end.
func TestPromptsAgainAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Name: "p", Role: "prefill", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, _ int) {
			c.JSON(200, world.NIXLAnswer)
		}}}})
		p, runner := engine.Target{Instance: w.Registry.Snapshot().Instance("p")}, newRunner(w)
		start := func(calls int, c connector.Cleanup) {
			job := &cleanup.Job{Connector: "vllm-nixl-push", Limit: time.Second, Prompt: time.Second}
			job.Add(slices.Repeat([]connector.Cleanup{c}, calls), p, p)
			runner.Start(job)
		}
		call := func(how string, body int, until connector.Until) connector.Cleanup {
			return connector.Cleanup{Phase: abi.Prefill, Leg: connector.Leg{Path: "/x", Body: make([]byte, body)}, How: how, Until: until}
		}
		// These calls hold memory until the proxy makes them, after one second.
		start(maxQueued/minQueued-1, connector.Cleanup{Phase: abi.Prefill, Until: connector.UntilServed, How: "filler"})
		start(1, call("too large", minQueued+1, connector.UntilServed))
		start(1, call("fits", 1, connector.UntilServed))
		start(1, call("too many", 1, connector.UntilServed))
		start(1, call("plain", minQueued+1, 0))
		if n := w.Cleaned("engine_timeout"); n != 2 {
			t.Errorf("got %v left at once to the time-out of the engine", n)
		}
		time.Sleep(time.Minute)
		start(maxQueued/minQueued, connector.Cleanup{Phase: abi.Prefill, Until: connector.UntilServed, How: "all of it"})
		time.Sleep(time.Minute)
		for how, want := range map[string]float64{"filler": maxQueued/minQueued - 1, "fits": 1, "plain": 1, "all of it": maxQueued / minQueued, "engine_timeout": 2} {
			if n := w.Cleaned(how); n != want {
				t.Errorf("%s: %v, want %v", how, n, want)
			}
		}
	})
}

// TestCleanupsAreSentToPrefillOnly: any decode engine may free prefill's blocks. The
// proxy does not ask an engine for which the name in prefill's answer means another host.
func TestCleanupsAreSentToPrefillOnly(t *testing.T) {
	for host, peers := range map[string]int{"localhost": 0, "10.0.0.5": 1, "169.254.169.254": 0} {
		world.Run(t, host, func(t *testing.T) {
			d1 := &world.Engine{Name: "d1", At: "10.0.0.5:81", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.HangUp() }}
			d2 := &world.Engine{Name: "d2", At: "10.0.0.6:80", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{{Name: "p", At: "10.0.0.5:80", Role: "prefill", Connector: "vllm-nixl", KVHosts: "10.0.0.5"}, d1, d2}})
			target := func(name string) engine.Target { return engine.Target{Instance: w.Registry.Snapshot().Instance(name)} }
			job := &cleanup.Job{Connector: "vllm-nixl", Limit: time.Second}
			job.Add([]connector.Cleanup{{
				Phase: abi.Decode, AnyTarget: true, Hosts: []string{host}, Until: connector.UntilHead, How: "test", Leg: connector.Leg{Path: "/x"},
			}}, target("p"), target("d1"))
			newRunner(w).Start(job)
			time.Sleep(time.Minute)
			if n := len(d2.Seen()); n != peers || w.Cleaned("test") != float64(peers) {
				t.Errorf("calls of d2: got %d, want %d", n, peers)
			}
			if beside := len(d1.Seen()) > 0; beside != (host != "169.254.169.254") {
				t.Errorf("the engine on prefill's host received calls: %v", beside)
			}
		})
	}
}
