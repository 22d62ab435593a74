package plugins

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/filter"
)

// sdks are the folders of testdata with the import path of their SDK.
var sdks = map[string]string{
	"tetratelabs": "github.com/tetratelabs/proxy-wasm-go-sdk",
	"official":    "github.com/proxy-wasm/proxy-wasm-go-sdk",
}

// tour returns the folder of the plugin for an SDK. testdata contains its
// source, tour.go, only once, with tetratelabs' import path. So the tests below
// check both SDKs with the same source.
func tour(t *testing.T, sdk string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", sdk))); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("testdata/tetratelabs/tour.go")
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "tour.go"), strings.ReplaceAll(string(text), sdks["tetratelabs"], sdks[sdk]))
	return dir
}

// TestBytes: two builds of one source, in folders with different names, give
// the same module.
func TestBytes(t *testing.T) {
	if !bytes.Equal(buildPlugin(t, tour(t, "tetratelabs")), buildPlugin(t, "testdata/tetratelabs")) {
		t.Error("the modules differ")
	}
}

func TestSDK(t *testing.T) {
	for name := range sdks {
		t.Run(name, func(t *testing.T) { checkSDK(t, buildPlugin(t, tour(t, name))) })
	}
}

// checkSDK tests a module of the source tour.go.
func checkSDK(t *testing.T, module []byte) {
	cache := newCache(t)
	t.Run("module", func(t *testing.T) { checkModule(t, module, cache) })
	t.Run("life", func(t *testing.T) { checkLife(t, module, cache) })
	t.Run("requests", func(t *testing.T) { checkRequests(t, module, cache) })
	t.Run("calls", func(t *testing.T) { checkCalls(t, module, cache) })
	t.Run("load", func(t *testing.T) { checkLoad(t, module, cache) })
}

// checkModule checks the exports.
func checkModule(t *testing.T, module []byte, cache *host.Cache) {
	m, err := host.Load(t.Context(), module, host.LoadOptions{Guarded: true, Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(t.Context())
	if got := m.Info().ABIVersion; got != "0.2.0" {
		t.Errorf("ABI %q", got)
	}
	have := strings.Join(m.Info().Callbacks, " ")
	for _, want := range []string{
		"context_create", "vm_start", "configure", "tick", "request_headers", "request_body", "request_trailers",
		"response_headers", "response_body", "response_trailers", "http_call_response", "queue_ready", "done", "log", "delete",
	} {
		if !strings.Contains(have+" ", "proxy_on_"+want+" ") {
			t.Errorf("no proxy_on_%s among %s", want, have)
		}
	}
}

// checkLife tests a plugin from start to end.
func checkLife(t *testing.T, module []byte, cache *host.Cache) {
	w := newWorld(t, cache, nil)
	p := w.start(module, func(s *filter.Spec) { s.VMConfig, s.Config = "vm text", "plugin text" })
	w.logged(`vm configuration \"vm text\" of 7`)
	w.logged("third tick")
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	w.logged("plugin done")

	bad := filter.New(filter.Spec{Name: "bad", Wasm: module, VMs: 1, Config: "refuse", Load: host.LoadOptions{Guarded: true, Cache: cache}}, filter.Deps{
		Shared: &w.store, Budget: newBudget(), Log: w.logger(),
	})
	if err := bad.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "configure") {
		t.Errorf("a refused configuration: %v", err)
	}
}

// checkRequests tests a filter that changes requests without calls.
func checkRequests(t *testing.T, module []byte, cache *host.Cache) {
	w := newWorld(t, cache, nil)
	url := w.serve(echo, w.start(module, func(s *filter.Spec) { s.Config = "plugin text"; s.FailOpen = false }))
	for _, tt := range []struct {
		do, body string
		lines    []string
		status   int
		want     string            // body of the answer
		headers  map[string]string // headers of the answer; those of the request as "got-"
		logged   string
	}{
		{do: "nothing", body: "b", status: 200, want: "b", headers: map[string]string{"got-x-config": "plugin text", "x-tour": "nothing", "x-status": "200"}},
		{do: "reply", status: 418, want: "short and stout", headers: map[string]string{"x-pot": "tea"}},
		{do: "headers", lines: []string{"x-many: 1", "x-many: 2", "x-gone: 1"}, status: 200, headers: map[string]string{
			"got-x-many": "1+|2+", "got-x-gone": "", "got-path": "/rewritten?c=d", "got-x-error": "error status returned by host: not found"}},
		{do: "property", status: 200, headers: map[string]string{"got-x-path": "/?q=1", "got-x-mine": "mine",
			"got-x-error": "error status returned by host: not found"}},
		{do: "foreign", status: 200, headers: map[string]string{"got-x-foreign": "100000 error status returned by host: not found"}},
		{do: "shout", body: strings.Repeat("shout ", 50000), status: 200, want: "<" + strings.Repeat("SHOUT ", 50000) + ">"},
		{do: "whole answer", body: strings.Repeat("a", 300000), status: 200, want: "300000 bytes",
			logged: "from the queue: done whole answer"}, // before the panic: a new instance is not notified of earlier messages
		{do: "panic", status: 503, want: "*"},
		{do: "nothing", body: "again", status: 200, want: "again"},
	} {
		t.Run(tt.do, func(t *testing.T) {
			status, headers, body := w.do("POST", url+"/?q=1", tt.body, append(tt.lines, "x-do: "+tt.do)...)
			if status != tt.status || tt.want != "*" && body != tt.want {
				t.Errorf("got status %d, body %.100q (%d bytes)", status, body, len(body))
			}
			for name, want := range tt.headers {
				if got := strings.Join(headers.Values(name), "|"); got != want {
					t.Errorf(`%s: strings.Join(headers.Values(name), "|") = %q, want %q`, name, got, want)
				}
			}
			if tt.logged != "" {
				w.logged(tt.logged)
			}
		})
	}
	if m, ok := w.metrics.Find(host.Counter, "tour_requests"); !ok || m.Value() != 9 {
		t.Errorf("requests counted as %+v", m)
	}
	if _, ok := w.metrics.Find(host.Histogram, "tour_bytes"); !ok {
		t.Error("no histogram")
	}
}

// checkCalls tests a filter that calls an upstream while a request waits.
func checkCalls(t *testing.T, module []byte, cache *host.Cache) {
	answer := "yes"
	w := newWorld(t, cache, func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != "question" || r.Host != "checker" || r.RequestURI != "/check?a=b" || r.Header.Get("x-a") != "b" {
			t.Errorf("called as %s %s with %q", r.Host, r.RequestURI, body)
		}
		_, _ = io.WriteString(rw, answer)
	})
	url := w.serve(echo, w.start(module, nil))
	status, headers, body := w.do("POST", url, "body", "x-do: call")
	if status != 200 || headers.Get("got-x-called") != "yes" || body != "body" {
		t.Errorf("allowed: %d %v %q", status, headers, body)
	}
	answer = "no"
	if status, _, body := w.do("POST", url, "body", "x-do: call"); status != 403 || body != "no" {
		t.Errorf("refused: %d %q", status, body)
	}
	w.calls.Close()
	if status, _, _ := w.do("POST", url, "body", "x-do: call"); status != 502 {
		t.Errorf("no upstream: %d", status)
	}
	if _, headers, _ := w.do("POST", url, "body", "x-do: call nobody"); headers.Get("got-x-error") != "error status returned by host: bad argument" {
		t.Errorf("unknown upstream: %v", headers)
	}
}

// checkLoad runs requests at the same time over several VMs: shared data is
// exact, bodies stay with their requests.
func checkLoad(t *testing.T, module []byte, cache *host.Cache) {
	const clients, each = 8, 25
	w := newWorld(t, cache, nil)
	url := w.serve(echo, w.start(module, func(s *filter.Spec) { s.VMs = 3 }))
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := range each {
				text := fmt.Sprintf("client %d request %d ", c, i)
				want := "<" + strings.ToUpper(strings.Repeat(text, 100)) + ">"
				if _, _, body := w.do("POST", url, strings.Repeat(text, 100), "x-do: shout"); body != want {
					t.Errorf("%s: w.do = %.60q, want %.60q", text, body, want)
				}
				w.do("POST", url, "", "x-do: count")
			}
		})
	}
	wg.Wait()
	space := w.store.Open("")
	defer space.Release()
	if value, _, _ := space.Get("count"); string(value) != fmt.Sprint(clients*each) {
		t.Errorf("counted %q", value)
	}
}
