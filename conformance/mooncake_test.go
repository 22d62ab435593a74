package conformance

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// With several ranks, decode receives the engine core of prefill's leg.
func TestMooncakeRanks(t *testing.T) {
	const ranks = 3
	f := startFleet(t, enginesim.ConnectorVLLMMooncake, fleetOptions{
		engine: func(role string, _ int, c *enginesim.Config) {
			if role != enginesim.RoleBoth {
				c.Ranks = ranks
			}
		},
		config: func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].Ranks = ranks
			}
		},
	})
	for n := range 4 * ranks {
		body := chat(fmt.Sprintf("%d %s", n, long), 9, n%2 == 0)
		f.right(f.try(chatPath, body), chatPath, body)
	}
	f.settled()
	var transfers, expired int64
	for _, e := range append(f.prefill, f.decode...) {
		s := e.State()
		transfers += s.Transfers
		expired += s.LeasesExpired + s.StaleReads
	}
	if transfers < 2*4*ranks || expired != 0 {
		t.Errorf("got %d ended transfers, %d of them expired", transfers, expired)
	}
}

// A decode engine dies before it has read prefill's blocks. Another decode
// frees them by a request that it rejects, so they are not held until prefill's
// timeout.
func TestMooncakeDecodeDiesBeforeItReads(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMMooncake, fleetOptions{
		engine: func(_ string, _ int, c *enginesim.Config) { c.Mooncake.AbortTimeout = 10 * time.Minute },
		config: func(c *config.Config) { c.Retry.MinBudget, c.Circuit.Failures = 1000, 1000 },
	})
	f.decode[0].SetFault("1:reset", 0, "")
	// The engine is chosen at random, and may have died before prefill began.
	f.eventually("decode has freed the blocks of prefill", func() bool {
		body := chat(long, 8, true)
		f.right(f.try(chatPath, body), chatPath, body)
		return f.metric("pdproxy_kv_cleanups_total", `how="refused_decode"`) > 0
	})
	f.settled()
}

// concurrentModes are vLLM's connectors whose decode waits for prefill.
var concurrentModes = []string{enginesim.ConnectorVLLMMoRIIO, enginesim.ConnectorVLLMMooncake}

// A failed prefill cancels the decode leg, which would wait for it until a
// timeout. The client does not wait for the timeout of either leg.
func TestPrefillFailureAbortsDecode(t *testing.T) {
	for _, connector := range concurrentModes {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
				c.Timeouts.FirstByte, c.Timeouts.Prefill = config.Duration(time.Hour), config.Duration(time.Hour)
				c.Retry.Attempts = 1
			}})
			f.prefill[0].SetFault("1:500", 0, "")
			f.client.Timeout = patience
			for _, stream := range []bool{true, false} {
				a := f.try(chatPath, chat(long, 8, stream))
				if a.status != http.StatusBadGateway || !strings.Contains(a.body, "prefill") {
					t.Errorf("got status %d, err %v: %s", a.status, a.err, a.body)
				}
			}
			f.eventually("the decode legs are counted", func() bool {
				return f.metric("pdproxy_legs_cancelled_total", `phase="decode"`) == 2
			})
			f.prefill[0].SetFault("", 0, "")
			f.settled()
		})
	}
}
