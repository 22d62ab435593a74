package epp

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
)

// saturable are keys of a picker that holds requests while two wait in each engine.
const saturable = "limits.saturation_queue_depth = 2\nlimits.queue_timeout = \"5m\"\nlimits.deadline_header = \"x-deadline\"\n"

// held waits until the picker holds so many requests.
func (w *world) held(t *testing.T, n float64) {
	t.Helper()
	until(t, fmt.Sprintf("%v requests are held", n), func() bool {
		return w.metric(t, "pdproxy_requests_waiting", `reason="saturated"`) == n
	})
}

// fill sends requests to both prefill engines past the gateway, until the picker knows that they
// are saturated. empty ends these requests.
func (w *world) fill(t *testing.T) (empty func()) {
	t.Helper()
	const others = 6 // on each engine, which runs one request at a time
	w.fault(t, prefills, "", "prefill")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, name := range prefills {
		for n := range others {
			wg.Go(func() {
				if resp, err := post(ctx, clients["H1"], "http://"+w.addrs[name], body(fmt.Sprint("other ", name, n), 400, 4, false)); err == nil {
					resp.Body.Close() // the engine got to it before its client left
				}
			})
		}
	}
	until(t, "the picker knows the requests of others", func() bool {
		return w.metric(t, "pdproxy_role_requests_waiting", `role="prefill"`) == 2*(others-1)
	})
	return func() {
		w.fault(t, prefills, "", "")
		cancel()
		wg.Wait()
	}
}

// TestSaturation: the picker holds requests while the engines of a phase are saturated, and lets
// them go when the engines have room. A request whose deadline is too near gets the error of the
// picker, and nothing is left of one whose client leaves.
func TestSaturation(t *testing.T) {
	w := newWorld(t, setting{picker: saturable, running: 1})
	for n := range 10 { // from these the picker knows how long a prompt is
		if resp, text := answer(t, clients["H1"], w.url("closed"), body(fmt.Sprint("first ", n), 2000, 4, false)); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
	}
	w.idle(t)
	refused := 0
	for mode := range w.listeners {
		t.Run(mode, func(t *testing.T) {
			empty := w.fill(t)
			ctx, leave := context.WithCancel(t.Context())
			var held, gone sync.WaitGroup
			for version, c := range clients {
				held.Go(func() {
					resp, err := post(t.Context(), c, w.url(mode), body("held "+mode+version, 2000, 4, false), "x-deadline", "300000")
					if err != nil {
						t.Error(err)
						return
					}
					defer resp.Body.Close()
					if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
						t.Errorf("a held request gets %d %s, %v", resp.StatusCode, text, err)
					}
				})
				gone.Go(func() {
					if resp, err := post(ctx, c, w.url(mode), body("leaves "+mode+version, 2000, 4, false)); err == nil {
						resp.Body.Close()
						t.Errorf("a request ended with %d before its client left", resp.StatusCode)
					}
				})
			}
			w.held(t, 4)
			for version, c := range clients {
				resp, text := answer(t, c, w.url(mode), body("late "+mode+version, 2000, 4, false), "x-deadline", "1")
				if resp.StatusCode != 503 || !strings.Contains(text, `"code":"saturated"`) || resp.Header.Get("Retry-After") == "" {
					t.Errorf("a request whose deadline is too near: %d %v %s", resp.StatusCode, resp.Header, text)
				}
				refused++
			}
			leave()
			gone.Wait()
			w.held(t, 2)
			empty()
			held.Wait()
			w.held(t, 0)
			w.idle(t)
		})
	}
	if n := w.metric(t, "pdproxy_shed_total", `reason="saturated"`); n != float64(refused) {
		t.Errorf("%v requests are counted as shed, want %d", n, refused)
	}
}
