package epp

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// guest compiles the policy module of the tests of policies, and returns its path.
func guest(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "guest.wasm")
	c := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildmode=c-shared", "-ldflags=-s -w", "-o", path, "./plugins/policy/testdata/guest")
	c.Dir, c.Env = "../..", append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return path
}

// plugin is the table of the guest with a configuration.
func plugin(path, config string) string {
	return fmt.Sprintf("[[plugin]]\nname = \"tier\"\npath = %q\nconfig = %q\n", path, config)
}

// TestDeclaredHeaders: the place policy of a module gets the request headers that the module
// declares, as the client has sent them to Envoy, in one process and in a fleet. The module chooses
// the first pair only for x-tier gold, an empty x-empty, and no x-absent; else the last pair.
func TestDeclaredHeaders(t *testing.T) {
	module := guest(t)
	for name, keys := range map[string]string{"single": "", "fleet": fleetKeys} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setting{
				picker: "policy.place = \"tier\"\n" + keys,
				tables: plugin(module, "place=tier needs=headers headers=X-Tier,x-absent,x-empty"),
			})
			for mode := range w.listeners {
				for version, c := range clients {
					for _, tt := range []struct{ header, want string }{
						{"x-tier: gold, x-empty: ", "p0 d0"},
						{"X-TIER: gold, X-Empty: , authorization: Bearer secret, cookie: x-absent=1", "p0 d0"},
						{"x-tier: silver, x-empty: ", "p1 d1"},
						{"x-tier: gold", "p1 d1"},
						{"x-tier: gold, x-empty: , x-absent: 1", "p1 d1"},
						{"x-tier: gold, x-tier: gold, x-empty: ", "p1 d1"}, // gold, gold
						{"authorization: gold, x-empty: ", "p1 d1"},
						{"", "p1 d1"},
					} {
						resp, text := answer(t, c, w.url(mode), body(mode+version+tt.header, 100, 4, false), lines(tt.header)...)
						got := resp.Header.Get("X-Pdproxy-Prefill") + " " + resp.Header.Get("X-Pdproxy-Decode")
						if resp.StatusCode != 200 || got != tt.want {
							t.Errorf("%s, %s, %q: %d on %s, want %s: %s", mode, version, tt.header, resp.StatusCode, got, tt.want, tail(text, 1))
						}
					}
				}
			}
			w.idle(t)
			if n := w.metric(t, "pdproxy_fallbacks_total", `what="place"`); n != 0 {
				t.Errorf("%v placements without the policy", n)
			}
		})
	}
}

// lines returns the names and values of header lines with commas between them.
func lines(header string) (list []string) {
	for line := range strings.SplitSeq(header, ", ") {
		if name, value, ok := strings.Cut(line, ": "); ok {
			list = append(list, name, value)
		}
	}
	return list
}

// TestZones: with pairs.same_labels, Envoy gets pairs of one zone only. Without such a pair, the
// client gets an error, and no prefill engine gets a request.
func TestZones(t *testing.T) {
	for _, place := range []string{"kv_aware", "pair_aware"} {
		t.Run(place, func(t *testing.T) {
			zones := map[string]string{"p0": "a", "p1": "b", "d0": "b", "d1": "a"}
			w := newWorld(t, setting{
				picker: fmt.Sprintf("policy.place = %q\npairs.same_labels = [\"zone\"]\n", place),
				zones:  zones, lease: shortLease,
			})
			served := map[string]int{}
			ask := func(tag string) {
				var wg sync.WaitGroup
				var mu sync.Mutex
				for i := range 8 {
					wg.Go(func() {
						resp, text := answer(t, clients["H2"], w.url("closed"), body(fmt.Sprint(tag, " ", i), 400, 8, i%2 == 0))
						p, d := resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode")
						if resp.StatusCode != 200 || zones[p] == "" || zones[p] != zones[d] {
							t.Errorf("%d, prefill on %q, decode on %q: %s", resp.StatusCode, p, d, tail(text, 1))
						}
						mu.Lock()
						served[zones[p]]++
						mu.Unlock()
					})
				}
				wg.Wait()
			}
			n := 0
			until(t, "both zones serve", func() bool { n++; ask(fmt.Sprint("both ", n)); return served["a"] > 0 && served["b"] > 0 })
			w.engines["d0"].stop(t, syscall.SIGKILL)
			until(t, "the picker knows that d0 has ended", func() bool { return w.unhealthy("d0") })
			before := served["b"]
			ask("one zone")
			if served["b"] != before {
				t.Errorf("zone b has no decode engine, and served %d requests", served["b"]-before)
			}
			w.engines["p0"].stop(t, syscall.SIGKILL)
			until(t, "the picker knows that p0 has ended", func() bool { return w.unhealthy("p0") })
			p1, _ := w.state(t, "p1")
			resp, text := answer(t, clients["H1"], w.url("closed"), body("nobody", 400, 8, true))
			if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, `"code":"no_target"`) {
				t.Errorf("%d, Retry-After %q: %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
			}
			if now, _ := w.state(t, "p1"); now.Requests != p1.Requests {
				t.Errorf("p1 got %d requests without a decode engine of its zone", now.Requests-p1.Requests)
			}
			w.idle(t)
		})
	}
}

// unhealthy reports whether the picker knows that an engine has ended.
func (w *world) unhealthy(engine string) bool {
	var rows []struct{ Name, State string }
	if _, text := get(w.admin + "/v1/engines"); json.Unmarshal([]byte(text), &rows) != nil {
		return false
	}
	for _, r := range rows {
		if r.Name == engine {
			return r.State == "unhealthy"
		}
	}
	return false
}
