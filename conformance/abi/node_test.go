package abi

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// patience bounds every wait for a condition; it is not a claim about speed.
const patience = 30 * time.Second

// scratch is a directory for the whole run: compiled guests and the cache.
var scratch string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "pdproxy-abi")
	if err != nil {
		panic(err)
	}
	scratch = dir
	os.Setenv("XDG_CACHE_HOME", filepath.Join(dir, "cache"))
	code := isolated.Run(m)
	os.RemoveAll(dir)
	os.Exit(code)
}

// buildGuest compiles a guest of testdata once and returns the file.
func buildGuest(t *testing.T, folder, tags string) string {
	t.Helper()
	file, err := builtGuest(folder, tags)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

var guests sync.Map // folder and tags -> func() (string, error)

func builtGuest(folder, tags string) (string, error) {
	build, _ := guests.LoadOrStore(folder+" "+tags, sync.OnceValues(func() (string, error) {
		file := filepath.Join(scratch, folder+tags+".wasm")
		c := exec.Command("go", "build", "-trimpath", "-buildmode=c-shared", "-tags", tags, "-ldflags=-s -w", "-o", file, ".")
		c.Dir = filepath.Join("testdata", folder) // which may be a separate module
		c.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=", "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			return "", &buildError{string(out), err}
		}
		return file, nil
	}))
	return build.(func() (string, error))()
}

type buildError struct {
	output string
	err    error
}

func (e *buildError) Error() string { return e.err.Error() + "\n" + e.output }

// writeModule writes an assembled module to a separate file.
func writeModule(t *testing.T, m *wasmModule) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "guest.wasm")
	replaceFile(t, file, m.bytes())
	return file
}

// replaceFile replaces a file's content by a rename.
func replaceFile(t *testing.T, file string, content []byte) {
	t.Helper()
	if err := os.WriteFile(file+".new", content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

// filter returns a [[plugin]] of the filter phase with generous limits.
func filter(name, path, text string) config.Plugin {
	p := config.DefaultPlugin()
	p.Name, p.Path, p.Config, p.Phase = name, path, text, config.PhaseFilter
	p.Timeout = config.Duration(20 * time.Second)
	return p
}

// scripted is the guest that runs its script.
func scripted(t *testing.T, name, script string) config.Plugin {
	t.Helper()
	return filter(name, buildGuest(t, "filter", ""), script)
}

// node is a running proxy with plugins, in front of one scripted engine.
type node struct {
	t      *testing.T
	node   *pdnode.Node
	engine *testbed.Engine     // nil in a fleet
	sims   []*enginesim.Engine // of a fleet
	url    string
	book   *logBook
	client *http.Client
	cfg    config.Config
	stop   context.CancelFunc
	done   chan error
	before int // goroutines
}

// options shapes a node.
type options struct {
	plugins []config.Plugin
	config  func(c *config.Config)
}

// baseConfig is a configuration with one engine that serves whole requests.
func baseConfig(engineURL string) config.Config {
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.DrainTimeout = config.Duration(10 * time.Second)
	cfg.Timeouts.Policy = config.Duration(time.Minute) // see node.usualPolicyTimeout
	if engineURL != "" {
		e := config.DefaultEngine()
		e.Name, e.URL, e.Role, e.Connector, e.Model = "e0", engineURL, "both", "none", "sim"
		cfg.Engines = []config.Engine{e}
	}
	return cfg
}

// start runs a proxy with plugins until the test's end. The test fails if
// goroutines remain then.
func start(t *testing.T, o options) *node {
	t.Helper()
	n := &node{t: t, book: &logBook{}, done: make(chan error, 1), before: runtime.NumGoroutine()}
	n.engine = &testbed.Engine{Serve: answers}
	n.engine.Start()
	n.cfg = baseConfig(n.engine.URL())
	n.cfg.Plugins = o.plugins
	if o.config != nil {
		o.config(&n.cfg)
	}
	n.run()
	t.Cleanup(n.close)
	return n
}

func (n *node) run() {
	n.t.Helper()
	cfg := n.cfg
	made, err := pdnode.New(&cfg, slog.New(n.book), pdnode.Options{})
	if err != nil {
		n.endEngines()
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.node, n.url, n.stop = made, made.URL(), cancel
	n.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 200}}
	go func() { n.done <- made.Serve(ctx) }()
	n.eventually("the proxy is ready", func() bool {
		resp, err := n.client.Get(made.AdminURL() + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
}

func (n *node) close() {
	n.client.CloseIdleConnections()
	n.stop()
	if err := <-n.done; err != nil {
		n.t.Errorf("the drain was not clean: %v", err)
	}
	n.endEngines()
	n.eventually("the number of goroutines is as before", func() bool { return runtime.NumGoroutine() <= n.before })
	if n.t.Failed() && runtime.NumGoroutine() > n.before {
		stacks := make([]byte, 1<<20)
		n.t.Logf("%s", stacks[:runtime.Stack(stacks, true)])
	}
}

func (n *node) endEngines() {
	if n.engine != nil {
		n.engine.Close()
	}
	for _, e := range n.sims {
		e.Close()
	}
}

// admin reads one admin endpoint.
func (n *node) admin(path string, into any) {
	n.t.Helper()
	if err := n.surface().Get(path, into); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) surface() surface.Admin {
	return surface.Admin{Client: n.client, URL: n.node.AdminURL()}
}

// refuse asserts that a proxy with these plugins does not start, and returns
// the reason.
func refuse(t *testing.T, plugins ...config.Plugin) string {
	t.Helper()
	cfg := baseConfig("http://127.0.0.1:1")
	cfg.Plugins = plugins
	made, err := pdnode.New(&cfg, slog.New(&logBook{}), pdnode.Options{})
	if err == nil {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		made.Serve(ctx)
		t.Fatal("the plugin was accepted")
	}
	return err.Error()
}

// reload changes the configuration of the running proxy.
func (n *node) reload(change func(c *config.Config)) error {
	next := n.cfg
	next.Plugins = append([]config.Plugin{}, n.cfg.Plugins...)
	change(&next)
	err := n.node.Reload(&next)
	if err == nil {
		n.cfg = next
	}
	return err
}

// eventually waits for a condition without a notification: values that the
// proxy gives only on request (metrics, rows, readiness), and those of the
// runtime. It checks every few milliseconds and gives up after patience.
func (n *node) eventually(what string, ok func() bool) {
	n.t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for !ok() {
		select {
		case <-again.C:
		case <-limit.C:
			n.t.Errorf("never: %s", what)
			return
		}
	}
}

// logged waits for a condition on the log. It checks after each new line.
func (n *node) logged(what string, ok func() bool) {
	n.t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for {
		more := n.book.more()
		if ok() {
			return
		}
		select {
		case <-more:
		case <-limit.C:
			n.t.Errorf("never logged: %s", what)
			return
		}
	}
}

// metric sums the series of a metric whose labels contain all of the texts.
func (n *node) metric(name string, labels ...string) float64 {
	n.t.Helper()
	sum, err := n.surface().Metric(name, labels...)
	if err != nil {
		n.t.Fatal(err)
	}
	return sum
}

// policyRows returns the raw answer of GET /v1/policies.
func (n *node) policyRows() (rows []map[string]any) {
	n.t.Helper()
	n.admin("/v1/policies", &rows)
	return rows
}

// row is the row of one plugin in GET /v1/policies.
func (n *node) row(name string) map[string]any {
	for _, r := range n.policyRows() {
		if r["name"] == name {
			return r
		}
	}
	return nil
}

// reloadPlugin is POST /v1/policies/{name}/reload.
func (n *node) reloadPlugin(name string) (status int, body string) {
	n.t.Helper()
	req, err := http.NewRequest(http.MethodPost, n.node.AdminURL()+"/v1/policies/"+name+"/reload", nil)
	if err != nil {
		n.t.Fatal(err)
	}
	testbed.Authorize(n.t, req)
	resp, err := n.client.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data)
}

// reply is an answer as the client received it.
type reply struct {
	status  int
	header  http.Header
	trailer http.Header
	body    string
	err     error
}

// unary is a short completion request.
const unary = `{"model":"sim","prompt":"hello there","max_tokens":3}`

// post sends a completion for which the guest runs a section of its script.
func (n *node) post(section string, header ...string) reply {
	return n.send(n.client, section, unary, header...)
}

func (n *node) send(client *http.Client, section, body string, header ...string) reply {
	req, err := http.NewRequest(http.MethodPost, n.url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	if section != "" {
		req.Header.Set("X-Script", section)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return do(client, req)
}

func do(client *http.Client, req *http.Request) reply {
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, resp.Trailer, string(data), err}
}

// fine asserts that a reply is the engine's own.
func (n *node) fine(r reply) {
	n.t.Helper()
	if r.err != nil || r.status != 200 || r.body != engineAnswer {
		n.t.Errorf("got %d %v: %s", r.status, r.err, r.body)
	}
}

// logBook stores the proxy's log.
type logBook struct {
	mu    sync.Mutex
	lines []string      // message and attributes; guarded by mu
	grown chan struct{} // closed with the next line, nil without a waiter; guarded by mu
}

// Enabled implements slog.Handler.
func (*logBook) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (b *logBook) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool { line += " " + a.Key + "=" + a.Value.String(); return true })
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, line)
	if b.grown != nil {
		close(b.grown)
		b.grown = nil
	}
	return nil
}

// more is closed when there is another line.
func (b *logBook) more() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.grown == nil {
		b.grown = make(chan struct{})
	}
	return b.grown
}

// WithAttrs implements slog.Handler and ignores the attributes.
func (b *logBook) WithAttrs([]slog.Attr) slog.Handler { return b }

// WithGroup implements slog.Handler.
func (b *logBook) WithGroup(string) slog.Handler { return b }

// all returns the log so far.
func (b *logBook) all() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string{}, b.lines...)
}

// entry is one line of the scripted guest.
type entry struct {
	callback, ctx, text string
}

// section returns the guest's lines of a section, in order.
func (b *logBook) section(name string) (entries []entry) {
	for _, line := range b.all() {
		at := strings.Index(line, name+"|")
		if at < 0 || at > 0 && line[at-1] != ' ' && line[at-1] != '"' && line[at-1] != '=' {
			continue
		}
		f := strings.SplitN(line[at:], "|", 4)
		if len(f) == 4 {
			entries = append(entries, entry{f[1], f[2], f[3]})
		}
	}
	return entries
}

// said returns the texts of a section, each as "callback text".
func (b *logBook) said(name string) (texts []string) {
	for _, e := range b.section(name) {
		texts = append(texts, e.callback+" "+e.text)
	}
	return texts
}

// deleted waits until the guest has logged the deletion of a section's stream,
// and returns all its lines.
func (n *node) deleted(section string) []string {
	n.t.Helper()
	var texts []string
	n.logged("the stream of "+section+" is deleted", func() bool {
		texts = n.book.said(section)
		return len(texts) > 0 && strings.HasPrefix(texts[len(texts)-1], "delete ")
	})
	return texts
}
