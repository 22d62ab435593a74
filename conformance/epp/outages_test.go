package epp

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestNoTarget: no target for a phase.
func TestNoTarget(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		for _, phase := range []string{"prefill", "decode"} {
			t.Run("no target for a phase: "+phase, func(t *testing.T) {
				w := newWorld(t, setting{kind: k, lease: shortLease})
				for name, e := range w.engines {
					if name[0] == phase[0] {
						e.stop(t, syscall.SIGKILL)
					}
				}
				until(t, "the picker knows", func() bool {
					resp, text := answer(t, clients["H2"], w.url("closed"), body("none", 100, 4, false))
					return resp.StatusCode == 503 && resp.Header.Get("Retry-After") != "" && strings.Contains(text, phase)
				})
				w.idle(t)
			})
		}
	})
}

// TestEngineRestarts: engine restarts.
func TestEngineRestarts(top *testing.T) {
	eachSidecar(top, func(top *testing.T, k *kind) {
		w := newWorld(top, setting{kind: k, lease: shortLease})
		w.works(top)
		for name, role := range map[string]string{"p0": "prefill", "d0": "decode"} {
			top.Run("engine restarts: "+role, func(t *testing.T) {
				w.engines[name].stop(t, syscall.SIGKILL)
				until(t, "the picker's probes find that the engine has ended", func() bool {
					_, text := get(w.admin + "/v1/engines")
					return strings.Contains(text, `"state":"unhealthy"`)
				})
				w.engine(top, name, role)
				until(t, "the restart is counted", func() bool {
					return w.metric(t, "pdproxy_engine_restarts_total", `engine="`+name+`"`) > 0
				})
				w.works(t)
			})
		}
	})
}

// TestOverload: overload.
func TestOverload(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, picker: "limits.max_reading = 100\nlimits.max_exchanges = 1\nlimits.queue = 1\nlimits.queue_timeout = \"3s\"\n"})
		first := w.stream(t, clients["H1"], "closed", body("first", 100, 100_000, true))
		answers := make(chan *http.Response, 3)
		for i := range 3 {
			go func() {
				resp, err := post(t.Context(), clients["H1"], w.url("closed"), body(fmt.Sprint("more ", i), 100, 4, false))
				if err != nil {
					resp = &http.Response{Body: http.NoBody}
				}
				answers <- resp
			}()
		}
		got := map[int]int{}
		for range 3 {
			resp := <-answers
			got[resp.StatusCode]++
			if resp.Header.Get("Retry-After") == "" {
				t.Errorf("status %d without Retry-After", resp.StatusCode)
			}
			resp.Body.Close()
		}
		if got[429] != 2 || got[503] != 1 {
			t.Errorf("got %v, want two rejected at once (429) and one rejected after its wait (503)", got)
		}
		if w.metric(t, "pdproxy_shed_total") < 3 {
			t.Error("shed requests are not counted")
		}
		first.Body.Close()
		w.idle(t)
	})
}

// TestPickerDiesMidStream: a stream whose picker is killed does not end silently, and holds
// nothing afterwards.
func TestPickerDiesMidStream(top *testing.T) {
	eachSidecar(top, func(top *testing.T, k *kind) {
		w := newWorld(top, setting{kind: k})
		for version, c := range clients {
			for _, mode := range []string{"closed", "open"} {
				top.Run(version+" "+mode, func(t *testing.T) {
					resp := w.stream(t, c, mode, body(version+mode, 100, 100_000, true))
					w.killPicker(t)
					text, err := io.ReadAll(resp.Body)
					if end := tail(string(text), 2); err == nil && !strings.HasSuffix(end, "[DONE]") {
						t.Errorf("the stream ends silently with %q", end)
					}
					resp.Body.Close()
					w.startPicker(top)
					w.works(t)
				})
			}
		}
	})
}

// TestPickerHangs: Envoy fails open or closed without a picker that answers nothing, once its
// health check has noticed, and uses the picker again when it goes on.
func TestPickerHangs(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k})
		if err := w.picker.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		n := 0
		// status is 0 for a request that was sent before Envoy noticed, and waits for the picker.
		status := func(c *http.Client, listener string) (int, string) {
			n++
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			resp, err := post(ctx, c, w.url(listener), body(fmt.Sprint("hangs ", n), 100, 4, false))
			if err != nil {
				return 0, ""
			}
			resp.Body.Close()
			return resp.StatusCode, resp.Header.Get("X-Pdproxy-Decode")
		}
		for version, c := range clients {
			until(t, version+" fails open", func() bool {
				code, placed := status(c, "open")
				return code == 200 && placed == ""
			})
			until(t, version+" fails closed", func() bool { code, _ := status(c, "closed"); return code >= 500 })
		}
		if err := w.picker.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		w.works(t)
	})
}
