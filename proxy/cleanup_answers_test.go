package proxy

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// status is an engine's answer that consists of a status only.
func status(code int) string {
	return fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Length: 2\r\n\r\n{}", code)
}

// chunk is an event of a stream.
func chunk(event string) string { return fmt.Sprintf("%x\r\n%s\n\n\r\n", len(event)+2, event) }

// TestCleanupsAreRepeated: the proxy repeats a clean-up until an engine's answer shows
// that the blocks are free. Then the proxy stops.
func TestCleanupsAreRepeated(t *testing.T) {
	for name, tt := range map[string]struct {
		until   connector.Until
		answers []string // one for each call
	}{
		"the head frees":   {connector.UntilHead, []string{status(500), status(404), streamHead}},
		"a refusal frees":  {connector.UntilRefused, []string{status(500), status(400)}},
		"no refusal frees": {connector.UntilRefused, []string{status(200), status(422)}},
		"the answer frees": {0, []string{status(400), status(200)}},
		"an event frees": {connector.UntilEvent, []string{
			streamHead + chunk(`data: {"error":{"message":"no","type":"x","code":500}}`), streamHead + chunk(`data: {"choices":[{"text":"x"}]}`),
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &fakeEngine{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, nth int) {
					c.send(tt.answers[min(nth, len(tt.answers))-1])
					c.hold()
				}}
				w := newWorld(t, setup{engines: []*fakeEngine{d, {name: "p", role: "prefill", connector: "vllm-nixl"}}})
				target := func(name string) engine.Target { return engine.Target{Instance: w.registry.Snapshot().Instance(name)} }
				job := &cleanup.Job{Connector: "vllm-nixl", Limit: time.Second}
				job.Add([]connector.Cleanup{{Phase: abi.Decode, Leg: connector.Leg{Path: "/x"}, Until: tt.until, How: "test"}}, target("p"), target("d"))
				w.cleanups.Start(job)
				time.Sleep(time.Minute)
				if n, calls := w.cleaned("test"), len(d.seen()); n != 1 || calls != len(tt.answers) {
					t.Errorf("got %v clean-ups after %d calls, want 1 after %d", n, calls, len(tt.answers))
				}
			})
		})
	}
}

// TestCleanupOfAnUnhealthyEngine: if an engine answers no probes, the proxy calls no
// engine to free its blocks.
func TestCleanupOfAnUnhealthyEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeEngine{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, namedAnswer) }}
		d := &fakeEngine{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.send(status(500)) }}
		w := newWorld(t, setup{engines: []*fakeEngine{p, d}, config: func(c *config.Config) {
			c.Retry.Attempts = 1
			c.Health.Interval, c.Health.Timeout, c.Health.UnhealthyAfter = config.Duration(time.Second), config.Duration(time.Second), 1
		}})
		if a := w.post(completionsPath, completions(false)); a.status != 502 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		defer p.stop()()
		time.Sleep(minPatience / 2)
		if n := w.cleaned("engine_gone"); n != 1 {
			t.Errorf("got %v clean-ups with the result engine_gone and %d calls", n, len(d.seen())-1)
		}
		calls := len(d.seen())
		time.Sleep(time.Minute)
		if n := len(d.seen()); n != calls {
			t.Errorf("%d calls follow", n-calls)
		}
	})
}
