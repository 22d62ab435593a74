package discovery

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// layout is the form of engines in etcd.
type layout struct {
	connector string
	configure func(d *config.Discovery, etcd string)
	// put registers an engine and returns its name.
	put func(s *store, g *gate) (name string, r *registration)
}

func layouts() map[string]layout {
	return map[string]layout{
		"records": {
			connector: config.ConnectorVLLMNixl,
			configure: func(d *config.Discovery, etcd string) { d.Etcd.Endpoints = []string{"http://" + etcd} },
			put: func(s *store, g *gate) (string, *registration) {
				return g.name, s.register(prefix+g.name, fmt.Sprintf(`{"name":%q,"url":%q,"role":%q,"connector":"vllm-nixl"}`, g.name, g.server.URL, g.role), leaseTTL)
			},
		},
		"trtllm": {
			connector: config.ConnectorTRTLLM,
			configure: func(d *config.Discovery, etcd string) {
				d.TRTLLM.ClusterURI, d.TRTLLM.ClusterName = "etcd://"+etcd, "blue"
			},
			put: func(s *store, g *gate) (string, *registration) {
				kind, role := "CONTEXT", 0
				if g.role == config.RoleDecode {
					kind, role = "GENERATION", 1
				}
				id := fmt.Sprintf("%s-%s-1763690000000-4711-%s", kind, g.addr(), g.name)
				return id, s.register("/trtllm-disagg/blue/workers/"+id, fmt.Sprintf(`{"worker_id":%q,"host":"127.0.0.1","port":%s,"role":%d}`, id, port(g), role), leaseTTL)
			},
		},
	}
}

// traffic sends requests until it is stopped. Each must be served.
type traffic struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	served atomic.Int64
}

func (n *node) traffic() *traffic {
	ctx, cancel := context.WithCancel(n.t.Context())
	w := &traffic{stop: cancel}
	for c := range 3 {
		w.wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"tide %d of %d"}],"max_tokens":8,"ignore_eos":true}`, i, c)
				resp, err := http.Post(n.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
				if err != nil {
					n.t.Error(err)
					return
				}
				text, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != 200 {
					n.t.Errorf("got status %d: %s %v", resp.StatusCode, text, err)
					return
				}
				w.served.Add(1)
			}
		})
	}
	n.t.Cleanup(func() { cancel(); w.wg.Wait() })
	return w
}

// more waits until that many further requests were served.
func (w *traffic) more(t *testing.T, requests int64) {
	t.Helper()
	from := w.served.Load()
	testbed.Eventually(t, "requests are served", func() bool { return w.served.Load() >= from+requests })
}

// Requests run while workers start, die and lose their leases, and etcd is
// killed and restarted. Each request is served, no live worker is dropped, and
// a worker without a lease gets no new requests.
func TestTrafficOverLeases(t *testing.T) {
	for name, l := range layouts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startStore(t)
			n := startNodeWith(t, func(c *config.Config) {
				l.configure(&c.Discovery, s.Addr)
				c.Retry.MinBudget = 1000 // however few requests a busy machine serves
			})
			add := func(name, role string) (*gate, string, *registration) {
				g := startGate(t, name, l.connector, role)
				is, r := l.put(s, g)
				n.is(is, "ready")
				return g, is, r
			}
			_, p0, _ := add("p0", "prefill")
			_, p1, _ := add("p1", "prefill")
			_, d0, _ := add("d0", "decode")
			lost, lostName, lostLease := add("d1", "decode")
			dead, deadName, deadLease := add("d2", "decode")
			w := n.traffic()
			w.more(t, 30)

			// A machine fails, and with it the heartbeat.
			dead.die()
			deadLease.die()
			n.is(deadName, "")
			// A heartbeat stops, but the engine does not.
			lostLease.die()
			testbed.Eventually(t, "the lease is over", func() bool {
				got, err := s.Client().Get(t.Context(), lostLease.key)
				return err == nil && got.Count == 0
			})
			n.is(lostName, "")
			asked := lost.asked()

			away, awayName, awayLease := add("d3", "decode")
			s.Kill()
			away.die()
			awayLease.die()
			n.is(awayName, "unhealthy")
			for end := time.Now().Add(2 * leaseTTL * time.Second); time.Now().Before(end); w.more(t, 1) {
				if states := n.states(); states[p0] != "ready" || states[p1] != "ready" || states[d0] != "ready" {
					t.Fatalf("engines are %v", states)
				}
			}
			s.Start()
			n.is(awayName, "")
			_, d4, _ := add("d4", "decode")
			w.more(t, 30)
			w.stop()
			w.wg.Wait()
			if lost.asked() != asked {
				t.Errorf("a worker without a lease got %d requests", lost.asked()-asked)
			}
			for _, live := range []string{p0, p1, d0, d4} {
				if n.log.contains(`msg="engine is draining" engine=` + live) {
					t.Errorf("%s was dropped", live)
				}
			}
			t.Logf("%d requests", w.served.Load())
		})
	}
}
