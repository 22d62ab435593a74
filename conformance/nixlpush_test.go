package conformance

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// A client leaves while prefill computes. Decode holds its blocks until they
// are written, and nothing else would ever free them. So the prefill leg is
// sent again.
func TestPushFreesDecodeThatWaits(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixlPush, fleetOptions{prefill: 1, decode: 1, engine: func(role string, n int, c *enginesim.Config) {
		slow(enginesim.RolePrefill, 5000)(role, n, c)
		c.Nixl.ReclaimAfter = 0 // as in the real engine
	}})
	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan answer, 1)
	go func() { gone <- f.post(ctx, f.url, chatPath, chat(long, 20, true)) }()
	f.eventually("both work", func() bool { return f.decode[0].State().BlocksPinned > 0 && f.busy(f.prefill) })
	leave()
	<-gone
	f.settled()
	f.eventually("the clean-up is counted", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="prefill_again"`) == 1 })
	if s := f.prefill[0].State(); s.Aborted != 1 || s.LeasesExpired != 0 {
		t.Errorf("prefill: %+v", s)
	}
}

// Prefill rejects requests for a while. The blocks of the decode that waits
// for its write are freed when prefill accepts requests again.
func TestPushWaitsForPrefill(t *testing.T) {
	for _, kind := range []string{"429", "503"} {
		t.Run(kind, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMNixlPush, fleetOptions{prefill: 1, decode: 1,
				engine: func(_ string, _ int, c *enginesim.Config) { c.Nixl.ReclaimAfter = 0 },
				config: func(c *config.Config) { c.Retry.Attempts = 1 },
			})
			f.prefill[0].SetFault("1:"+kind, 0, "")
			if a := f.try(chatPath, chat(long, 20, true)); a.status < 400 {
				t.Fatalf("got status %d: %s", a.status, a.body)
			}
			f.prefill[0].SetFault("", 0, "")
			f.settled()
		})
	}
}

// Each rank of prefill is an engine with its own id and port.
func TestPushRanks(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixlPush, fleetOptions{prefill: 1, decode: 1,
		engine: func(role string, _ int, c *enginesim.Config) {
			if role != enginesim.RoleBoth {
				c.Ranks = 3
			}
		},
		config: func(c *config.Config) { c.Engines[0].Ranks, c.Engines[1].Ranks = 3, 3 },
	})
	for n := range 9 {
		body := chat(fmt.Sprintf("%d %s", n, long), 9, n%2 == 0)
		f.right(f.try(chatPath, body), chatPath, body)
	}
	if s := f.decode[0].State(); s.Transfers != 9 {
		t.Errorf("decode: %+v", s)
	}
}

// With wrong sizes of prefill, or another engine's id, the first request fails.
// The values that prefill reports name the mistake.
func TestPushIsConfiguredWrongly(t *testing.T) {
	for name, change := range map[string]func(*config.Engine){
		"engine id": func(e *config.Engine) { e.EngineID += "x" },
		"tp size":   func(e *config.Engine) { e.TPSize = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMNixlPush, fleetOptions{prefill: 1, decode: 1,
				config: func(c *config.Config) { change(&c.Engines[0]) }})
			a := f.try(chatPath, chat("wrong", 5, false))
			if a.status != 502 {
				t.Fatalf("got status %d: %s", a.status, a.body)
			}
			f.settled()
		})
	}
}

// The lease frees the blocks of a push prefill without a decode, and this is
// counted.
func TestPushLeaseIsCounted(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixlPush, fleetOptions{prefill: 1, decode: 1,
		engine: func(_ string, _ int, c *enginesim.Config) { c.Lease = 500 * time.Millisecond },
		config: func(c *config.Config) { c.Retry.Attempts = 1 },
	})
	f.decode[0].SetFault("1:503", 0, "")
	if a := f.try(chatPath, chat(long, 20, true)); a.status != 502 {
		t.Fatalf("got status %d: %s", a.status, a.body)
	}
	f.settled()
	f.eventually("it is counted", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="engine_timeout"`) == 1 })
}

// The engine sets the ids of responses itself, so one engine serves them whole.
func TestPushServesResponsesWhole(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixlPush, fleetOptions{})
	body := `{"model":"sim","input":"served whole","max_output_tokens":9,"ignore_eos":true,"stream":true}`
	a := f.try("/v1/responses", body)
	if f.right(a, "/v1/responses", body); a.header.Get("X-Pdproxy-Flow") != "aggregated" {
		t.Errorf("not aggregated: %v", a.header)
	}
}
