package filter

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// guests are the modules of the tests by folder, each compiled once.
var guests = map[string][]byte{}

var compiled *host.Cache

// The scripted guest is that of the conformance tests. Its configuration is a
// script of its actions.
const scripted, headersOnly = "../../conformance/abi/testdata/filter", "testdata/headers"

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "filter")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	for _, src := range []string{scripted, headersOnly} {
		out := filepath.Join(dir, filepath.Base(src)+".wasm")
		build := exec.Command("go", "build", "-trimpath", "-buildmode=c-shared", "-o", out, "./"+src)
		build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
		if text, err := build.CombinedOutput(); err != nil {
			panic(fmt.Sprintf("build %s: %v\n%s", src, err, text))
		}
		if guests[src], err = os.ReadFile(out); err != nil {
			panic(err)
		}
	}
	if compiled, err = host.NewCache(policytest.CacheDir(dir)); err != nil {
		panic(err)
	}
	defer compiled.Close(context.Background())
	return m.Run()
}

// journal holds the log lines of guests and plugins as "plugin: message".
type journal struct {
	mu     sync.Mutex
	lines  []string
	attrs  string
	grown  chan struct{}
	parent *journal
}

func newJournal() *journal { return &journal{grown: make(chan struct{})} }

func (j *journal) root() *journal {
	if j.parent != nil {
		return j.parent
	}
	return j
}

func (j *journal) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

func (j *journal) Handle(_ context.Context, r slog.Record) error {
	line := j.attrs + ": " + r.Message
	r.Attrs(func(a slog.Attr) bool { line += fmt.Sprintf(" %s=%v", a.Key, a.Value); return true })
	root := j.root()
	root.mu.Lock()
	defer root.mu.Unlock()
	root.lines = append(root.lines, line)
	close(root.grown)
	root.grown = make(chan struct{})
	return nil
}

func (j *journal) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &journal{parent: j.root(), attrs: attrs[0].Value.String()}
}

func (j *journal) WithGroup(string) slog.Handler { return j }

func (j *journal) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.lines)
}

// find returns the lines that contain text.
func (j *journal) find(text string) (found []string) {
	for _, line := range j.all() {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

// wait waits for n lines that contain text.
func (j *journal) wait(t *testing.T, n int, text string) []string {
	t.Helper()
	limit := time.After(20 * time.Second)
	for {
		j.mu.Lock()
		grown := j.grown
		j.mu.Unlock()
		if found := j.find(text); len(found) >= n {
			return found
		}
		select {
		case <-grown:
		case <-limit:
			t.Fatalf("no %d lines with %q in\n%s", n, text, strings.Join(j.all(), "\n"))
		}
	}
}

// failures is a Meter that records failed calls.
type failures struct {
	mu      sync.Mutex
	calls   int
	reasons []string
}

func (f *failures) Observe(host.Callback, time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
}

func (f *failures) Fail(c host.Callback, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reasons = append(f.reasons, reason)
}

func (f *failures) all() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.reasons)
}

// world is a chain with its dependencies.
type world struct {
	t         *testing.T
	log       *journal
	shared    shared.Store
	metrics   shared.LocalMetrics
	meter     failures
	upstreams map[string]*url.URL
	transport *http.Transport
	chain     Chain
	plugins   []*Plugin
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, log: newJournal(), upstreams: map[string]*url.URL{}, transport: &http.Transport{}}
	t.Cleanup(func() {
		for _, p := range w.plugins {
			if err := p.Close(context.Background()); err != nil {
				t.Errorf("close: %v", err)
			}
			if held := p.deps.Host.Held(); held != 0 {
				t.Errorf("%d bytes are held for a plugin that is closed", held)
			}
		}
		w.transport.CloseIdleConnections()
		if t.Failed() {
			t.Logf("journal:\n%s", strings.Join(w.log.all(), "\n"))
		}
	})
	return w
}

// spec describes a plugin of the scripted guest with one VM.
func spec(name, script string) Spec {
	return Spec{Name: name, Wasm: guests[scripted], Config: script, VMs: 1, Upstreams: []string{"*"},
		Load: host.LoadOptions{Guarded: true, Cache: compiled, MemoryPages: 1024}}
}

func (w *world) deps() Deps {
	return Deps{
		Shared: &w.shared, Budget: budget.New(1000, time.Minute, 0), Upstreams: w.upstreams, Transport: w.transport,
		Metrics: &w.metrics, Meter: &w.meter, Log: slog.New(w.log),
		Node: Node{ID: "node-1", Cluster: "lab", Listener: "127.0.0.1:8000", Metadata: map[string]string{"zone": "b", "rack": "7"}},
	}
}

// start adds a plugin to the end of the chain.
func (w *world) start(s Spec) *Plugin {
	w.t.Helper()
	return w.startWith(s, w.deps())
}

func (w *world) startWith(s Spec, d Deps) *Plugin {
	w.t.Helper()
	p := New(s, d)
	if err := p.Start(context.Background()); err != nil {
		w.t.Fatal(err)
	}
	w.plugins = append(w.plugins, p)
	w.chain.Set(w.plugins, Limits{MaxBody: 1 << 20})
	return p
}

// serve starts a server of the chain before next.
func (w *world) serve(next http.HandlerFunc) *httptest.Server {
	w.t.Helper()
	return w.serveAs(w.chain.Wrap(next))
}

// serveAs is serve for a handler that calls the chain itself.
func (w *world) serveAs(h http.Handler) *httptest.Server {
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	srv.EnableHTTP2 = true
	srv.Start()
	w.t.Cleanup(srv.Close)
	return srv
}

// duplex makes a chain's handler the one of a connection with full duplex, as the proxy
// does. Without it, net/http waits for the rest of a body before it sends an answer.
func duplex(h http.Handler) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).EnableFullDuplex()
		h.ServeHTTP(rw, r)
	}
}

// echo answers with the request's body.
func echo(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("X-Length", fmt.Sprint(r.ContentLength))
	w.Write(b)
}

// do sends a request that runs the given section of the script, and reads the
// answer.
func do(t *testing.T, srv *httptest.Server, section, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest("POST", srv.URL+"/v1/x?q=1", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Script", section)
	resp, err := srv.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// callbacks returns the journal's lines of a stream context, without ids.
func (w *world) callbacks(plugin string) (names []string) {
	for _, line := range w.log.find(plugin + ": ") {
		part := strings.Split(strings.TrimPrefix(line, plugin+": "), "|")
		if len(part) == 4 {
			names = append(names, part[1]+" "+part[3])
		}
	}
	return names
}

// nap waits for a moment, where a test cannot wait for an event.
func nap() <-chan time.Time { return time.After(time.Millisecond) }
