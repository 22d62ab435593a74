package discovery

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

// source is one way in which engines become known and disappear.
type source struct {
	connector string
	configure func(*config.Config)
	has       func(n *node, engines ...*gate) // makes them the engines
	name      func(*gate) string              // of the engine
}

// sources are all ways, by their names in GET /v1/engines.
func sources() map[string]func(t *testing.T) source {
	return map[string]func(t *testing.T) source{
		"static": fromReload, "admin": fromAdmin, "file": fromFile, "dns": fromDNS, "etcd": fromEtcd,
		"trtllm": fromStorage, "zmq": fromPings, "kubernetes": fromSlices,
	}
}

// own returns the name in the configuration or in the record.
func own(g *gate) string { return g.name }

// spec returns the [[engine]] of an engine.
func (g *gate) spec(connector string) config.Engine {
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role, e.Connector = g.name, g.server.URL, g.role, connector
	return e
}

// difference builds a source's has from a function that adds one engine and
// returns a function that removes it.
func difference(come func(n *node, g *gate) (leave func())) func(n *node, engines ...*gate) {
	there := map[*gate]func(){}
	return func(n *node, engines ...*gate) {
		for g, leave := range there {
			if !slices.Contains(engines, g) {
				leave()
				delete(there, g)
			}
		}
		for _, g := range engines {
			if there[g] == nil {
				there[g] = come(n, g)
			}
		}
	}
}

func fromReload(*testing.T) source {
	return source{connector: config.ConnectorVLLMNixl, name: own, configure: func(*config.Config) {}, has: func(n *node, engines ...*gate) {
		next := *n.cfg
		next.Engines = nil
		for _, g := range engines {
			next.Engines = append(next.Engines, g.spec(config.ConnectorVLLMNixl))
		}
		if err := n.running.Reload(&next); err != nil {
			n.t.Fatal(err)
		}
	}}
}

func fromAdmin(*testing.T) source {
	call := func(n *node, method, path, body string) {
		n.t.Helper()
		req, err := http.NewRequestWithContext(n.t.Context(), method, n.adm+path, strings.NewReader(body))
		if err != nil {
			n.t.Fatal(err)
		}
		testbed.Authorize(n.t, req)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			n.t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode/100 != 2 {
			n.t.Fatalf("%s %s: status %d", method, path, resp.StatusCode)
		}
	}
	return source{connector: config.ConnectorVLLMNixl, name: own, configure: func(*config.Config) {}, has: difference(func(n *node, g *gate) func() {
		call(n, "POST", "/v1/engines", fmt.Sprintf(`{"name":%q,"url":%q,"role":%q,"connector":"vllm-nixl"}`, g.name, g.server.URL, g.role))
		return func() { call(n, "DELETE", "/v1/engines/"+g.name+"?drain=5m", "") }
	})}
}

func fromFile(t *testing.T) source {
	path := filepath.Join(t.TempDir(), "engines.json")
	return source{connector: config.ConnectorVLLMNixl, name: own, configure: func(c *config.Config) { c.Discovery.File.Path = path }, has: func(n *node, engines ...*gate) {
		list := []map[string]string{}
		for _, g := range engines {
			list = append(list, map[string]string{"name": g.name, "url": g.server.URL, "role": g.role, "connector": config.ConnectorVLLMNixl})
		}
		text, err := json.Marshal(list)
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			n.t.Fatal(err)
		}
	}}
}

// fromDNS is a name server with SRV records.
func fromDNS(t *testing.T) source {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	records := map[string][]uint16{} // the ports behind a name
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if err := m.Unpack(buf[:n]); err != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			a := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true}, Questions: m.Questions}
			mu.Lock()
			for _, port := range records[q.Name.String()] {
				a.Answers = append(a.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET},
					Body:   &dnsmessage.SRVResource{Port: port, Target: dnsmessage.MustNewName("localhost.")},
				})
			}
			mu.Unlock()
			if out, err := a.Pack(); err == nil {
				_, _ = conn.WriteTo(out, from) // a lost answer is requested again
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	return source{
		connector: config.ConnectorVLLMNixl,
		name:      func(g *gate) string { return g.role + "@localhost:" + port(g) },
		configure: func(c *config.Config) {
			c.Discovery.DNS.Server, c.Discovery.DNS.Interval = conn.LocalAddr().String(), config.Duration(100*time.Millisecond)
			for _, role := range []string{config.RolePrefill, config.RoleDecode} {
				e := config.DefaultEngine()
				e.Name, e.URL, e.Role, e.Connector = role, "http://_"+role+".llm.test", role, config.ConnectorVLLMNixl
				c.Discovery.DNS.Engines = append(c.Discovery.DNS.Engines, e)
			}
		},
		has: func(n *node, engines ...*gate) {
			mu.Lock()
			defer mu.Unlock()
			clear(records)
			for _, g := range engines {
				number, err := strconv.ParseUint(port(g), 10, 16)
				if err != nil {
					n.t.Fatal(err)
				}
				name := "_" + g.role + ".llm.test."
				records[name] = append(records[name], uint16(number))
			}
		},
	}
}

// port returns the port of an engine's API.
func port(g *gate) string {
	_, port, _ := net.SplitHostPort(g.addr())
	return port
}

// fromEtcd uses records; the test stops renewing their leases.
func fromEtcd(t *testing.T) source {
	s := startStore(t)
	return source{
		connector: config.ConnectorVLLMNixl, name: own,
		configure: func(c *config.Config) { c.Discovery.Etcd.Endpoints = []string{s.URL()} },
		has: difference(func(_ *node, g *gate) func() {
			return s.register(prefix+g.name, fmt.Sprintf(`{"name":%q,"url":%q,"role":%q,"connector":"vllm-nixl"}`, g.name, g.server.URL, g.role), leaseTTL).die
		}),
	}
}

// fromStorage uses TensorRT-LLM's cluster storage, served by the proxy; the
// workers' keys expire.
func fromStorage(t *testing.T) source {
	address := testbed.FreeAddr(t)
	set := func(n *node, g *gate, ttl int) {
		n.t.Helper()
		role := 0
		if g.role == config.RoleDecode {
			role = 1
		}
		value := fmt.Sprintf(`{"worker_id":%q,"host":"127.0.0.1","port":%s,"role":%d}`, g.name, port(g), role)
		body, err := json.Marshal(map[string]any{"key": "/trtllm-disagg/blue/workers/" + g.name, "value": value, "ttl": ttl, "overwrite_if_exists": true})
		if err != nil {
			n.t.Fatal(err)
		}
		resp, err := http.Post("http://"+address+"/set", "application/json", strings.NewReader(string(body)))
		if err != nil {
			n.t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			n.t.Fatalf("got status %d", resp.StatusCode)
		}
	}
	return source{
		connector: config.ConnectorTRTLLM, name: own,
		configure: func(c *config.Config) {
			c.Discovery.TRTLLM.ClusterURI, c.Discovery.TRTLLM.ClusterName = "http://"+address, "blue"
		},
		has: difference(func(n *node, g *gate) func() {
			set(n, g, 600)
			return func() { set(n, g, 1) }
		}),
	}
}

// fromPings uses MoRI-IO's registrations over ZeroMQ; the test stops sending them.
func fromPings(t *testing.T) source {
	listen := "tcp://" + testbed.FreeAddr(t)
	return source{
		connector: config.ConnectorVLLMMoRIIO,
		name:      func(g *gate) string { return g.role + "@" + g.addr() },
		configure: func(c *config.Config) { c.Discovery.MoRIIO.Listen = listen },
		has: difference(func(n *node, g *gate) func() {
			c, err := zmtp.Dial(context.Background(), "tcp://"+n.running.RegistrationAddr().String(),
				zmtp.Options{Socket: zmtp.Dealer, MaxMessage: 1 << 10, MaxFrames: 1, ReadBuffer: 1 << 10})
			if err != nil {
				n.t.Fatal(err)
			}
			stop, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				defer c.Close()
				tick := time.NewTicker(time.Second)
				defer tick.Stop()
				for err := error(nil); err == nil; {
					err = c.Send(ping(g))
					select {
					case <-stop:
						return
					case <-tick.C:
					}
				}
			}()
			leave := sync.OnceFunc(func() { close(stop); <-done })
			t.Cleanup(leave)
			return leave
		}),
	}
}

// ping is an engine's registration.
func ping(g *gate) []byte {
	kind := "P"
	if g.role == config.RoleDecode {
		kind = "D"
	}
	b := msgp.AppendMapHeader(nil, 6)
	for _, member := range [][2]string{{"type", kind}, {"http_address", g.addr()}, {"zmq_address", g.engine.KVAddress()}, {"transfer_mode", "WRITE"}} {
		b = msgp.AppendString(msgp.AppendString(b, member[0]), member[1])
	}
	for _, size := range []string{"dp_size", "tp_size"} {
		b = msgp.AppendInt(msgp.AppendString(b, size), 1)
	}
	return b
}

// fromSlices uses endpoints that terminate.
func fromSlices(t *testing.T) source {
	c := newCluster(t)
	return source{
		connector: config.ConnectorVLLMNixl, name: func(g *gate) string { return podName(g.name) },
		configure: func(cfg *config.Config) { c.configure(&cfg.Discovery) },
		has: difference(func(_ *node, g *gate) func() {
			p := c.pod(g.name, g.role, g.addr())
			return func() { p.becomes(false, true, true) }
		}),
	}
}
