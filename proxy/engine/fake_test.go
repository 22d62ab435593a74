package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// fakeProtocol is a connector for tests. GET /facts returns the facts as lines "model a",
// "epoch 7", "page 16", "boot 9000", "dp 2", "events 5557".
type fakeProtocol struct {
	flow      abi.Flow
	health    string
	bootstrap bool
	oneMode   bool // an instance of role both accepts no leg of a pair
	registry  string
	probed    bool // every probe also requests the registry
}

func (f fakeProtocol) Flow() abi.Flow { return f.flow }

func (f fakeProtocol) HealthPath(role abi.Role) (string, bool) {
	return f.health, f.bootstrap && role == abi.RolePrefill
}

func (fakeProtocol) FactPaths(abi.Role) []string { return []string{"/facts"} }

func (fakeProtocol) Tokenizes() tokens.Dialect { return tokens.NoTokenizer }

func (fakeProtocol) Loads() []LoadRoute { return nil }

func (f fakeProtocol) RegistryPath(role abi.Role) string {
	if role == abi.RolePrefill {
		return f.registry
	}
	return ""
}

func (f fakeProtocol) RegistryProbed() bool { return f.probed }

func (fakeProtocol) ReadFacts(f *Facts, _ string, status int, body []byte) error {
	if status == 404 {
		return nil
	}
	if status != 200 {
		return fmt.Errorf("read facts: status %d", status)
	}
	for line := range strings.Lines(string(body)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, _ := strconv.Atoi(value)
		switch key {
		case "model":
			f.Models = append(f.Models, value)
		case "epoch":
			f.Epoch = value
		case "page":
			f.PageSize = n
		case "boot":
			f.BootstrapPort = n
		case "dp":
			f.DPSize = n
		case "events":
			f.KVEvents.Ranks = append(f.KVEvents.Ranks, KVEndpoints{Events: KVEndpoint(value)})
		case "bad":
			return errors.New("read facts: bad")
		}
	}
	return nil
}

func (p fakeProtocol) BothPairs() bool { return !p.oneMode }

func (fakeProtocol) Compatible(p, d *Facts) error {
	if p.PageSize != 0 && d.PageSize != 0 && p.PageSize != d.PageSize {
		return errors.New("page sizes differ")
	}
	return nil
}

// fakeEngines is a RoundTripper that answers for every engine by host:port.
type fakeEngines struct {
	mu      sync.Mutex
	down    map[string]bool
	dialing map[string]error // error of a dial on this host; guarded by mu
	facts   map[string]string
	code    map[string]int // status of /health and /live by host:port, of /facts by host:port/facts
	calls   map[string]int // number of calls by host:port + path
	auth    string         // the last Authorization header
	delay   map[string]time.Duration
	stall   time.Duration // the time for which no goroutine of the process runs, so that a time-out fires later
}

func newFakeEngines() *fakeEngines {
	return &fakeEngines{down: map[string]bool{}, dialing: map[string]error{}, facts: map[string]string{}, code: map[string]int{}, delay: map[string]time.Duration{}, calls: map[string]int{}}
}

func (f *fakeEngines) RoundTrip(r *http.Request) (*http.Response, error) {
	f.mu.Lock()
	host := r.URL.Host
	f.calls[host+r.URL.Path]++
	f.auth = r.Header.Get("Authorization")
	down, facts, code, factsCode, delay, stall := f.down[host], f.facts[host], f.code[host], f.code[host+"/facts"], f.delay[host], f.stall
	f.mu.Unlock()
	if time.Sleep(stall); r.Context().Err() != nil {
		return nil, r.Context().Err()
	}
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	if err := f.dialing[host]; err != nil {
		return nil, err
	}
	if down {
		return nil, errors.New("connection refused")
	}
	if code == 0 {
		code = 200
	}
	body := ""
	if strings.HasSuffix(r.URL.Path, "/facts") {
		body, code = facts, cmp.Or(factsCode, 200)
	}
	return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: r}, nil
}

func (f *fakeEngines) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeEngines) count(key string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[key]
}

// fakeClient is an upstream.Client that only counts calls.
type fakeClient struct {
	mu      sync.Mutex
	closed  int
	evicted int
	moved   int // calls of EvictIdle for Moving
	asked   int // calls of Withdraw
}

func (*fakeClient) Do(context.Context, *upstream.Request) (*upstream.Response, error) {
	return nil, errors.New("not in this test")
}

func (c *fakeClient) Withdraw() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
}

// withdrawals returns how often Withdraw was called since the last call of withdrawals.
func (c *fakeClient) withdrawals() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.asked
	c.asked = 0
	return n
}

func (c *fakeClient) EvictIdle(engine any, _ time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, moving := engine.(*Moving); moving {
		c.moved++
		return
	}
	c.evicted++
}

// evictions returns how often the calls were checked for eviction since the last call of
// evictions.
func (c *fakeClient) evictions() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.evicted
	c.evicted = 0
	return n
}

func (c *fakeClient) CloseIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed++
}

func (*fakeClient) Stats() upstream.Stats { return upstream.Stats{} }

func (c *fakeClient) closes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// fleet is a registry over fake engines. It records the calls of the registry's hooks.
type fleet struct {
	*Registry
	engines *fakeEngines
	mu      sync.Mutex
	heard   []string
	lines   strings.Builder // the lines of the log
}

// Write adds a line to the log.
func (f *fleet) Write(line []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lines.Write(line)
}

// circuitOf3 is the configuration of the circuits of a fleet.
var circuitOf3 = config.Circuit{Failures: 3, OpenFor: config.Duration(10 * time.Second)}

// logged returns the log so far.
func (f *fleet) logged() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lines.String()
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{engines: newFakeEngines()}
	hear := func(i *Instance, what string) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.heard = append(f.heard, i.Spec.Name+" "+what)
	}
	f.Registry = New(Options{
		Log:     slog.New(slog.NewTextHandler(f, nil)),
		Health:  config.Health{Interval: config.Duration(2 * time.Second), Timeout: config.Duration(time.Second), UnhealthyAfter: 3, HealthyAfter: 2},
		Circuit: circuitOf3,
		Protocols: func(name string) (Protocol, bool) {
			switch name {
			case "fake", "vllm-moriio", "vllm-moriio-read":
				return fakeProtocol{flow: abi.FlowPrefillFirst, health: "/live"}, true
			case "epoch": // the health answer also has the facts
				return fakeProtocol{flow: abi.FlowPrefillFirst, health: "/facts"}, true
			case "registry":
				return fakeProtocol{flow: abi.FlowConcurrent, health: "/health", bootstrap: true, registry: "/registry/facts"}, true
			case "boot":
				return fakeProtocol{flow: abi.FlowConcurrent, health: "/health", bootstrap: true}, true
			case "probed":
				return fakeProtocol{flow: abi.FlowConcurrent, health: "/live", registry: "/facts", probed: true}, true
			case "none":
				return fakeProtocol{flow: abi.FlowAggregated, health: "/live"}, true
			}
			return nil, false
		},
		NewClient: func(spec config.Engine) (upstream.Client, error) {
			if strings.Contains(spec.URL, "noclient") {
				return nil, errors.New("no client")
			}
			return new(fakeClient), nil
		},
		NewProbe: func(spec config.Engine) (http.RoundTripper, error) {
			if strings.Contains(spec.URL, "noprobe") {
				return nil, errors.New("no probe")
			}
			return f.engines, nil
		},
		APIKey: func(spec config.Engine) (string, error) {
			if spec.APIKeyFile == "missing" {
				return "", errors.New("read key: no such file")
			}
			return spec.APIKeyFile, nil
		},
		OnState:   func(i *Instance, s State) { hear(i, s.String()) },
		OnRestart: func(i *Instance) { hear(i, "restarted") },
		OnGone:    func(i *Instance) { hear(i, "gone") },
	})
	return f
}

// said returns the recorded calls of the hooks since the last call of said.
func (f *fleet) said() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := strings.Join(f.heard, ", ")
	f.heard = nil
	return s
}

// start runs the registry until the test ends. The test must run in a synctest bubble.
func (f *fleet) start(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
}

// spec returns an engine with the address name:80 that serves model m.
func (f *fleet) spec(name, role, connector string) config.Engine {
	f.engines.set(func() {
		if f.engines.facts[name+":80"] == "" {
			f.engines.facts[name+":80"] = "model m\n"
		}
	})
	return config.Engine{Name: name, URL: "http://" + name + ":80", Role: role, Connector: connector, Ranks: 1}
}

func (f *fleet) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fleet) get(t *testing.T, name string) *Instance {
	t.Helper()
	i := f.Snapshot().Instance(name)
	if i == nil {
		t.Fatalf("no instance %q", name)
	}
	return i
}
