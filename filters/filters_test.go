package filters_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/filters"
	"github.com/pdproxy/pdproxy/filters/stableprefix"
	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// compiled keeps the machine code of the module for all tests.
var compiled *host.Cache

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if compiled, err = host.NewCache(""); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = compiled.Close(context.Background()) }()
	return m.Run()
}

// counters are the metrics of the plugin.
type counters struct {
	mu     sync.Mutex
	values map[string]*counter // guarded by mu
}

type counter struct {
	mu    sync.Mutex
	value int64 // guarded by mu
}

func (c *counters) Define(_ host.MetricKind, name string) (shared.Metric, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.values == nil {
		c.values = map[string]*counter{}
	}
	if c.values[name] == nil {
		c.values[name] = &counter{}
	}
	return c.values[name], nil
}

func (c *counters) all() map[string]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := map[string]int64{}
	for name, m := range c.values {
		all[name] = int64(m.Value())
	}
	return all
}

func (c *counter) Add(n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value += n
}
func (c *counter) Record(n uint64) { c.Add(int64(n)) }
func (c *counter) Value() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return uint64(c.value)
}

// start starts the module with a configuration.
func start(tb testing.TB, config string, guarded bool, hostMemory int64) (*filter.Chain, *counters, error) {
	tb.Helper()
	metrics := &counters{}
	p := filter.New(filter.Spec{
		Name: "prefix", Wasm: []byte(filters.Module(filters.StablePrefix)), VMs: 1, Config: config, Timeout: 20 * time.Second,
		Load: host.LoadOptions{Guarded: guarded, Cache: compiled, MemoryPages: 1024},
	}, filter.Deps{
		Shared: &shared.Store{}, Budget: budget.New(0, time.Minute, 0), Host: budget.NewHost(hostMemory, func(string) {}),
		Metrics: metrics, Log: slog.New(slog.DiscardHandler),
	})
	if err := p.Start(tb.Context()); err != nil {
		return nil, nil, err
	}
	tb.Cleanup(func() {
		if err := p.Close(context.Background()); err != nil {
			tb.Error(err)
		}
	})
	var chain filter.Chain
	chain.Set([]*filter.Plugin{p}, filter.Limits{})
	return &chain, metrics, nil
}

// pieces is a body that arrives in pieces.
type pieces struct {
	r    io.Reader
	size int
}

func (p pieces) Read(b []byte) (int, error) { return p.r.Read(b[:min(len(b), p.size)]) }
func (pieces) Close() error                 { return nil }

// send passes a body through the chain, as a client of that User-Agent, and returns the body and
// the notes behind it. The client is of the tenant team-a. It announces the length of the body if
// the size of the pieces is even.
func send(tb testing.TB, chain *filter.Chain, path, userAgent, body string, piece int) (got string, notes []string) {
	tb.Helper()
	info := &abi.StreamInfo{}
	r := httptest.NewRequest(http.MethodPost, path, nil)
	r.Body, r.ContentLength = pieces{strings.NewReader(body), piece}, int64(len(body))
	r.Header.Set("User-Agent", userAgent)
	if piece%2 == 0 {
		r.Header.Set("Content-Length", strconv.Itoa(len(body)))
	}
	r = r.WithContext(abi.WithStreamInfo(tb.Context(), info))
	answer := httptest.NewRecorder()
	chain.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		abi.StreamInfoFrom(r.Context()).Update(func(f *abi.StreamFacts) { f.Tenant = "team-a" })
		b, err := io.ReadAll(r.Body)
		if err != nil {
			tb.Error(err)
		}
		got = string(b)
	})).ServeHTTP(answer, r)
	if answer.Code != http.StatusOK {
		tb.Errorf("status %d: %s", answer.Code, answer.Body)
	}
	return got, info.Notes()
}

const (
	claude = "claude-cli/2.1.177 (external, cli)"
	header = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
)

// messages is a body of Claude Code with a conversation of that size.
func messages(size int) string { return messagesWith(header, size) }

func messagesWith(header string, size int) string {
	first := ""
	if header != "" {
		first = `{"type":"text","text":"` + header + `"},`
	}
	return `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat(`write \"x\"\n`, size/12) + `"}],"system":[` + first + `{"type":"text","text":"You are Claude Code."}]}`
}

// chat is the same body after a router has converted it. It has no mark of the agent without the
// header.
func chat(header string, size int) string {
	return `{"model":"m","messages":[{"role":"system","content":"` + header + `Be brief."},{"role":"user","content":"` + strings.Repeat(`write \"x\"\n`, size/12) + `"}]}`
}

// TestModule sends bodies through the module, in small and large pieces.
func TestModule(t *testing.T) {
	const removed = "prefix: billing_header removed 81 bytes"
	tests := []struct {
		name, config, path, userAgent, body, want string // a want that is empty means an unchanged body
		notes                                     []string
	}{
		{name: "Claude Code", path: "/v1/messages?beta=true", userAgent: claude, body: messages(9000), want: messagesWith("", 9000), notes: []string{removed}},
		{name: "count of tokens", path: "/v1/messages/count_tokens", userAgent: claude, body: messages(10), want: messagesWith("", 10), notes: []string{removed}},
		{name: "by the first bytes", path: "/v1/chat/completions", userAgent: "node", body: chat(header, 9000), want: chat("", 9000), notes: []string{removed}},
		{name: "by the first bytes of a short body", path: "/v1/chat/completions", userAgent: "node", body: chat(header, 12), want: chat("", 12), notes: []string{removed}},
		{name: "any client", config: "clients = any", path: "/v1/messages", userAgent: "node", body: messages(9000), want: messagesWith("", 9000), notes: []string{removed}},
		{name: "unknown client", path: "/v1/messages", userAgent: "node", body: messages(9000)},
		{name: "no mark in the first bytes", path: "/v1/chat/completions", userAgent: "node", body: chat("", 9000)},
		{name: "a user writes about the header", path: "/v1/chat/completions", userAgent: "node", body: `{"messages":[{"role":"user","content":"` + header + `"}]}`},
		{name: "completions", path: "/v1/completions", userAgent: claude, body: messages(10)},
		{name: "its tenant", config: "tenants = team-a", path: "/v1/messages", userAgent: claude, body: messages(10), want: messagesWith("", 10), notes: []string{removed}},
		{name: "another tenant", config: "tenants = team-b", path: "/v1/messages", userAgent: claude, body: messages(10)},
		{name: "another model", config: "models = n*", path: "/v1/messages", userAgent: claude, body: messages(10)},
		{name: "no JSON", path: "/v1/messages", userAgent: claude, body: "\x1f\x8b\x08 no JSON"},
		{name: "empty", path: "/v1/messages", userAgent: claude, body: ""},
		{name: "too large", path: "/v1/messages", userAgent: claude, body: messages(9 << 20), notes: []string{"prefix: no rule was used: the body is larger than 8 MiB"}},
	}
	chains := map[string]*filter.Chain{}
	for _, tt := range tests {
		if chains[tt.config] == nil {
			var err error
			if chains[tt.config], _, err = start(t, tt.config, true, 1<<20); err != nil {
				t.Fatal(err)
			}
		}
		want := tt.want
		if want == "" {
			want = tt.body
		}
		for _, piece := range []int{100, 1 << 20, 1<<20 - 1} {
			if len(tt.body) > 1<<20 && piece == 100 {
				continue
			}
			got, notes := send(t, chains[tt.config], tt.path, tt.userAgent, tt.body, piece)
			if got != want || !reflect.DeepEqual(notes, tt.notes) {
				t.Errorf("%s: %d bytes: %.200s, notes %q, want %q", tt.name, len(got), got, notes, tt.notes)
			}
		}
	}
}

// TestModuleCounts: the module counts the requests and the bytes of each rule.
func TestModuleCounts(t *testing.T) {
	chain, metrics, err := start(t, "rules = safe, tool_order", true, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	send(t, chain, "/v1/messages", claude, messages(10), 1<<20)
	send(t, chain, "/v1/messages", claude, `{"system":"`+header+`","tools":[{"name":"b"},{"name":"a"}]}`, 1<<20)
	want := map[string]int64{
		"stable_prefix_billing_header_requests_total": 2, "stable_prefix_billing_header_bytes_total": 162,
		"stable_prefix_tool_order_requests_total": 1, "stable_prefix_tool_order_bytes_total": 24,
	}
	if got := metrics.all(); !reflect.DeepEqual(got, want) {
		t.Errorf("metrics %v, want %v", got, want)
	}
}

// TestNoHostMemory: if the host has no memory for the bytes that an edit adds, the body stays as it
// is.
func TestNoHostMemory(t *testing.T) {
	chain, metrics, err := start(t, "rules = env_date", true, 1)
	if err != nil {
		t.Fatal(err)
	}
	body := `{"system":"Be brief.\nToday's date: 2026-11-30\n","messages":[{"role":"user","content":"hi"}]}`
	got, notes := send(t, chain, "/v1/messages", claude, body, 1<<20)
	if want := "prefix: no rule was used: host_memory of the plugin is used up"; got != body || len(notes) != 1 || notes[0] != want {
		t.Errorf("%s, notes %q", got, notes)
	}
	if got := metrics.all(); len(got) != 0 {
		t.Errorf("metrics %v", got)
	}
}

// TestBadConfiguration: the module does not start with a wrong configuration, and Check reports
// the same error.
func TestBadConfiguration(t *testing.T) {
	_, _, err := start(t, "rules = billing_heder", true, 1<<20)
	if err == nil {
		t.Error("the module starts")
	}
	var wrong *stableprefix.Error
	if err := filters.Check(filters.StablePrefix, "rules = billing_heder"); !errors.As(err, &wrong) || wrong.Name != "billing_heder" {
		t.Errorf("Check: %v", err)
	}
	if filters.Check(filters.StablePrefix, "") != nil || filters.Check("", "x") != nil || filters.Module("x") != "" {
		t.Error("Check or Module of other names")
	}
}

// BenchmarkStablePrefix is the cost of the filter for a request, beside a chain with no filter:
// of a client that is no agent, of chat whose first bytes must be read, and of Claude Code.
func BenchmarkStablePrefix(b *testing.B) {
	const line = `\tif err := build(ctx, \"target\", options.Verbose); err != nil {\n`
	for _, size := range []int{2 << 10, 32 << 10, 256 << 10} {
		code := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat(line, size/len(line)) + `"}],"system":[{"type":"text","text":"` + header + `"},{"type":"text","text":"Be brief."}]}`
		for _, bb := range []struct {
			name, path, userAgent, body string
			filter, guarded             bool
		}{
			{"no filter", "/v1/messages", claude, code, false, true},
			{"another client", "/v1/messages", "node", code, true, true},
			{"first bytes", "/v1/chat/completions", "node", code, true, true},
			{"claude code", "/v1/messages", claude, code, true, true},
			{"claude code trusted", "/v1/messages", claude, code, true, false},
		} {
			b.Run(fmt.Sprintf("%dKB/%s", size>>10, bb.name), func(b *testing.B) {
				chain, _, err := start(b, "", bb.guarded, 1<<20)
				if err != nil {
					b.Fatal(err)
				}
				if !bb.filter {
					chain = &filter.Chain{}
				}
				room := make([]byte, 32<<10)
				handler := chain.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
					for {
						if _, err := r.Body.Read(room); err != nil {
							break
						}
					}
				}))
				body, lines := []byte(bb.body), http.Header{"User-Agent": {bb.userAgent}, "Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(bb.body))}, "X-Request-Id": {"r"}}
				w := httptest.NewRecorder()
				b.ReportAllocs()
				before := usage.ProcessTime()
				for b.Loop() {
					r := &http.Request{Method: http.MethodPost, RequestURI: bb.path, Header: lines, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), ProtoMajor: 1}
					handler.ServeHTTP(w, r)
				}
				b.ReportMetric(float64(usage.ProcessTime()-before)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}
