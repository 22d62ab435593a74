package kvevents

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// registry is a proxy that knows only engines that register.
type registry struct {
	t    *testing.T
	node *node.Node
	log  *testbed.Log
}

func startRegistry(t *testing.T, password string) *registry {
	t.Helper()
	if err := install(); err != nil {
		t.Fatal(err)
	}
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Discovery.MoRIIO.Listen = "tcp://127.0.0.1:0"
	if password != "" {
		cfg.Discovery.MoRIIO.PasswordFile = filepath.Join(t.TempDir(), "password")
		if err := os.WriteFile(cfg.Discovery.MoRIIO.PasswordFile, []byte(password), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Health.Interval = config.Duration(100 * time.Millisecond)
	log := new(testbed.Log)
	n, err := node.New(&cfg, slog.New(slog.NewTextHandler(log, nil)), node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return &registry{t, n, log}
}

// run starts a simulated engine that does not register automatically.
func (r *registry) run(c enginesim.Config) *enginesim.Engine {
	r.t.Helper()
	e, err := enginesim.New(c)
	if err == nil {
		err = e.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(e.Close)
	return e
}

// register makes register.py register the engine, until the test ends or quit
// is called.
func (r *registry) register(args ...string) (quit func()) {
	r.t.Helper()
	c := exec.Command(python, append([]string{"testdata/register.py", args[0], "tcp://" + r.node.RegistrationAddr().String()}, args[1:]...)...)
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		r.t.Fatal(err)
	}
	ended := false
	quit = func() {
		if !ended {
			ended = true
			c.Process.Kill()
			c.Wait()
		}
	}
	r.t.Cleanup(quit)
	return quit
}

// engineRow is one row of GET /v1/engines.
type engineRow struct{ Name, Connector, State, Source string }

func (r *registry) engines() (rows []engineRow) {
	r.t.Helper()
	resp, err := http.Get(r.node.AdminURL() + "/v1/engines")
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&rows); err != nil {
		r.t.Fatal(err)
	}
	return rows
}

// state returns the state of an engine, "" when there is none.
func (r *registry) state(name string) string {
	for _, e := range r.engines() {
		if e.Name == name {
			return e.State
		}
	}
	return ""
}

// eventually waits for a condition.
func (r *registry) eventually(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("never: %s: %+v", what, r.engines())
		}
	}
}

// ready waits until two engines of the connector, and no others, are ready.
func (r *registry) ready(connector string) {
	r.t.Helper()
	r.eventually("two engines are ready", func() bool {
		rows := r.engines()
		for _, e := range rows {
			if e.State != "ready" || e.Connector != connector || e.Source != "zmq" {
				return false
			}
		}
		return len(rows) == 2
	})
}

// try returns the text of url's answer to a prompt, "" without a text.
func (r *registry) try(url string) string {
	r.t.Helper()
	resp, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"model":"sim","prompt":"the tide comes in and the tide goes out again and again","max_tokens":12}`))
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	var a struct{ Choices []struct{ Text string } }
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || len(a.Choices) != 1 {
		return ""
	}
	return a.Choices[0].Text
}

// quietAddrs returns addresses that engines can close and open again.
func quietAddrs(t *testing.T, n int) (addrs []string) {
	t.Helper()
	first := testbed.Ports(t, n)
	for i := range n {
		addrs = append(addrs, net.JoinHostPort("127.0.0.1", strconv.Itoa(first+i)))
	}
	return addrs
}

// portOf returns the port of an address, 0 without one.
func portOf(addr string) int {
	_, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	return n
}

// The proxy uses engines that register through libzmq, for every form of their
// connectors. If an engine registers again with other ports, the new registration
// replaces the old one.
func TestMoRIIORegistrations(t *testing.T) {
	for _, tt := range []struct{ connector, mode, prefill, decode string }{
		{enginesim.ConnectorVLLMMoRIIO, "WRITE", "new", "old"},
		{enginesim.ConnectorVLLMMoRIIORead, "READ", "old", "new"},
	} {
		t.Run(tt.connector, func(t *testing.T) {
			r := startRegistry(t, "")
			start := func(role, listen, handshake, notify string) *enginesim.Engine {
				c := enginesim.Config{Connector: tt.connector, Role: role, Listen: listen}
				c.MoRIIO.HandshakePort, c.MoRIIO.NotifyPort = portOf(handshake), portOf(notify)
				return r.run(c)
			}
			at := quietAddrs(t, 8)
			say := func(kind, role string, a []string) func() {
				return r.register(kind, role, a[0], strconv.Itoa(portOf(a[1])), strconv.Itoa(portOf(a[2])), tt.mode)
			}
			p, d := start(enginesim.RolePrefill, at[0], at[1], at[2]), start(enginesim.RoleDecode, at[3], at[4], at[5])
			alone := start(enginesim.RoleBoth, "", "", "")
			quit := say(tt.prefill, "P", at[:3])
			say(tt.decode, "D", at[3:6])
			r.ready(tt.connector)
			want := r.try(alone.URL())
			if got := r.try(r.node.URL()); got != want || want == "" {
				t.Errorf("got text %q, want %q", got, want)
			}
			if s := d.State(); s.Transfers != 1 {
				t.Errorf("decode: %+v", s)
			}
			// A new process at the same address, with other ports and in the other form.
			p.Kill()
			p.Close()
			r.eventually("prefill is seen to be gone", func() bool { return r.state("prefill@"+at[0]) == "unhealthy" })
			quit()
			say(map[string]string{"new": "old", "old": "new"}[tt.prefill], "P", []string{at[0], at[6], at[7]})
			r.eventually("the new registration has replaced the old one", func() bool { return r.state("prefill@"+at[0]) == "down" })
			p = start(enginesim.RolePrefill, at[0], at[6], at[7])
			r.ready(tt.connector)
			if got := r.try(r.node.URL()); got != want {
				t.Errorf("got text %q, want %q", got, want)
			}
			if s := p.State(); s.Requests != 1 {
				t.Errorf("prefill: %+v", s)
			}
		})
	}
}

// The registry refuses an engine with the retired P2pNcclConnector, and still registers others.
func TestRetiredRegistration(t *testing.T) {
	r := startRegistry(t, "")
	at := quietAddrs(t, 2)
	r.register("nccl", "P", at[0], "21001", "0", "")
	r.eventually("the registration is refused", func() bool {
		return strings.Contains(r.log.String(), `connector \"vllm-p2p-nccl\" is retired: vLLM removed P2pNcclConnector in June 2026; use \"vllm-nixl\"`)
	})
	r.register("new", "D", at[1], "6301", "61005", "WRITE")
	r.eventually("the other engine is known", func() bool { return r.state("decode@"+at[1]) != "" })
	if rows := r.engines(); len(rows) != 1 {
		t.Errorf("r.engines() = %+v", rows)
	}
}

// With a password, only engines whose libzmq sends it are registered.
func TestPasswords(t *testing.T) {
	r := startRegistry(t, "hunter2")
	at := quietAddrs(t, 4)
	for i, args := range [][]string{{"hunter3"}, {}, {"hunter2"}} {
		r.register(append([]string{"new", "P", at[i], "6301", "61005", "WRITE"}, args...)...)
	}
	r.eventually("the engine with the password is known", func() bool { return r.state("prefill@"+at[2]) != "" })
	// The engine with the password registers again after the others have tried more than
	// once.
	r.register("new", "D", at[3], "6301", "61005", "WRITE", "hunter2")
	r.eventually("the second engine is known", func() bool { return r.state("decode@"+at[3]) != "" })
	if rows := r.engines(); len(rows) != 2 {
		t.Errorf("r.engines() = %+v", rows)
	}
}
