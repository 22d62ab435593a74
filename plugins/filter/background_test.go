package filter

import (
	"strings"
	"sync"
	"testing"
)

// Lines that guests print, written as scripts.
const (
	saysNoContext = `call proxy_log 4 "panic: invalid context id on proxy_on_context_create"`
	saysNoHTTP    = `call proxy_log 2 "panic: invalid context on proxy_on_request_headers"`
)

// TestPluginWithoutStreams: the Go SDKs panic when the host requests a stream's context from a
// plugin that has only ticks or TCP. No request fails because of that, and it does not count as a
// failure.
func TestPluginWithoutStreams(t *testing.T) {
	for name, script := range map[string]string{
		"no context": "create: " + saysNoContext + "\ncreate: trap",
		"no HTTP":    "request_headers: " + saysNoHTTP + "\nrequest_headers: trap",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := spec("f", "[main]\n"+script+"\nconfigure: call proxy_register_shared_queue \"q\" out")
			s.VMs = 2
			p := w.start(s)
			srv := w.serve(echo)
			var wg sync.WaitGroup
			for range 6 { // all at the same time
				wg.Go(func() {
					if resp, body := do(t, srv, "", "x"); resp.StatusCode != 200 || body != "x" {
						t.Errorf("got %d %q", resp.StatusCode, body)
					}
				})
			}
			wg.Wait()
			if len(w.log.find("background only")) != 1 || len(w.meter.all()) != 0 || p.State() != Serving {
				t.Errorf("failures %q", w.meter.all())
			}
		})
	}
}

// TestGuestsWordsAreNoProof: text that a guest prints while it processes a
// client's request does not remove a working filter from the streams.
func TestGuestsWordsAreNoProof(t *testing.T) {
	for name, script := range map[string]string{
		"context":     "[bad]\nrequest_headers: " + saysNoContext + "\nrequest_headers: trap",
		"HTTP":        "[bad]\nrequest_headers: " + saysNoHTTP + "\nrequest_headers: trap",
		"words only":  "[bad]\nrequest_headers: trap\n[main]\ncreate: " + saysNoContext,
		"trap only":   "[bad]\nrequest_headers: " + saysNoContext + "\nrequest_headers: trap\n[main]\nrequest_headers: trap",
		"other words": "[bad]\nrequest_headers: " + saysNoHTTP + "\nrequest_headers: trap\n[main]\nrequest_headers: " + saysNoContext + "\nrequest_headers: trap",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.start(spec("f", script))
			srv := w.serve(echo)
			for range 2 {
				if resp, _ := do(t, srv, "bad", "x"); resp.StatusCode != 503 {
					t.Errorf("got %d", resp.StatusCode)
				}
			}
			if p.background.Load() || len(w.log.find("background only")) != 0 {
				t.Error("the filter is out of the streams")
			}
			if got := strings.Join(w.meter.all(), " "); got != "trap trap" {
				t.Errorf("failures %q", got)
			}
		})
	}
}

// TestComplaintAfterAStream: after a plugin has made a context for a stream, a
// complaint is an ordinary failure and starts no probe.
func TestComplaintAfterAStream(t *testing.T) {
	w := newWorld(t)
	p := w.start(spec("f", "[trap]\nrequest_headers: "+saysNoContext+"\nrequest_headers: trap"))
	srv := w.serve(echo)
	do(t, srv, "s", "x")
	if resp, _ := do(t, srv, "trap", "x"); resp.StatusCode != 503 {
		t.Errorf("got %d", resp.StatusCode)
	}
	p.mu.Lock()
	asked := p.answered != nil
	p.mu.Unlock()
	if asked || len(w.meter.all()) != 1 {
		t.Errorf("probe = %v, failures %q", asked, w.meter.all())
	}
}
