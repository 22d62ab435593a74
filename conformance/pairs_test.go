package conformance

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// pairRow is one row of GET /v1/pairs.
type pairRow struct {
	Prefill, Decode, State, Refused string
	LastError                       string `json:"last_error"`
	Failures                        int
}

// TestRefusedPair: an engine whose blocks no engine of the other side can read
// gets no request, while compatible engines are available. Operators see the
// reason.
func TestRefusedPair(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang} {
		t.Run(connector, func(t *testing.T) {
			var log testbed.Log
			f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 2, log: &log, engine: func(role string, n int, c *enginesim.Config) {
				if role == enginesim.RoleDecode && n == 1 {
					c.BlockSize = 8 // the other engines have blocks of 16 tokens
				}
			}})
			for range 6 {
				body := chat("a prompt of some blocks, which all of them have to be read", 4, false)
				f.right(f.try("/v1/chat/completions", body), "/v1/chat/completions", body)
			}
			if n := f.decode[1].State().Requests; n != 0 {
				t.Errorf("the incompatible decode engine got %d requests", n)
			}
			var rows []pairRow
			f.admin("/v1/pairs", &rows)
			if len(rows) != 2 || rows[0].State != "ready" || rows[0].Refused != "" ||
				rows[1].Decode != "d1" || rows[1].State != "broken" || rows[1].LastError != "incompatible" || rows[1].Refused == "" {
				t.Errorf("pairs %+v", rows)
			}
			var engines []struct {
				Facts struct {
					BlockTokens int `json:"block_tokens"`
				}
			}
			if f.admin("/v1/engines", &engines); len(engines) != 3 || engines[0].Facts.BlockTokens != 16 || engines[2].Facts.BlockTokens != 8 {
				t.Errorf("engines %+v", engines)
			}
			if n := f.metric("pdproxy_pair_refused", `prefill="p0"`, `decode="d1"`); n != 1 {
				t.Errorf("pdproxy_pair_refused is %v", n)
			}
			if !strings.Contains(log.String(), "pairs refused") {
				t.Error("the log lacks the refused pairs")
			}
		})
	}
}

// TestRefusedPairOnly: if no pair is left, clients get an error at once, and no
// engine gets a request.
func TestRefusedPairOnly(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1,
		engine: func(role string, _ int, c *enginesim.Config) {
			if role == enginesim.RolePrefill {
				c.BlockSize = 64
			}
		},
		config: func(c *config.Config) { c.Policy.Plan = "always" },
	})
	if a := f.try("/v1/chat/completions", chat("hello", 4, false)); a.status != 503 {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	if p, d := f.prefill[0].State(), f.decode[0].State(); p.Requests+d.Requests != 0 {
		t.Errorf("the engines saw %d and %d requests", p.Requests, d.Requests)
	}
}

// warmFleet is a fleet that warms up its pairs, and whose engines need that
// long to make a connection.
func warmFleet(t *testing.T, connector string, prefill, decode int, connect time.Duration, more func(*config.Config)) *fleet {
	return startFleet(t, connector, fleetOptions{prefill: prefill, decode: decode,
		engine: func(_ string, _ int, c *enginesim.Config) {
			c.ConnectDelay = connect
			c.HandshakeTimeout, c.Lease = patience, max(c.Lease, patience)
			c.TRTLLM.KVTransferTimeout, c.MoRIIO.DeferTimeout, c.MoRIIO.ReceiveTimeout = patience, patience, patience
			c.Mooncake.AbortTimeout = patience
		},
		config: func(c *config.Config) {
			c.Pairs.WarmUp = true
			c.Health.LoadInterval = config.Duration(50 * time.Millisecond)
			if more != nil {
				more(c)
			}
		},
	})
}

// waits returns the number of transfers that have waited for a connection, and
// the number of connections.
func (f *fleet) waits() (waits, peers int64) {
	for _, e := range f.engines() {
		s := e.State()
		waits, peers = waits+s.ConnectionWaits, peers+s.PeerConnections
	}
	return waits, peers
}

// TestWarmPairs: engines need two seconds to make a connection. With warm-up no
// user's request waits for one, so the first request through each pair takes as
// long as the hundredth. The test compares the engines' own counts of waits. Of
// the clock it only checks that the first request took less time than a
// connection.
func TestWarmPairs(t *testing.T) {
	const connect = 2 * time.Second
	eachConnector(t, func(t *testing.T, connector string) {
		f := warmFleet(t, connector, 1, 1, connect, nil)
		f.eventually("all pairs are ready", func() bool {
			var rows []pairRow
			f.admin("/v1/pairs", &rows)
			return len(rows) == 1 && rows[0].State == "ready"
		})
		waited, peers := f.waits()
		if waited == 0 || peers == 0 {
			t.Fatalf("%d connections were made, %d transfers waited", peers, waited)
		}
		if n := f.metric("pdproxy_exchanges_total"); n != 0 {
			t.Errorf("%v exchanges are counted before the first", n)
		}
		f.eventually("the warm-up is counted", func() bool { return f.metric("pdproxy_pair_warmups_total", `outcome="ok"`) == 1 })
		f.settled()
		for n := range 100 {
			body := chat("request "+strings.Repeat("word ", 40)+string(rune('a'+n%26))+string(rune('a'+n/26)), 2, true)
			f.right(f.try("/v1/chat/completions", body), "/v1/chat/completions", body)
			if w, p := f.waits(); w != waited || p != peers {
				t.Fatalf("request %d waited for a connection", n+1)
			}
		}
		if n := f.decode[0].State().Transfers + f.prefill[0].State().Transfers; n < 100 && connector != enginesim.ConnectorVLLMStore {
			t.Errorf("got %d transfers", n)
		}
	})
}

// TestColdPairs runs without warm-up: the first user's request waits while the pair connects.
func TestColdPairs(t *testing.T) {
	f := warmFleet(t, enginesim.ConnectorVLLMNixl, 1, 1, 300*time.Millisecond, func(c *config.Config) { c.Pairs.WarmUp = false })
	body := chat("a prompt of some words", 2, false)
	done := make(chan answer, 1)
	go func() { done <- f.try("/v1/chat/completions", body) }()
	f.eventually("the pair is warming", func() bool {
		var rows []pairRow
		f.admin("/v1/pairs", &rows)
		return len(rows) == 1 && rows[0].State != "unknown"
	})
	f.right(<-done, "/v1/chat/completions", body)
	if waited, peers := f.waits(); waited != 1 || peers != 1 {
		t.Errorf("%d connections were made, %d transfers waited", peers, waited)
	}
}

// TestWarmUpFails: the proxy knows a pair that cannot transfer before a user's
// request uses it. It tries the pair again with growing intervals, and leaves
// nothing on the engines.
func TestWarmUpFails(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1,
			engine: func(role string, _ int, c *enginesim.Config) {
				c.Lease = 2 * time.Second // nothing else can free the blocks
				if role == enginesim.RoleDecode {
					c.Fail = failedTransfer(connector)
				}
			},
			config: func(c *config.Config) {
				c.Pairs.WarmUp = true
				c.Circuit.Failures = 1
			},
		})
		f.eventually("a warm-up has failed", func() bool { return f.metric("pdproxy_pair_warmups_total", `outcome="failed"`) > 0 })
		var rows []pairRow
		if f.admin("/v1/pairs", &rows); len(rows) != 1 || rows[0].State == "ready" ||
			rows[0].Failures == 0 && kindOf(connector) != enginesim.ConnectorSGLang { // there both engines report the failure as their own
			t.Errorf("pairs %+v", rows)
		}
		if n := f.metric("pdproxy_exchanges_total"); n != 0 {
			t.Errorf("%v exchanges are counted before the first", n)
		}
	})
}

// TestStalePair: a prefill engine of SGLang restarts at the same address between two heartbeats of
// decode, so decode keeps the ports of the old process, and each request of the pair waits. If the
// proxy has used the pair, it finds this itself, with a request of its own. Otherwise one user's
// request finds it. Afterwards the proxy tries the pair, and users use it again after decode has
// restarted.
func TestStalePair(t *testing.T) {
	for _, used := range []bool{false, true} {
		name := "found by a user"
		if used {
			name = "found by the proxy"
		}
		t.Run(name, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 2, decode: 1,
				engine: func(role string, _ int, c *enginesim.Config) {
					c.SGLang.HeartbeatInterval = time.Hour
					if role == enginesim.RolePrefill {
						c.BootstrapPort = testbed.Ports(t, 1)
					}
				},
				config: func(c *config.Config) {
					c.Policy.Plan, c.Policy.Place = "always", "round_robin"
					c.Timeouts.Prefill, c.Timeouts.Handshake = config.Duration(2*time.Second), config.Duration(time.Second)
					c.Circuit.OpenFor = config.Duration(200 * time.Millisecond)
				},
			})
			one := func() {
				t.Helper()
				body := chat("a prompt of some words", 2, true)
				f.right(f.try(chatPath, body), chatPath, body)
			}
			state := func(prefill string) string {
				var rows []pairRow
				f.admin("/v1/pairs", &rows)
				for _, r := range rows {
					if r.Prefill == prefill {
						return r.State
					}
				}
				return ""
			}
			bothReady := func() {
				t.Helper()
				f.eventually("both pairs are used", func() bool {
					one()
					return state("p0") == "ready" && state("p1") == "ready"
				})
			}
			if used {
				bothReady()
			} else { // another proxy uses the pair
				meet(t, f.prefill[0], f.decode[0])
			}
			f.settled()
			restart := func(e **enginesim.Engine, name, role string) {
				t.Helper()
				c := enginesim.Config{Connector: f.connector, Role: role, Listen: (*e).Addr(), Lease: time.Minute}
				if role == enginesim.RolePrefill {
					c.BootstrapPort = (*e).BootstrapPort()
				}
				(*e).Kill()
				(*e).Close()
				f.eventually("the probes have found that the engine has ended", func() bool { return f.engineState(name) == "unhealthy" })
				*e = startEngine(t, c)
				f.eventually("the engine is ready again", func() bool { return f.engineState(name) == "ready" })
				f.awaitWorkers()
			}
			restart(&f.prefill[0], "p0", enginesim.RolePrefill)
			failed := func() float64 { return f.metric("pdproxy_pair_warmups_total", `outcome="failed"`) }
			slow, want, trials := f.metric("pdproxy_retries_total"), 1.0, failed()
			if used {
				want = 0
			}
			for range 4 { // each prefill has a turn
				one()
			}
			f.eventually("the pair was tried three times", func() bool { one(); return failed() >= trials+3 })
			if n := f.metric("pdproxy_retries_total") - slow; n != want {
				t.Errorf("%v requests of users waited for the broken pair, want %v", n, want)
			}
			restart(&f.decode[0], "d0", enginesim.RoleDecode)
			bothReady()
		})
	}
}

// meet sends a request through two SGLang engines without a proxy, so that decode knows prefill.
func meet(t *testing.T, prefill, decode *enginesim.Engine) {
	t.Helper()
	body := fmt.Sprintf(`{"model":"sim","prompt":"two engines meet","max_tokens":1,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":7}`, prefill.BootstrapPort())
	var legs sync.WaitGroup
	for _, e := range []*enginesim.Engine{prefill, decode} {
		legs.Go(func() {
			resp, err := http.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			if resp.Body.Close(); resp.StatusCode != http.StatusOK {
				t.Errorf("%s answered with status %d", e.URL(), resp.StatusCode)
			}
		})
	}
	legs.Wait()
}
