package discovery

import (
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// startRegistered starts simulated engines that register in an etcd themselves,
// as separate processes would.
func startRegistered(t *testing.T, s *store, connector, role string) *enginesim.Engine {
	t.Helper()
	c := enginesim.Config{Connector: connector, Role: role, Etcd: s.URL()}
	c.TRTLLM.ClusterName = "blue"
	c.TRTLLM.Heartbeat, c.TRTLLM.InactiveTimeout = 300*time.Millisecond, 6*time.Second
	e, err := enginesim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// TestEnginesRegisterThemselves: TensorRT-LLM's engines register in its layout, the
// others with records. A stopped engine disappears at once. A killed engine disappears
// with its lease. If etcd has lost all data, the engines register again.
func TestEnginesRegisterThemselves(t *testing.T) {
	for connector, names := range map[string][2]string{"trtllm": {"CONTEXT-", "GENERATION-"}, "vllm-nixl": {"prefill@", "decode@"}} {
		t.Run(connector, func(t *testing.T) {
			s := startStore(t)
			p, d := startRegistered(t, s, connector, "prefill"), startRegistered(t, s, connector, "decode")
			n := startNode(t, func(c *config.Discovery) {
				c.TRTLLM.ClusterURI, c.TRTLLM.ClusterName = "etcd://"+s.Addr, "blue"
				c.Etcd.Endpoints = []string{s.URL()}
			})
			are := func(want ...string) {
				t.Helper()
				testbed.Eventually(t, strings.Join(want, " and "), func() bool {
					states := n.states()
					found := 0
					for _, w := range want {
						for name, state := range states {
							if strings.HasPrefix(name, w) && state == "ready" {
								found++
							}
						}
					}
					return found == len(want) && len(states) == len(want)
				})
			}
			are(names[0]+p.Addr(), names[1]+d.Addr())
			n.ask()

			more := startRegistered(t, s, connector, "decode")
			are(names[0]+p.Addr(), names[1]+d.Addr(), names[1]+more.Addr())
			more.Close()
			are(names[0]+p.Addr(), names[1]+d.Addr())

			other := startRegistered(t, s, connector, "decode")
			are(names[0]+p.Addr(), names[1]+d.Addr(), names[1]+other.Addr())
			other.Kill()
			are(names[0]+p.Addr(), names[1]+d.Addr())

			s.Kill()
			s.Empty()
			s.Start()
			testbed.Eventually(t, "both have registered anew", func() bool {
				got, err := s.Client().Get(t.Context(), "/", clientv3.WithPrefix())
				return err == nil && got.Count == 2
			})
			are(names[0]+p.Addr(), names[1]+d.Addr())
			n.ask()
		})
	}
}
