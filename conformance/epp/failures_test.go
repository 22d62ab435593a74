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
)

// shortLimits are short time limits of sidecars, and a budget for the retries of one test.
const shortLimits = "timeouts.prefill = \"500ms\"\ntimeouts.first_byte = \"1s\"\ntimeouts.stream_idle = \"1s\"\nretry.min_budget = 100\n"

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

// leave sends a request, waits for a state, and leaves: the request has no end before.
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

// expired returns how many sets of KV blocks the engines freed by their own time limit.
func (w *world) expired(t *testing.T) (n int) {
	t.Helper()
	for name := range w.engines {
		s, _ := w.state(t, name)
		n += s.LeasesExpired
	}
	return n
}

// leaks runs one row of the table. Afterwards nothing is left, in the picker, in the sidecars and
// on the engines. The sidecar has freed the KV of the row, or leaked is true and the engine had
// to free the KV by its own time limit.
func (w *world) leaks(t *testing.T, leaked bool, row func()) {
	t.Helper()
	before := w.expired(t)
	row()
	w.idle(t)
	if n := w.expired(t) - before; (n > 0) != leaked {
		t.Errorf("the engines freed %d sets of blocks by their own time limit, leak expected: %t", n, leaked)
	}
}

// shortLease is the lease of blocks where some sidecar leaks them.
const shortLease = "5s"

// leaseFor is the lease of blocks with that kind of sidecar.
func leaseFor(k *kind) string {
	if k.cleans {
		return ""
	}
	return shortLease
}

// TestClients has the rows of the failure table in which a client leaves, under their names.
func TestClients(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, lease: leaseFor(k)})
		cancelled := 0.0
		for version, c := range clients {
			for _, row := range []struct {
				name    string
				engines []string // that hang
				hang    string
				ready   func() bool
				held    bool // prefill holds KV for decode
			}{
				{"client leaves before prefill answered", prefills, "prefill", func() bool {
					return w.any(t, prefills, func(s state) bool { return s.RequestsRunning > 0 })
				}, false},
				{"client leaves between the legs", decodes, "head", func() bool {
					return w.any(t, prefills, func(s state) bool { return s.BlocksPinned > 0 })
				}, true},
				{"client leaves while decode streams", decodes, "stream", func() bool {
					return w.any(t, decodes, func(s state) bool { return s.RequestsRunning > 0 })
				}, false},
			} {
				t.Run(version+" "+row.name, func(t *testing.T) {
					w.leaks(t, row.held && !k.cleans, func() {
						w.fault(t, row.engines, "", row.hang)
						w.leave(t, c, body(version+row.name, 2000, 64, true), row.name, row.ready)
						w.fault(t, row.engines, "", "")
					})
					cancelled++
				})
			}
		}
		until(t, "the outcomes are counted", func() bool {
			return w.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`) == cancelled
		})
	})
}

// TestPrefillFails has the rows of the failure table in which prefill fails. pdproxy's sidecar
// then computes the prompt on its own engine. llm-d's passes the failure on. A refusal reaches the
// client with both.
func TestPrefillFails(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, beside: shortLimits})
		alone := "http://" + w.engine(t, "alone", "both")
		for version, c := range clients {
			for _, row := range []struct {
				kind   string
				status int // that a sidecar without a retry passes on
			}{{"400", 400}, {"500", 500}, {"503", 503}, {"reset", 502}, {"close", 502}, {"garbage", 400}} {
				t.Run(version+" prefill refuses, dies or answers garbage: "+row.kind, func(t *testing.T) {
					w.leaks(t, false, func() {
						w.fault(t, prefills, "1:"+row.kind, "")
						for _, stream := range []bool{false, true} {
							b := body(fmt.Sprint(version, row.kind, stream), 400, 8, stream)
							if resp, text := answer(t, c, w.url("closed"), b); k.retries && row.kind != "400" {
								w.whole(t, alone, b, resp, text)
							} else if resp.StatusCode != row.status || !strings.Contains(text, "message") && k.retries {
								t.Errorf("stream %t: %d %s, want %d", stream, resp.StatusCode, text, row.status)
							}
						}
						w.fault(t, prefills, "", "")
					})
					w.works(t)
				})
			}
			t.Run(version+" prefill hangs", func(t *testing.T) {
				w.leaks(t, false, func() {
					w.fault(t, prefills, "", "prefill")
					b := body(version+"hangs", 400, 8, true)
					if k.limits {
						resp, text := answer(t, c, w.url("closed"), b)
						w.whole(t, alone, b, resp, text)
					} else {
						w.leave(t, c, b, "prefill has the request", func() bool {
							return w.any(t, prefills, func(s state) bool { return s.RequestsRunning > 0 })
						})
					}
					w.fault(t, prefills, "", "")
				})
				w.works(t)
			})
		}
	})
}

// whole checks that an answer has the text of one engine alone.
func (w *world) whole(t *testing.T, alone, body string, resp *http.Response, text string) {
	t.Helper()
	want, err := textOf(answer(t, clients["H1"], alone, body))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := textOf(resp, text); err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

// TestDecodeFails has the rows of the failure table in which decode fails before its first
// byte: no sidecar has another decode engine. The error of pdproxy's names the leg. llm-d's passes
// the status on, and prefill keeps the KV until its own time limit.
func TestDecodeFails(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, beside: shortLimits + "circuit.failures = 1000\n", lease: leaseFor(k)})
		for version, c := range clients {
			for _, row := range []struct {
				kind           string
				status, passed int // of pdproxy's sidecar, and of one that passes the failure on
			}{{"400", 400, 400}, {"500", 502, 500}, {"503", 502, 503}, {"reset", 502, 502}, {"close", 502, 502}} {
				t.Run(version+" decode refuses or dies before the first byte: "+row.kind, func(t *testing.T) {
					want := row.status
					if !k.reports {
						want = row.passed
					}
					w.leaks(t, !k.cleans, func() {
						w.fault(t, decodes, "1:"+row.kind, "")
						for _, stream := range []bool{false, true} {
							resp, text := answer(t, c, w.url("closed"), body(fmt.Sprint(version, row.kind, stream), 400, 8, stream))
							if resp.StatusCode != want || k.reports && want > 400 && !strings.Contains(text, "decode") {
								t.Errorf("stream %t: %d %s, want %d", stream, resp.StatusCode, text, want)
							}
						}
						w.fault(t, decodes, "", "")
					})
					w.works(t)
				})
			}
			t.Run(version+" decode hangs before the first byte", func(t *testing.T) {
				w.leaks(t, !k.cleans, func() {
					w.fault(t, decodes, "", "head")
					b := body(version+" hangs", 400, 8, true)
					if k.limits {
						if resp, text := answer(t, c, w.url("closed"), b); resp.StatusCode != 504 || !strings.Contains(text, "decode") {
							t.Errorf("%d %s, want 504", resp.StatusCode, text)
						}
					} else {
						w.leave(t, c, b, "decode has the request", func() bool {
							return w.any(t, prefills, func(s state) bool { return s.BlocksPinned > 0 })
						})
					}
					w.fault(t, decodes, "", "")
				})
				w.works(t)
			})
		}
	})
}

// cut checks that a request gets an error, or a connection that is cut.
func (w *world) cut(t *testing.T, c *http.Client, body string) {
	t.Helper()
	resp, err := post(t.Context(), c, w.url("closed"), body)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err == nil && resp.StatusCode < 500 {
		t.Errorf("%d, and the stream ends silently with %q", resp.StatusCode, tail(string(text), 3))
	}
}

// TestStreamsBreak has the rows of the failure table in which a stream breaks.
func TestStreamsBreak(top *testing.T) {
	eachSidecar(top, func(top *testing.T, k *kind) {
		w := newWorld(top, setting{kind: k, beside: shortLimits, lease: shortLease})
		for version, c := range clients {
			top.Run(version+" decode dies mid-stream: cut", func(t *testing.T) {
				w.fault(t, decodes, "1:cut", "")
				if b := body("cut "+version, 400, 400, true); k.reports {
					broken(t, w.stream(t, c, "closed", b))
				} else { // the events before the cut may be lost too
					w.cut(t, c, b)
				}
				w.fault(t, decodes, "", "")
				w.works(t)
			})
			top.Run(version+" stream is idle", func(t *testing.T) {
				w.fault(t, decodes, "", "stream")
				if b := body("idle "+version, 400, 400, true); k.limits {
					broken(t, w.stream(t, c, "closed", b))
				} else {
					w.leave(t, c, b, "decode runs", func() bool {
						return w.any(t, decodes, func(s state) bool { return s.RequestsRunning > 0 })
					})
				}
				w.fault(t, decodes, "", "")
				w.works(t)
			})
			top.Run(version+" decode dies mid-stream: killed", func(t *testing.T) {
				resp := w.stream(t, c, "closed", body("killed "+version, 400, 100_000, true))
				name := resp.Header.Get("X-Pdproxy-Decode")
				w.engines[name].stop(t, syscall.SIGKILL)
				if k.reports {
					broken(t, resp)
				} else if text, err := io.ReadAll(resp.Body); err == nil {
					t.Errorf("the stream ends silently with %q", tail(string(text), 3))
				}
				resp.Body.Close()
				w.avoids(t, name)
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
	})
}

// avoids waits until the picker has noticed that a decode engine is dead, and checks that it then
// places no request there.
func (w *world) avoids(t *testing.T, dead string) {
	t.Helper()
	until(t, "the picker knows that "+dead+" is dead", func() bool {
		_, text := get(w.admin + "/v1/engines")
		return strings.Contains(text, `"state":"unhealthy"`)
	})
	for i := range 4 {
		resp, text := answer(t, clients["H1"], w.url("closed"), body(fmt.Sprint("avoids ", dead, i), 100, 4, false))
		if at := resp.Header.Get("X-Pdproxy-Decode"); resp.StatusCode != 200 || at == dead {
			t.Errorf("%d on %q after the death of %s: %s", resp.StatusCode, at, dead, text)
		}
	}
}
