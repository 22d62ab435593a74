package conformance

import (
	"context"
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

// moriioModes are the connectors of the two modes of MoRI-IO.
var moriioModes = []string{enginesim.ConnectorVLLMMoRIIO, enginesim.ConnectorVLLMMoRIIORead}

// startRegistered starts a proxy without configured engines, and engines that
// register with it: one prefill in the newer form, and one decode in the older.
func startRegistered(t *testing.T, connector string, ranks int) *fleet {
	t.Helper()
	f := &fleet{t: t, connector: connector, base: measure()}
	f.alone = startEngine(t, enginesim.Config{Connector: connector})
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.ExposePlacement = true
	cfg.Health.Interval, cfg.Health.Timeout = config.Duration(100*time.Millisecond), config.Duration(2*time.Second)
	cfg.Discovery.MoRIIO.Listen = "tcp://127.0.0.1:0"
	f.startNode(&cfg, nil)
	f.prefill = append(f.prefill, f.register(enginesim.RolePrefill, ranks, ""))
	f.decode = append(f.decode, f.register(enginesim.RoleDecode, ranks, ""))
	f.eventually("both engines are ready", func() bool { return f.ready() == 2 })
	f.awaitWorkers()
	return f
}

// register starts an engine that registers with the proxy.
func (f *fleet) register(role string, ranks int, listen string) *enginesim.Engine {
	f.t.Helper()
	ports := testbed.Ports(f.t, 2*ranks)
	return startEngine(f.t, enginesim.Config{
		Connector: f.connector, Role: role, Ranks: ranks, Listen: listen,
		MoRIIO: enginesim.MoRIIOConfig{
			HandshakePort: ports, NotifyPort: ports + ranks,
			Register: "tcp://" + f.front.RegistrationAddr().String(), OldRegistration: role == enginesim.RoleDecode,
			PingInterval: 50 * time.Millisecond, DeferTimeout: 2 * time.Second, ReceiveTimeout: 2 * time.Second,
		},
	})
}

// ready returns the number of ready engines.
func (f *fleet) ready() int {
	var rows []struct{ State, Source string }
	f.admin("/v1/engines", &rows)
	n := 0
	for _, r := range rows {
		if r.State == "ready" && r.Source == "zmq" {
			n++
		}
	}
	return n
}

// Registered engines are used according to their registration, in both modes
// and both forms. With several ranks decode finds the rank of prefill that has
// the KV.
func TestRegisteredEnginesServe(t *testing.T) {
	for _, connector := range moriioModes {
		for _, ranks := range []int{1, 3} {
			t.Run(fmt.Sprint(connector, " ", ranks), func(t *testing.T) {
				f := startRegistered(t, connector, ranks)
				for n := range 4 * ranks {
					body := chat(fmt.Sprintf("%d %s", n, long), 9, n%2 == 0)
					f.right(f.try(chatPath, body), chatPath, body)
				}
				if s := f.decode[0].State(); s.Transfers != int64(4*ranks) || s.LeasesExpired+s.StaleReads > 0 {
					t.Errorf("decode: %+v", s)
				}
				f.settled()
			})
		}
	}
}

// Registrations that arrive every few milliseconds count as one engine, also
// after the engine has restarted with other ports.
func TestRegistrationsAreOneEngine(t *testing.T) {
	f := startRegistered(t, enginesim.ConnectorVLLMMoRIIO, 1)
	body := chat(long, 9, true)
	f.right(f.try(chatPath, body), chatPath, body)
	for _, e := range []*[]*enginesim.Engine{&f.prefill, &f.decode} {
		old := (*e)[0]
		role := enginesim.RolePrefill
		if old == f.decode[0] {
			role = enginesim.RoleDecode
		}
		old.Kill()
		old.Close()
		(*e)[0] = f.register(role, 1, old.Addr())
		if (*e)[0].KVAddress() == old.KVAddress() {
			t.Fatal("the new engine has the old one's ports")
		}
		f.eventually("requests are served again", func() bool { return f.ready() == 2 && f.try(chatPath, body).status == http.StatusOK })
		f.right(f.try(chatPath, body), chatPath, body)
	}
	f.eventually("each address is one engine", func() bool {
		var rows []struct{ Name string }
		f.admin("/v1/engines", &rows)
		return len(rows) == 2
	})
}

// Clients of the chat API may set max_completion_tokens, or no limit.
func TestChatWithoutMaxTokens(t *testing.T) {
	for _, connector := range moriioModes {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{})
			for _, limit := range []string{"", `,"max_completion_tokens":1`, `,"max_completion_tokens":7`, `,"max_tokens":1`} {
				for _, stream := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
					body := `{"model":"sim","messages":[{"role":"user","content":"how long"}]` + limit + stream + `}`
					f.right(f.try(chatPath, body), chatPath, body)
				}
			}
			f.settled()
		})
	}
}

// The proxy reports durations, not times of day.
func TestReportedTimesAreElapsed(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMMoRIIO, fleetOptions{prefill: 1, decode: 1})
	f.prefill[0].SetFault("1:500", 0, "")
	f.try(chatPath, chat(long, 5, false))
	f.prefill[0].SetFault("", 0, "")
	body := chat(long, 5, false)
	began := time.Now()
	f.right(f.try(chatPath, body), chatPath, body)
	for _, name := range []string{"pdproxy_whole_answer_seconds_sum", "pdproxy_leg_duration_seconds_sum", "pdproxy_exchange_duration_seconds_sum"} {
		if v := f.metric(name); v <= 0 || v > time.Since(began).Seconds()+patience.Seconds() {
			t.Errorf("%s is %v s", name, v)
		}
	}
}

// 512 simultaneous requests, with every twentieth notification lost: all
// requests end, and the engines hold nothing afterwards.
func TestLostNotifications(t *testing.T) {
	for connector, held := range map[string]time.Duration{
		// In WRITE mode decode waits that long for a lost notification, and
		// then fails, twice for some requests. In READ mode prefill frees the blocks
		// after that time. A later transfer would carry invalid data, so the time must
		// be longer than any transfer waits on a busy machine.
		enginesim.ConnectorVLLMMoRIIO: 10 * time.Second, enginesim.ConnectorVLLMMoRIIORead: patience - 2*time.Second,
	} {
		t.Run(connector, func(t *testing.T) {
			lossy := func(role string, _ int, c *enginesim.Config) {
				if role != enginesim.RoleBoth {
					c.Fail = "0.05:lost-notification"
					c.MoRIIO.DeferTimeout, c.MoRIIO.ReceiveTimeout = held, held
					c.MaxRunning, c.KVBlocks = 512, 8192
				}
			}
			f := startFleet(t, connector, fleetOptions{engine: lossy, config: func(c *config.Config) {
				c.Retry.MinBudget, c.Retry.Budget = 1024, 1
				c.Circuit.Failures = 1000
			}})
			f.client.Transport.(*spread).MaxIdleConnsPerHost = 512
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			const concurrent = 512
			var wg sync.WaitGroup
			bodies, answers := make([]string, concurrent), make([]answer, concurrent)
			for n := range concurrent {
				bodies[n] = chat(fmt.Sprintf("request %d %s", n, strings.Repeat("on and on ", 10)), 4, n%2 == 0)
				wg.Go(func() { answers[n] = f.post(ctx, f.url, chatPath, bodies[n]) })
			}
			wg.Wait()
			right := 0
			for n, a := range answers {
				switch {
				case a.err != nil:
					t.Errorf("request %d did not end: %v", n, a.err)
				case a.status >= 500 || a.errors > 0:
				case a.status != http.StatusOK:
					t.Errorf("request %d: status %d", n, a.status)
				default:
					f.right(a, chatPath, bodies[n])
					right++
				}
			}
			if right < concurrent/2 { // all but one, unless transfers on the busy machine take as long as the wait
				t.Errorf("%d of %d answers are right", right, concurrent)
			}
			f.settled()
			for _, p := range f.prefill {
				if s := p.State(); s.LeasesExpired == 0 || s.StaleReads > 0 {
					t.Errorf("prefill: %d leases expired, %d stale reads", s.LeasesExpired, s.StaleReads)
				}
			}
		})
	}
}
