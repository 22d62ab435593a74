package conformance

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// cluster is a proxy that provides the cluster storage, and engines that
// register there.
type cluster struct {
	*fleet
	cfg   config.Config
	token string
}

// startCluster starts both. token is the required token, "" for none.
func startCluster(t *testing.T, token string) *cluster {
	t.Helper()
	c := &cluster{token: token, fleet: &fleet{t: t, connector: enginesim.ConnectorTRTLLM, base: measure()}}
	c.alone = startEngine(t, enginesim.Config{Connector: enginesim.ConnectorTRTLLM})
	c.cfg = config.Default()
	c.cfg.Server.Listen, c.cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	c.cfg.Health.Interval = config.Duration(100 * time.Millisecond)
	c.cfg.Server.ExposePlacement = true
	c.cfg.Server.DrainTimeout = config.Duration(5 * time.Second)
	c.cfg.Discovery.TRTLLM.ClusterURI, c.cfg.Discovery.TRTLLM.ClusterName = "http://"+testbed.FreeAddr(t), "blue"
	if token != "" {
		file := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c.cfg.Discovery.TRTLLM.TokenFile = file
	}
	c.startNode(&c.cfg, nil)
	c.prefill = []*enginesim.Engine{c.worker(enginesim.RolePrefill, "")}
	c.decode = []*enginesim.Engine{c.worker(enginesim.RoleDecode, "")}
	c.eventually("both workers are ready", func() bool { return c.ready("") == 2 })
	c.awaitWorkers()
	return c
}

// worker starts an engine that registers.
func (c *cluster) worker(role, listen string) *enginesim.Engine {
	c.t.Helper()
	if listen == "" {
		listen = testbed.FreeAddr(c.t)
	}
	return startEngine(c.t, enginesim.Config{Connector: c.connector, Role: role, Listen: listen, TRTLLM: enginesim.TRTLLMConfig{
		ClusterURI: c.cfg.Discovery.TRTLLM.ClusterURI, ClusterName: "blue", ClusterToken: c.token,
		Heartbeat: 300 * time.Millisecond, InactiveTimeout: 6 * time.Second, DisconnectPoll: 20 * time.Millisecond,
	}})
}

// ready returns the number of ready engines whose names contain a text.
func (c *cluster) ready(name string) (n int) {
	c.t.Helper()
	var rows []struct{ Name, State, Source string }
	c.admin("/v1/engines", &rows)
	for _, r := range rows {
		if r.Source != "trtllm" {
			c.t.Errorf("source %q of %s", r.Source, r.Name)
		}
		if r.State == "ready" && strings.Contains(r.Name, name) {
			n++
		}
	}
	return n
}

// served asserts that a request gets the right answer.
func (c *cluster) served() {
	c.t.Helper()
	body := chat(long, 8, true)
	c.right(c.try(chatPath, body), chatPath, body)
}

// known returns the number of known engines.
func (c *cluster) known() int {
	c.t.Helper()
	var rows []struct{ Name string }
	c.admin("/v1/engines", &rows)
	return len(rows)
}

// Workers that register in the proxy's own storage are used. A worker that is
// closed disappears at once, a worker that dies disappears with its lease, and
// a new worker at the same address replaces it.
func TestTRTLLMWorkersRegister(t *testing.T) {
	for name, token := range map[string]string{"open": "", "with a token": "a-token"} {
		t.Run(name, func(t *testing.T) {
			c := startCluster(t, token)
			c.served()

			c.decode = append(c.decode, c.worker(enginesim.RoleDecode, ""))
			c.eventually("a third has come", func() bool { return c.ready("GENERATION-") == 2 })
			c.decode[1].Close()
			c.eventually("it has left", func() bool { return c.known() == 2 })
			c.served()

			addr := c.prefill[0].Addr()
			c.prefill[0].Kill()
			c.prefill[0].Close()
			c.eventually("the dead worker's lease is over", func() bool { return c.known() == 1 })
			c.prefill[0] = c.worker(enginesim.RolePrefill, addr)
			c.eventually("it is back", func() bool { return c.ready("CONTEXT-"+addr) == 1 })
			c.served()

			c.prefill[0].Kill() // it returns before its lease ends
			c.prefill[0].Close()
			c.prefill[0] = c.worker(enginesim.RolePrefill, addr)
			// A probe of the dead process may fail late, and the engine is then away until
			// the next probe.
			body := chat(long, 8, true)
			var got answer
			c.eventually("it is one engine, and serves", func() bool {
				got = c.try(chatPath, body)
				return got.status == http.StatusOK && c.known() == 2 && c.ready("CONTEXT-"+addr) == 1
			})
			c.right(got, chatPath, body)
			c.settled()
		})
	}
}

// A restarted proxy has its workers again as soon as their heartbeats have failed.
func TestTRTLLMWorkersRegisterAgain(t *testing.T) {
	c := startCluster(t, "")
	c.served()
	if err := c.drain(); err != nil {
		t.Fatal(err)
	}
	second := *c
	second.fleet = &fleet{t: t, connector: c.connector, prefill: c.prefill, decode: c.decode, alone: c.alone, base: c.base, dirs: c.dirs, drained: true}
	c.dirs = nil // the second fleet closes the folders before it counts descriptors
	second.startNode(&second.cfg, nil)
	second.eventually("both workers are ready again", func() bool { return second.ready("") == 2 })
	second.awaitWorkers()
	second.served()
}

// Without the token no worker can register.
func TestTRTLLMStorageWantsItsToken(t *testing.T) {
	c := startCluster(t, "a-token")
	for _, header := range []string{"", "Bearer another"} {
		req, err := http.NewRequest(http.MethodPost, c.cfg.Discovery.TRTLLM.ClusterURI+"/set",
			strings.NewReader(`{"key":"/trtllm-disagg/blue/workers/CONTEXT-10.0.0.1:1-1-1-001","value":"{\"host\":\"10.0.0.1\",\"port\":1,\"role\":0}","ttl":10}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", header)
		resp, err := c.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("got status %d", resp.StatusCode)
		}
	}
	if n := c.known(); n != 2 {
		t.Errorf("got %d engines", n)
	}
}
