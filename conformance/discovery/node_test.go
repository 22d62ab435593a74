package discovery

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// node is a proxy without configured engines.
type node struct {
	t       *testing.T
	url     string
	adm     string
	log     *logs
	cfg     *config.Config
	running *pdnode.Node
}

type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) contains(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), text)
}

func startNode(t *testing.T, d func(*config.Discovery)) *node {
	t.Helper()
	return startNodeWith(t, func(c *config.Config) { d(&c.Discovery) })
}

func startNodeWith(t *testing.T, configure func(*config.Config)) *node {
	t.Helper()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.ExposePlacement = true
	cfg.Health.Interval = config.Duration(100 * time.Millisecond)
	cfg.Health.Timeout = config.Duration(20 * time.Second) // a live engine may be slow on a busy machine; a dead one refuses connections
	configure(&cfg)
	if problems := cfg.Validate(); len(problems) > 0 {
		t.Fatal(problems)
	}
	n := &node{t: t, log: &logs{}, cfg: &cfg}
	running, err := pdnode.New(&cfg, slog.New(slog.NewTextHandler(n.log, nil)), pdnode.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n.running = running
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- running.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the drain was not clean: %v", err)
		}
		if t.Failed() {
			t.Log(n.log.text.String())
		}
	})
	n.url, n.adm = running.URL(), running.AdminURL()
	return n
}

// row is one row of GET /v1/engines.
type row struct {
	Name, State, Role, Source string
	Labels                    map[string]string
}

func (n *node) rows() (rows []row) {
	n.t.Helper()
	resp, err := http.Get(n.adm + "/v1/engines")
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&rows); err != nil {
		n.t.Fatal(err)
	}
	return rows
}

// states maps the engines to their states. Of two engines with one name, the
// newer counts.
func (n *node) states() map[string]string {
	n.t.Helper()
	states := map[string]string{}
	for _, r := range n.rows() {
		states[r.Name] = r.State
	}
	return states
}

// from asserts the source of an engine.
func (n *node) from(name, source string) {
	n.t.Helper()
	for _, r := range n.rows() {
		if r.Name == name && r.Source != source {
			n.t.Errorf("%s is of source %q", name, r.Source)
		}
	}
}

// role returns the role of the newest engine of a name, "" if there is none.
func (n *node) role(name string) (role string) {
	n.t.Helper()
	for _, r := range n.rows() {
		if r.Name == name {
			role = r.Role
		}
	}
	return role
}

// is waits until an engine has a state; "" means that it is gone.
func (n *node) is(name, state string) {
	n.t.Helper()
	testbed.Eventually(n.t, name+" is "+state, func() bool { return n.states()[name] == state })
}

const prompt = `{"model":"sim","messages":[{"role":"user","content":"the tide comes in"}],"max_tokens":%d,"ignore_eos":true,"stream":%t}`

// ask sends one request and returns the engines that served it.
func (n *node) ask() (prefill, decode string) {
	n.t.Helper()
	resp := n.open(8, false)
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
		n.t.Fatalf("got status %d: %s %v", resp.StatusCode, body, err)
	}
	return resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode")
}

// open sends a request and returns when the answer begins.
func (n *node) open(tokens int, stream bool) *http.Response {
	n.t.Helper()
	resp, err := http.Post(n.url+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(prompt, tokens, stream)))
	if err != nil {
		n.t.Fatal(err)
	}
	return resp
}

// whole reads the rest of a stream and asserts that it is complete.
func (n *node) whole(resp *http.Response, tokens int) {
	n.t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if events := bytes.Count(body, []byte(`"content":`)); err != nil || events < tokens || !bytes.Contains(body, []byte("data: [DONE]")) || bytes.Contains(body, []byte(`"error"`)) {
		n.t.Errorf("the stream broke after %d events: %v", events, err)
	}
}

// startEngine starts a simulated engine with that time per token.
func startEngine(t *testing.T, connector, role string, token time.Duration) *enginesim.Engine {
	t.Helper()
	return startEngineAt(t, "127.0.0.1", connector, role, token)
}

func startEngineAt(t *testing.T, host, connector, role string, token time.Duration) *enginesim.Engine {
	t.Helper()
	return startEngineOn(t, net.JoinHostPort(host, "0"), connector, role, token)
}

// startEngineOn starts a simulated engine on an address.
func startEngineOn(t *testing.T, listen, connector, role string, token time.Duration) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.New(enginesim.Config{
		Connector: connector, Role: role, Listen: listen, DecodeUsPerToken: int(token.Microseconds()),
		Lease: 5 * time.Minute, // longer than a test holds blocks on a busy machine
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}
