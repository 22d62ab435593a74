package epp

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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
