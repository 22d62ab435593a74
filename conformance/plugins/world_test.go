package plugins

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/build"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// buildPlugin compiles a plugin's folder without changes to its files, and
// returns the module.
func buildPlugin(t *testing.T, dir string) []byte {
	t.Helper()
	module, _ := buildPluginWith(t, build.Options{Dir: dir})
	return module
}

// buildPluginWith is buildPlugin with options.
func buildPluginWith(t *testing.T, o build.Options) ([]byte, build.Result) {
	t.Helper()
	var log bytes.Buffer
	o.Output, o.Log = filepath.Join(t.TempDir(), "plugin.wasm"), &log
	result, err := build.Build(t.Context(), o)
	if err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	module, err := os.ReadFile(o.Output)
	if err != nil {
		t.Fatal(err)
	}
	return module, result
}

// world holds what plugins share in a test: a log, shared data, metrics, and
// one upstream under any name.
type world struct {
	t       *testing.T
	cache   *host.Cache
	log     logLines
	store   shared.Store
	metrics shared.LocalMetrics
	calls   *httptest.Server
}

// newCache keeps compiled code for the tests of one module.
func newCache(t *testing.T) *host.Cache {
	cache, err := host.NewCache(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cache.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return cache
}

// newWorld makes a world whose upstream answers with call.
func newWorld(t *testing.T, cache *host.Cache, call http.HandlerFunc) *world {
	w := &world{t: t, cache: cache}
	w.log.changed = make(chan struct{})
	w.calls = httptest.NewServer(call)
	t.Cleanup(w.calls.Close)
	return w
}

// start starts a version of a filter with one VM.
func (w *world) start(module []byte, change func(*filter.Spec)) *filter.Plugin {
	w.t.Helper()
	upstream, err := url.Parse(w.calls.URL)
	if err != nil {
		w.t.Fatal(err)
	}
	spec := filter.Spec{
		Name: "test", Wasm: module, VMs: 1, Upstreams: []string{"*"}, Timeout: 5 * time.Second,
		Load: host.LoadOptions{Guarded: true, CompileWorkers: 2, Cache: w.cache},
	}
	if change != nil {
		change(&spec)
	}
	p := filter.New(spec, filter.Deps{
		Shared: &w.store, Budget: newBudget(), Metrics: &w.metrics,
		Upstreams: map[string]*url.URL{"upstream": upstream},
		Node:      filter.Node{ID: "node", Cluster: "cluster"},
		Log:       w.logger(),
	})
	if err := p.Start(w.t.Context()); err != nil {
		w.t.Fatalf("%v\n%s", err, w.log.text())
	}
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			w.t.Error(err)
		}
	})
	return p
}

func newBudget() *budget.Budget { return budget.New(20, time.Minute, 0) }

func (w *world) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(&w.log, &slog.HandlerOptions{Level: slog.LevelDebug - 4}))
}

// serve wraps a handler with the filters and returns the address.
func (w *world) serve(next http.HandlerFunc, plugins ...*filter.Plugin) string {
	var chain filter.Chain
	chain.Set(plugins, filter.Limits{})
	server := httptest.NewServer(chain.Wrap(next))
	w.t.Cleanup(server.Close)
	return server.URL
}

// do sends a request; header lines are "name: value". It returns the status, the
// headers and the body of the answer.
func (w *world) do(method, target, body string, lines ...string) (int, http.Header, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, target, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		req.Header.Add(name, value)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatalf("%v\n%s", err, w.log.text())
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(answer)
}

// echo answers with the request's body, and with its headers under "got-".
func echo(w http.ResponseWriter, r *http.Request) {
	for name, values := range r.Header {
		w.Header()["Got-"+name] = values
	}
	w.Header().Set("Got-Host", r.Host)
	w.Header().Set("Got-Path", r.URL.RequestURI())
	_, _ = io.Copy(w, r.Body)
}

// logLines holds the plugins' log.
type logLines struct {
	mu      sync.Mutex
	buffer  bytes.Buffer  // guarded by mu
	changed chan struct{} // closed when the buffer grows; guarded by mu
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
	return l.buffer.Write(p)
}

func (l *logLines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.String()
}

// logged waits until a text is in the log. A goroutine in the background may
// write it.
func (w *world) logged(want string) {
	w.t.Helper()
	limit := time.After(20 * time.Second)
	for {
		w.log.mu.Lock()
		found, changed := strings.Contains(w.log.buffer.String(), want), w.log.changed
		w.log.mu.Unlock()
		if found {
			return
		}
		select {
		case <-changed:
		case <-limit:
			w.t.Fatalf("%q was never logged, only\n%s", want, w.log.text())
		}
	}
}
