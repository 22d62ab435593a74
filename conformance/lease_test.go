package conformance

import (
	"context"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// leasing are the connectors whose prefill keeps KV for a time that the proxy knows.
var leasing = []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMMoRIIORead}

// leased is a fleet whose prefill keeps computed KV for that time; the proxy
// knows the time.
func leased(t *testing.T, connector string, lease time.Duration, edit func(c *config.Config)) *fleet {
	return startFleet(t, connector, fleetOptions{prefill: 1, decode: 1,
		engine: func(role string, n int, c *enginesim.Config) {
			c.Lease, c.MoRIIO.DeferTimeout = lease, lease
			slow(enginesim.RoleDecode, 20000)(role, n, c)
		},
		config: func(c *config.Config) {
			c.Retry.Attempts, c.Retry.MinBudget = 100, 100
			for i := range c.Engines {
				if c.Engines[i].Role == config.RolePrefill {
					c.Engines[i].KVLeaseDuration = config.Duration(lease)
				}
			}
			edit(c)
		},
	})
}

// A decode leg that waits in the queue until prefill may have reused its blocks
// is not sent. The request begins anew.
func TestLeaseEndsBeforeDecodeHasRoom(t *testing.T) {
	for _, connector := range leasing {
		t.Run(connector, func(t *testing.T) { leaseEndsBeforeDecodeHasRoom(t, connector) })
	}
}

func leaseEndsBeforeDecodeHasRoom(t *testing.T, connector string) {
	f := leased(t, connector, 2*time.Second, func(c *config.Config) {
		for i := range c.Engines {
			if c.Engines[i].Role == config.RoleDecode {
				c.Engines[i].MaxConns = 1
			}
		}
	})
	f.oneEntry() // each worker has a separate cap
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	stream := f.open(ctx, chat("has the room", 4000, true))
	defer stream.Body.Close()
	f.eventually("decode has one", func() bool { return f.decode[0].State().RequestsRunning == 1 })
	bodies := [...]string{chat(long, 8, true), chat(long+"too", 8, false)}
	var answers [len(bodies)]chan answer
	for n, body := range bodies {
		answers[n] = make(chan answer, 1)
		go func() { answers[n] <- f.try(chatPath, body) }()
	}
	f.eventually("both begin anew", func() bool {
		return f.metric("pdproxy_retries_total", `phase="decode"`, `reason="kv_lease"`) >= 2
	})
	leave()
	for n, body := range bodies {
		f.right(<-answers[n], chatPath, body)
	}
	f.settled()
	if n := f.decode[0].State().StaleReads + f.prefill[0].State().StaleReads; n != 0 {
		t.Errorf("got %d reads of freed blocks", n)
	}
}

// A decode is stopped for longer than prefill's blocks are kept, and no other
// decode can replace it. It must not answer from these blocks.
func TestLeaseEndsWhileDecodeIsStopped(t *testing.T) {
	for _, connector := range leasing {
		t.Run(connector, func(t *testing.T) { leaseEndsWhileDecodeIsStopped(t, connector) })
	}
}

func leaseEndsWhileDecodeIsStopped(t *testing.T, connector string) {
	f := leased(t, connector, 2*time.Second, func(c *config.Config) {
		c.Health.Timeout, c.Health.SuspectInterval = config.Duration(300*time.Millisecond), config.Duration(50*time.Millisecond)
	})
	f.decode[0].Stop(true)
	for _, streams := range []bool{true, false} {
		if a := f.try(chatPath, chat(long, 8, streams)); a.status != 504 && a.status != 503 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
	}
	f.decode[0].Stop(false)
	f.settled()
	body := chat("is back", 8, true)
	f.eventually("decode is ready", func() bool { return f.engineState("d0") == "ready" })
	f.awaitWorkers()
	f.right(f.try(chatPath, body), chatPath, body)
}
