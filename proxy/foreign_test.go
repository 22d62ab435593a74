package proxy

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// localAnswer names a host that means prefill only for engines on the same host.
var localAnswer = strings.Replace(nixlAnswer, "p.test", "localhost", 1)

// TestMovedDecodeIsSentToPrefillOnly: the host in prefill's answer is right for the first
// decode engine, which is on prefill's host. That engine accepts no connection, so the
// proxy moves the leg to an engine on another host. There the name would mean that
// engine's own host.
func TestMovedDecodeIsSentToPrefillOnly(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			d2 := &fakeEngine{name: "d2", at: "127.0.0.2:80", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
				if strings.Contains(c.leg.body, `"stream":true`) {
					c.stream(`data: {"choices":[{"text":"right"}]}`+"\n\n", "data: [DONE]\n\n")
					return
				}
				c.json(200, `{"choices":[{"text":"right"}]}`)
			}}
			w := newWorld(t, setup{engines: []*fakeEngine{
				{name: "p", at: "127.0.0.1:80", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, localAnswer) }},
				{name: "d1", at: "127.0.0.1:81", role: "decode", connector: "vllm-nixl", refuse: true},
				d2,
			}})
			moved := 0
			for range 4 { // the first placement of some requests is d2
				a := w.post(completionsPath, completions(stream))
				if a.status != 200 || !strings.Contains(a.body, "right") {
					t.Fatalf("got status %d: %s", a.status, a.body)
				}
			}
			for _, row := range w.books.Ended.PerfRows() {
				e, _ := w.books.Ended.Get(row.RequestID)
				for _, l := range e.Legs {
					if l.Engine == "d1" {
						moved++
					}
				}
			}
			for _, l := range d2.seen() {
				if strings.Contains(l.body, "localhost") || strings.Contains(l.body, "kv_transfer_params") {
					t.Errorf("d2 received %s", l.body)
				}
			}
			if n := w.metric("pdproxy_fallbacks_total", "kv_transfer", "foreign_host"); moved == 0 || n != 4 {
				t.Errorf("got %d moved legs and %v fallbacks", moved, n)
			}
			time.Sleep(time.Minute) // clean-ups
			if n := len(d2.seen()); n != 4 {
				t.Errorf("d2 received %d calls", n)
			}
		})
	}
}

// TestCleanupsAreSentToPrefillOnly: any decode engine may free prefill's blocks. The
// proxy does not ask an engine for which the name in prefill's answer means another host.
func TestCleanupsAreSentToPrefillOnly(t *testing.T) {
	for host, peers := range map[string]int{"localhost": 0, "10.0.0.5": 1, "169.254.169.254": 0} {
		t.Run(host, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d1 := &fakeEngine{name: "d1", at: "10.0.0.5:81", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.hangUp() }}
				d2 := &fakeEngine{name: "d2", at: "10.0.0.6:80", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, doneAnswer) }}
				w := newWorld(t, setup{engines: []*fakeEngine{{name: "p", at: "10.0.0.5:80", role: "prefill", connector: "vllm-nixl", kvHosts: "10.0.0.5"}, d1, d2}})
				target := func(name string) engine.Target { return engine.Target{Instance: w.registry.Snapshot().Instance(name)} }
				job := &cleanup.Job{Connector: "vllm-nixl", Limit: time.Second}
				job.Add([]connector.Cleanup{{
					Phase: abi.Decode, AnyTarget: true, Hosts: []string{host}, Until: connector.UntilHead, How: "test", Leg: connector.Leg{Path: "/x"},
				}}, target("p"), target("d1"))
				w.cleanups.Start(job)
				time.Sleep(time.Minute)
				if n := len(d2.seen()); n != peers || w.cleaned("test") != float64(peers) {
					t.Errorf("calls of d2: got %d, want %d", n, peers)
				}
				if beside := len(d1.seen()) > 0; beside != (host != "169.254.169.254") {
					t.Errorf("the engine on prefill's host received calls: %v", beside)
				}
			})
		})
	}
}
