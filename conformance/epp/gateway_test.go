package epp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// clients are HTTP clients that speak one version only.
var clients = map[string]*http.Client{"H1": client(false), "H2": client(true)}

func client(h2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	return &http.Client{Transport: &http.Transport{Protocols: p, MaxIdleConnsPerHost: 100}}
}

// body returns the body of a completion. Prompts with another tag share no blocks.
func body(tag string, bytes, tokens int, stream bool) string {
	text := tag + strings.Repeat(" word", max(0, bytes-len(tag))/5)
	options := ""
	if stream {
		options = `,"stream_options":{"include_usage":true}`
	}
	return fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":%d,"stream":%t%s}`, text, tokens, stream, options)
}

// post sends a completion and returns the answer.
func post(ctx context.Context, c *http.Client, url, body string, header ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return c.Do(r)
}

// answer sends a completion and returns the whole answer.
func answer(t *testing.T, c *http.Client, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := post(ctx, c, url, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%v after %d bytes", err, len(text))
	}
	return resp, string(text)
}

// TestAnswers: whole answers and streams pass unchanged in each mode of the filter, by HTTP/1.1
// and HTTP/2, with bodies of up to 4 MB. The chosen pair runs each request, and the picker
// records it.
func TestAnswers(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k})
		n := 0
		for mode := range w.listeners {
			for version, c := range clients {
				for _, size := range []int{20, 60_000, 70_000, 4 << 20} {
					for _, stream := range []bool{false, true} {
						n++
						name := fmt.Sprintf("%s %s %d %t", mode, version, size, stream)
						resp, text := answer(t, c, w.url(mode), body(name, size, 8, stream))
						if resp.StatusCode != 200 {
							t.Errorf("%s: %d %s", name, resp.StatusCode, tail(text, 3))
							continue
						}
						if stream != strings.HasSuffix(strings.TrimSpace(text), "data: [DONE]") || stream == json.Valid([]byte(text)) {
							t.Errorf("%s: the answer ends with %q", name, text[max(0, len(text)-80):])
						}
						if p, d := resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode"); p == "" || d == "" {
							t.Errorf("%s: placed on %q and %q", name, p, d)
						}
					}
				}
			}
		}
		w.idle(t)
		if ok := w.metric(t, "pdproxy_exchanges_total", `outcome="ok"`); ok != float64(n) {
			_, text := get(w.admin + "/metrics")
			t.Errorf("%v exchanges are ok, want %d:\n%s", ok, n, strings.Join(regexp.MustCompile(`(?m)^pdproxy_exchanges_total.*$`).FindAllString(text, -1), "\n"))
		}
	})
}

// TestKilledPicker: without a picker Envoy fails closed or open, as it is configured. It uses
// the picker again after a restart.
func TestKilledPicker(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, lease: shortLease})
		w.killPicker(t)
		for version, c := range clients {
			if resp, _ := answer(t, c, w.url("closed"), body(version, 100, 4, false)); resp.StatusCode < 500 {
				t.Errorf("%s, fail closed: %d", version, resp.StatusCode)
			}
			// Envoy cannot fail open once it has sent a part of the body to the picker. So it
			// does in these modes when a health check has found the picker gone.
			for _, mode := range []string{"open", "open-buffered"} {
				until(t, version+" fails "+mode, func() bool {
					resp, _ := answer(t, c, w.url(mode), body(version, 100, 4, false))
					return resp.StatusCode == 200 && resp.Header.Get("X-Pdproxy-Decode") == ""
				})
			}
		}
		w.startPicker(t)
		until(t, "the picker is used again", func() bool {
			resp, _ := answer(t, clients["H1"], w.url("closed"), body("again", 100, 4, false))
			return resp.StatusCode == 200 && resp.Header.Get("X-Pdproxy-Decode") != ""
		})
		w.idle(t)
	})
}

// TestClientLeaves: the lease ends when the client leaves, before and inside the answer.
func TestClientLeaves(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k})
		for version, c := range clients {
			ctx, cancel := context.WithCancel(t.Context())
			resp, err := post(ctx, c, w.url("closed"), body("leaves "+version, 100, 100_000, true))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if leases := w.metric(t, "pdproxy_leases_open"); leases != 1 {
				t.Errorf("%s: %v leases are open during a stream", version, leases)
			}
			cancel()
			resp.Body.Close()
			w.idle(t)
		}
		if n := w.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`); n != 2 {
			t.Errorf("%v exchanges are cancelled, want 2", n)
		}
	})
}

// TestKilledEngine: after the death of an engine the picker chooses the other one.
func TestKilledEngine(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, lease: shortLease})
		w.engines["d0"].stop(t, syscall.SIGKILL)
		w.engines["p1"].stop(t, syscall.SIGKILL)
		until(t, "ten successive requests succeed", func() bool {
			for i := range 10 {
				resp, _ := answer(t, clients["H1"], w.url("closed"), body(fmt.Sprint("killed ", i), 100, 4, i%2 == 0))
				if resp.StatusCode != 200 || resp.Header.Get("X-Pdproxy-Decode") != "d1" || resp.Header.Get("X-Pdproxy-Prefill") != "p0" {
					return false
				}
			}
			return true
		})
		w.idle(t)
	})
}

// TestStreams: 1,000 streams at the same time, half of which their clients leave.
func TestStreams(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k})
		const streams = 1000
		var wg sync.WaitGroup
		failures := make(chan error, streams)
		for i := range streams {
			wg.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				c := clients[[]string{"H1", "H2"}[i%2]]
				resp, err := post(ctx, c, w.url("closed"), body(fmt.Sprint("stream ", i), 400, 64, true))
				if err != nil {
					failures <- err
					return
				}
				defer resp.Body.Close()
				if i%4 < 2 {
					_, err = bufio.NewReader(resp.Body).ReadString('\n')
				} else {
					var text []byte
					if text, err = io.ReadAll(resp.Body); err == nil && !strings.HasSuffix(strings.TrimSpace(string(text)), "data: [DONE]") {
						err = fmt.Errorf("%d, the answer ends with %q", resp.StatusCode, text[max(0, len(text)-100):])
					}
				}
				if resp.StatusCode != 200 {
					err = fmt.Errorf("status %d", resp.StatusCode)
				}
				if err != nil {
					failures <- fmt.Errorf("stream %d: %w", i, err)
				}
			})
		}
		wg.Wait()
		close(failures)
		for err := range failures {
			t.Error(err)
		}
		w.idle(t)
	})
}

// TestPriorityLines: the picker reads the header lines that name a class and a flow, if the
// configuration names these lines.
func TestPriorityLines(t *testing.T) {
	w := newWorld(t, setting{picker: "priority_class = [{name = \"premium\", priority = 100}]\nlimits.priority_header = \"x-gateway-inference-objective\"\nlimits.trust_priority = true\nlimits.fairness_header = \"x-gateway-inference-fairness-id\"\n"})
	for _, objective := range []string{"premium", "", "unknown"} {
		resp, text := answer(t, clients["H1"], w.url("closed"), body("objective "+objective, 100, 4, false),
			"x-gateway-inference-objective", objective, "x-gateway-inference-fairness-id", "team-a")
		if resp.StatusCode != 200 {
			t.Errorf("%q: %d %s", objective, resp.StatusCode, text)
		}
	}
	w.idle(t)
	if n := w.metric(t, "pdproxy_class_exchanges_total", `class="premium"`, `outcome="ok"`); n != 1 {
		t.Errorf("%v requests of the class premium, want 1", n)
	}
}
