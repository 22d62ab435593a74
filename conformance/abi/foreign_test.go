package abi

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// foreignModule is a Go module whose source contains a compiled plugin of
// another project.
type foreignModule struct {
	module, version, sum string // sum as in go.sum
	file                 string
}

// emscriptenFilter is a 0.1.0 plugin in C++, compiled by emscripten, with its
// source beside it (example/data/http.cc): it logs each request header.
// License: Apache-2.0.
var emscriptenFilter = foreignModule{
	"mosn.io/proxy-wasm-go-host", "v0.2.0", "h1:v76IiYnqEHBJdLw+vloM/vBHEKg5Z2f3ghTHKfDdECA=", "example/data/http.wasm",
}

// fetch returns the plugin's file in the module cache. The go command puts it
// there like every other module of these tests. The test fails without a Go
// module proxy or a filled cache.
func (f foreignModule) fetch(t *testing.T) string {
	t.Helper()
	c := exec.Command("go", "mod", "download", "-json", f.module+"@"+f.version)
	c.Dir = t.TempDir() // outside of any module
	c.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := c.Output()
	var got struct{ Dir, Sum string }
	if json.Unmarshal(out, &got); err != nil || got.Dir == "" {
		t.Fatalf("go mod download %s@%s: %v %s", f.module, f.version, err, out)
	}
	if got.Sum != f.sum {
		t.Fatalf("%s@%s is %s, not %s", f.module, f.version, got.Sum, f.sum)
	}
	return filepath.Join(got.Dir, f.file)
}

// A 0.1.0 plugin of another project, compiled with emscripten, does what its
// source says.
func TestEmscriptenPlugin(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{filter("cpp", emscriptenFilter.fetch(t), "")}})
	for range 3 {
		n.fine(n.post("", "X-Mark", "seen by C++"))
	}
	has := func(what string) {
		n.logged(what+" is logged", func() bool {
			return slices.ContainsFunc(n.book.all(), func(line string) bool { return strings.Contains(line, what) })
		})
	}
	has("print from wasm, x-mark -> seen by C++")
	has("print from wasm, :path -> /v1/completions")
	if f := n.metric("pdproxy_policy_failures_total"); f != 0 {
		t.Errorf("got %v failures", f)
	}
}

// A plugin that uses the official Go SDK behaves as in Envoy.
func TestOfficialGoSDK(t *testing.T) {
	side := startSide(t)
	n := start(t, options{
		plugins: []config.Plugin{filter("sdk", buildGuest(t, "gosdk", ""), "good day")},
		config:  func(c *config.Config) { c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}} },
	})
	for _, client := range []string{"plain", "postpone", "call"} {
		n.fine(n.post(client))
	}
	e := n.last()
	if got := e.Header.Get("X-Side"); !strings.HasSuffix(got, " from the side") {
		t.Errorf("the callout's answer: %q", got)
	}
	n.fine(n.post("plain"))
	if e = n.last(); e.Header.Get("X-Sdk-Path") != "/v1/completions" {
		t.Errorf("the property: %v", e.Header)
	}
	if r := n.post("reply"); r.status != 418 || r.body != "good day" || r.header.Get("X-By") != "sdk" {
		t.Errorf("got %d %q", r.status, r.body)
	}
	if r := n.post("body"); r.status != 200 || r.body != engineAnswer+" and good day" {
		t.Errorf("got %d %q", r.status, r.body)
	}
	if r := n.post("panic"); r.status < 500 {
		t.Errorf("got %d %q", r.status, r.body)
	}
	before, _ := strconv.Atoi(n.post("plain").header.Get("X-Count"))
	for i := range 10 {
		if got := n.post("plain").header.Get("X-Count"); got != strconv.Itoa(before+i+1) {
			t.Errorf("count %s, want %d", got, before+i+1)
		}
	}
	n.logged("the end of a stream is logged", func() bool {
		return slices.ContainsFunc(n.book.all(), func(line string) bool {
			return strings.Contains(line, "stream plain done after "+strconv.Itoa(len(engineAnswer))+" bytes")
		})
	})
	if v := n.metric("pdproxy_plugin_sdk_requests", `plugin="sdk"`) + n.metric("pdproxy_plugin_sdk_requests_total", `plugin="sdk"`); v < 17 {
		t.Errorf("the counter is %v", v)
	}
}
