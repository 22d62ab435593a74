package epp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// limits are short time limits of sidecars, and a budget for the retries of one test.
const limits = "timeouts.prefill = \"500ms\"\ntimeouts.first_byte = \"1s\"\ntimeouts.stream_idle = \"1s\"\nretry.min_budget = 100\n"

// prefills and decodes are the engines of a world.
var (
	prefills = []string{"p0", "p1"}
	decodes  = []string{"d0", "d1"}
)

// fault sets the faults of engines; "" means none.
func (w *world) fault(t *testing.T, engines []string, fail, hang string) {
	t.Helper()
	for _, name := range engines {
		text, _ := json.Marshal(map[string]string{"fail": fail, "hang": hang}) // strings never fail
		resp, err := http.Post("http://"+w.addrs[name]+"/sim/fault", "application/json", strings.NewReader(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatalf("%s refuses the fault %s: %d", name, text, resp.StatusCode)
		}
	}
}

// any reports whether one of the engines is in a state.
func (w *world) any(t *testing.T, engines []string, is func(state) bool) bool {
	t.Helper()
	for _, name := range engines {
		if s, alive := w.state(t, name); alive && is(s) {
			return true
		}
	}
	return false
}

// works sends requests until one on each decode engine has succeeded: circuits and probes need
// a moment after a failure.
func (w *world) works(t *testing.T) {
	t.Helper()
	left := map[string]bool{"d0": true, "d1": true}
	n := 0
	until(t, "both decode engines serve", func() bool {
		n++
		if resp, _ := answer(t, clients["H1"], w.url("closed"), body(fmt.Sprint("works ", n), 100, 4, false)); resp.StatusCode == 200 {
			delete(left, resp.Header.Get("X-Pdproxy-Decode"))
		}
		return len(left) == 0
	})
	w.idle(t)
}

// leave sends a request, waits for a state, and leaves.
func (w *world) leave(t *testing.T, c *http.Client, body, what string, ready func() bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		resp, err := post(ctx, c, w.url("closed"), body)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		gone <- err
	}()
	until(t, what, ready)
	cancel()
	if err := <-gone; err == nil {
		t.Error("the request ended before its client left")
	}
}

// broken reads a stream that ends with one error event and without [DONE].
func broken(t *testing.T, resp *http.Response) {
	t.Helper()
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	errors := 0
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, `data: {"error"`) {
			errors++
		}
	}
	if end := tail(string(text), 3); resp.StatusCode != 200 || err != nil || errors != 1 || strings.HasSuffix(end, "[DONE]") {
		t.Errorf("status %d, %d error events, %v, the stream ends with %q", resp.StatusCode, errors, err, end)
	}
}

// stream opens a stream and reads its first event.
func (w *world) stream(t *testing.T, c *http.Client, listener, body string) *http.Response {
	t.Helper()
	resp, err := post(t.Context(), c, w.url(listener), body)
	if err != nil {
		t.Fatal(err)
	}
	events := bufio.NewReader(resp.Body)
	if line, err := events.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
		t.Fatalf("%d %q %v", resp.StatusCode, line, err)
	}
	resp.Body = struct {
		io.Reader
		io.Closer
	}{events, resp.Body}
	return resp
}

// noneExpired checks that no engine had to wait for the end of a lease on its KV blocks.
func (w *world) noneExpired(t *testing.T) {
	t.Helper()
	for name := range w.engines {
		if s, _ := w.state(t, name); s.LeasesExpired > 0 {
			t.Errorf("%s freed %d sets of blocks by its own time limit", name, s.LeasesExpired)
		}
	}
}

// TestClients has the rows of the failure table in which a client leaves, under their names.
func TestClients(t *testing.T) {
	w := newWorld(t, "")
	cancelled := 0.0
	for version, c := range clients {
		for _, row := range []struct {
			name    string
			engines []string // that hang
			hang    string
			ready   func() bool
		}{
			{"client leaves before prefill answered", prefills, "prefill", func() bool {
				return w.any(t, prefills, func(s state) bool { return s.RequestsRunning > 0 })
			}},
			{"client leaves between the legs", decodes, "head", func() bool {
				return w.any(t, prefills, func(s state) bool { return s.BlocksPinned > 0 })
			}},
			{"client leaves while decode streams", decodes, "stream", func() bool {
				return w.any(t, decodes, func(s state) bool { return s.RequestsRunning > 0 })
			}},
		} {
			t.Run(version+" "+row.name, func(t *testing.T) {
				w.fault(t, row.engines, "", row.hang)
				w.leave(t, c, body(version+row.name, 2000, 64, true), row.name, row.ready)
				w.fault(t, row.engines, "", "")
				w.idle(t)
				cancelled++
			})
		}
	}
	w.noneExpired(t)
	until(t, "the outcomes are counted", func() bool {
		return w.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`) == cancelled
	})
}

// TestPrefillFails has the rows of the failure table in which prefill fails. The sidecar then
// computes the prompt on its own engine. A refusal reaches the client.
func TestPrefillFails(t *testing.T) {
	w := newWorldWith(t, "", ownSidecarWith(limits))
	alone := "http://" + w.engine(t, "alone", "both")
	for version, c := range clients {
		t.Run(version+" prefill refuses (4xx)", func(t *testing.T) {
			w.fault(t, prefills, "1:400", "")
			if resp, text := answer(t, c, w.url("closed"), body("refused "+version, 400, 4, true)); resp.StatusCode != 400 || !strings.Contains(text, "message") {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
			w.idle(t)
		})
		for _, kind := range []string{"500", "503", "reset", "close", "garbage", "hang"} {
			t.Run(version+" prefill dies or times out before the first byte: "+kind, func(t *testing.T) {
				if kind == "hang" {
					w.fault(t, prefills, "", "prefill")
				} else {
					w.fault(t, prefills, "1:"+kind, "")
				}
				for _, stream := range []bool{false, true} {
					b := body(version+kind, 400, 8, stream)
					want, err := textOf(answer(t, clients["H1"], alone, b))
					if err != nil {
						t.Fatal(err)
					}
					if got, err := textOf(answer(t, c, w.url("closed"), b)); err != nil || got != want {
						t.Errorf("stream %t: got %q, %v, want %q", stream, got, err, want)
					}
				}
				w.fault(t, prefills, "", "")
				w.idle(t)
			})
		}
	}
	w.works(t)
}

// TestDecodeFails has the rows of the failure table in which decode fails before its first
// byte: the sidecar has no other decode engine, and the error names the leg.
func TestDecodeFails(t *testing.T) {
	w := newWorldWith(t, "", ownSidecarWith(limits+"circuit.failures = 1000\n"))
	for version, c := range clients {
		for _, tt := range []struct {
			kind, hang string
			status     int
		}{{"400", "", 400}, {"500", "", 502}, {"503", "", 502}, {"reset", "", 502}, {"close", "", 502}, {"", "head", 504}} {
			t.Run(version+" decode refuses or dies before the first byte: "+tt.kind+tt.hang, func(t *testing.T) {
				fail := ""
				if tt.kind != "" {
					fail = "1:" + tt.kind
				}
				w.fault(t, decodes, fail, tt.hang)
				for _, stream := range []bool{false, true} {
					resp, text := answer(t, c, w.url("closed"), body(fmt.Sprint(version, tt.kind, tt.hang, stream), 400, 8, stream))
					if resp.StatusCode != tt.status || tt.status > 400 && !strings.Contains(text, "decode") {
						t.Errorf("stream %t: %d %s, want %d", stream, resp.StatusCode, text, tt.status)
					}
				}
				w.fault(t, decodes, "", "")
				w.works(t)
			})
		}
	}
}

// TestStreamsBreak has the rows of the failure table in which a stream breaks.
func TestStreamsBreak(top *testing.T) {
	w := newWorldWith(top, "", ownSidecarWith(limits))
	for version, c := range clients {
		top.Run(version+" decode dies mid-stream: cut", func(t *testing.T) {
			w.fault(t, decodes, "1:cut", "")
			broken(t, w.stream(t, c, "closed", body("cut "+version, 400, 400, true)))
			w.fault(t, decodes, "", "")
			w.works(t)
		})
		top.Run(version+" stream idle longer than the limit", func(t *testing.T) {
			w.fault(t, decodes, "", "stream")
			broken(t, w.stream(t, c, "closed", body("idle "+version, 400, 400, true)))
			w.fault(t, decodes, "", "")
			w.works(t)
		})
		top.Run(version+" decode dies mid-stream: killed", func(t *testing.T) {
			resp := w.stream(t, c, "closed", body("killed "+version, 400, 100_000, true))
			name := resp.Header.Get("X-Pdproxy-Decode")
			w.engines[name].stop(t, syscall.SIGKILL)
			broken(t, resp)
			w.idle(t)
			w.engine(top, name, "decode")
			w.works(t)
		})
	}
	top.Run("sidecar dies mid-stream", func(t *testing.T) {
		resp := w.stream(t, clients["H1"], "closed", body("sidecar", 400, 100_000, true))
		n := strings.TrimPrefix(resp.Header.Get("X-Pdproxy-Decode"), "d")
		w.beside[map[string]int{"0": 0, "1": 1}[n]].stop(t, syscall.SIGKILL)
		if text, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("the stream ends silently with %q", tail(string(text), 3))
		}
		resp.Body.Close()
		w.idle(t)
	})
}

// TestNoTarget: no target for a phase.
func TestNoTarget(t *testing.T) {
	for _, phase := range []string{"prefill", "decode"} {
		t.Run("no target for a phase: "+phase, func(t *testing.T) {
			w := newWorld(t, "")
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
}

// TestEngineRestarts: engine restarts.
func TestEngineRestarts(top *testing.T) {
	w := newWorld(top, "")
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
}

// TestOverload: overload.
func TestOverload(t *testing.T) {
	w := newWorld(t, "limits.max_reading = 100\nlimits.max_exchanges = 1\nlimits.queue = 1\nlimits.queue_timeout = \"3s\"\n")
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
}

// TestPickerDiesMidStream: a stream whose picker is killed does not end silently, and holds
// nothing afterwards.
func TestPickerDiesMidStream(top *testing.T) {
	w := newWorld(top, "")
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
}

// TestPickerHangs: Envoy fails open or closed without a picker that answers nothing, once its
// health check has noticed, and uses the picker again when it goes on.
func TestPickerHangs(t *testing.T) {
	w := newWorld(t, "")
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
}
