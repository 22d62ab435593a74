package conformance

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// pinned returns the number of blocks that the prefill engines hold for a decode.
func (f *fleet) pinned() (blocks int) {
	for _, p := range f.prefill {
		blocks += p.State().BlocksPinned
	}
	return blocks
}

// prompts returns the number of requests that have reached the prefill engines.
func (f *fleet) prompts() int64 {
	return sum(f.prefill, func(s enginesim.State) int64 { return s.Requests })
}

// burst posts n requests within a tenth of a second and returns the number of
// answers with each status.
func (f *fleet) burst(n int, name string) map[int]int {
	var wg sync.WaitGroup
	statuses := make(chan int, n)
	for i := range n {
		wg.Go(func() { statuses <- f.try(chatPath, chat(fmt.Sprint(name, i, long), 8, i%2 == 0)).status })
		time.Sleep(100 * time.Millisecond / time.Duration(n))
	}
	wg.Wait()
	close(statuses)
	got := make(map[int]int)
	for status := range statuses {
		got[status]++
	}
	return got
}

// The only decode engine has died, and its probes notice that without a
// request. No prompt is computed without a decode, and no block is held.
func TestNoPrefillForADeadDecode(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
			c.Health.UnhealthyAfter = 1000 // one refused connection is enough
		}})
		body := chat("before", 8, true)
		f.right(f.try(chatPath, body), chatPath, body)
		f.eventually("prefill knows that decode has the blocks", func() bool { return f.pinned() == 0 })
		addr := f.decode[0].Addr()
		f.decode[0].Kill()
		f.decode[0].Close()
		f.eventually("the probes have found that the engine has ended", func() bool { return f.engineState("d0") == "unhealthy" })
		f.awaitWorkers()
		before := f.prompts()
		if got := f.burst(20, "dead "); got[http.StatusServiceUnavailable] != 20 {
			t.Errorf("statuses %v, want 503 of all", got)
		}
		if n := f.prompts() - before; n != 0 || f.pinned() != 0 {
			t.Errorf("%d requests reached prefill, which holds %d blocks", n, f.pinned())
		}
		c := enginesim.Config{Connector: f.connector, Role: enginesim.RoleDecode, Listen: addr}
		c.SGLang.HeaderOverrides = connector == sglangHeaders
		keepKVPorts(&c, f.decode[0])
		f.decode[0] = startEngine(t, c)
		f.eventually("the engine is ready again", func() bool { return f.engineState("d0") == "ready" })
	})
}

// The only decode engine answers 500. After its circuit has opened, nothing is
// sent to prefill, and the number of held blocks does not grow.
func TestNoPrefillForAFailingDecode(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		// A prompt of an earlier request may reach the engine late, so the engine
		// counts the prompts of this name only.
		const name = "fails "
		var computed atomic.Int64
		f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
			c.Circuit.OpenFor, c.Retry.MinBudget = config.Duration(3*time.Second), 100
		}, engine: func(role string, _ int, c *enginesim.Config) {
			if role == enginesim.RolePrefill {
				c.OnPrompt = func(prompt string) {
					if strings.Contains(prompt, name) {
						computed.Add(1)
					}
				}
			}
		}})
		f.decode[0].SetFault("1:500", 0, "")
		for n := 0; n < 20 && f.try(chatPath, chat(fmt.Sprint("opens ", n, long), 8, true)).status != http.StatusServiceUnavailable; n++ {
		}
		got := f.burst(20, name)
		if got[http.StatusServiceUnavailable] < 19 { // one may be the trial request
			t.Errorf("statuses %v, want 503", got)
		}
		if n := computed.Load(); n > 1 {
			t.Errorf("prefill computed %d prompts, want at most that of the trial request", n)
		}
		f.decode[0].SetFault("", 0, "")
		body := chat("after", 8, true)
		f.eventually("the trial has come", func() bool { return f.try(chatPath, body).status == http.StatusOK })
		f.settled()
	})
}

// A decode engine of vLLM has no room, and its refusal makes prefill free the blocks. No other decode
// engine gets them: prefill computes the prompt again. If all decode engines refuse, no block stays
// either, and no circuit opens.
func TestBlocksFreedByARefusal(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMMoRIIORead} {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 2})
			rejected := func() int64 { return sum(f.decode, func(s enginesim.State) int64 { return s.Rejected }) }
			f.decode[0].SetFault("1:busy", 0, "")
			for n := 0; n < 100 && rejected() == 0; n++ {
				before := f.prompts()
				body := chat(fmt.Sprint("full ", n, long), 8, n%2 == 0)
				f.right(f.try(chatPath, body), chatPath, body)
				if rejected() > 0 && f.prompts()-before < 2 {
					t.Error("another decode engine got the blocks of a refused leg")
				}
			}
			if rejected() == 0 {
				t.Fatal("the full engine got no request")
			}
			f.decode[1].SetFault("1:busy", 0, "")
			if got := f.burst(20, "all full "); got[http.StatusServiceUnavailable] != 20 {
				t.Errorf("statuses %v, want 503 of all", got)
			}
			f.eventually("no block is held", func() bool { return f.pinned() == 0 })
			f.decode[0].SetFault("", 0, "")
			f.decode[1].SetFault("", 0, "")
			body := chat("room again"+long, 8, true)
			f.right(f.try(chatPath, body), chatPath, body)
			f.settled()
		})
	}
}

// Requests in the queue for prefill are not sent there when the only decode
// engine goes away.
func TestWaitingPrefillsStop(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1,
		engine: slow(enginesim.RolePrefill, 2000),
		config: func(c *config.Config) {
			for i := range c.Engines {
				if c.Engines[i].Role == config.RolePrefill {
					c.Engines[i].MaxConns = 1
				}
			}
		},
	})
	f.oneEntry() // each worker has a separate cap
	before := f.prompts()
	done := make(chan map[int]int)
	go func() { done <- f.burst(8, "waits ") }()
	f.eventually("one is computed", func() bool { return f.busy(f.prefill) })
	f.decode[0].Kill()
	f.eventually("the probes have found that the engine has ended", func() bool { return f.engineState("d0") == "unhealthy" })
	if got := <-done; got[http.StatusOK] != 0 || got[http.StatusServiceUnavailable] < 7 {
		t.Errorf("statuses %v", got)
	}
	if n := f.prompts() - before; n > 2 { // the computed one, and one that may have been admitted before the proxy noticed
		t.Errorf("%d requests reached prefill", n)
	}
	addr := f.decode[0].Addr()
	f.decode[0].Close()
	f.decode[0] = startEngine(t, enginesim.Config{Connector: f.connector, Role: enginesim.RoleDecode, Listen: addr})
	f.settled() // the successor of the dead engine frees a block that was held for it
}

// A decode was left to complete a transfer with prefill, and its process ends
// before that. The next process frees the blocks by a request that it rejects.
// It does so even when it starts before any probe could miss the first process.
func TestMooncakeDecodeRestartsAtOnce(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMMooncake, fleetOptions{prefill: 1, decode: 1,
		engine: func(role string, n int, c *enginesim.Config) {
			c.Mooncake.AbortTimeout = 10 * time.Minute
			slow(enginesim.RolePrefill, 1000)(role, n, c)
		},
	})
	for round := range 3 {
		f.decode[0].SetFault("1:lost-notification", 0, "") // decode waits, and the notification to prefill is lost
		ctx, leave := context.WithCancel(context.Background())
		gone := make(chan answer, 1)
		go func() { gone <- f.post(ctx, f.url, chatPath, chat(fmt.Sprint(round, long), 8, true)) }()
		f.eventually("decode waits, prefill computes", func() bool {
			return f.decode[0].State().RequestsWaiting == 1 && f.busy(f.prefill)
		})
		leave()
		<-gone
		f.eventually("prefill holds the blocks", func() bool { return f.pinned() > 0 && f.metric("pdproxy_leases_open") == 0 })
		old := f.decode[0]
		c := enginesim.Config{Connector: f.connector, Role: enginesim.RoleDecode, Listen: old.Addr()}
		old.Kill()
		f.decode[0] = startEngine(t, c)
		old.Close()
		f.eventually("the blocks are free", func() bool { return f.pinned() == 0 })
	}
	if n := f.prefill[0].State().LeasesExpired; n != 0 {
		t.Errorf("prefill freed %d blocks by its own time-out", n)
	}
}
