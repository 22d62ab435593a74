package conformance

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// evicting is a fleet whose proxy has one place, and ends requests of the class batch for those of the
// class interactive.
func evicting(t *testing.T, connector string, o fleetOptions) *fleet {
	o.config = func(c *config.Config) {
		for name, priority := range map[string]int{"batch": -1, "interactive": 1} {
			class := config.DefaultPriorityClass()
			class.Name, class.Priority = name, priority
			c.PriorityClasses = append(c.PriorityClasses, class)
		}
		c.Limits.PriorityHeader, c.Limits.TrustPriority = "x-priority", true
		c.Limits.MaxExchanges, c.Limits.QueueTimeout = 1, config.Duration(time.Minute)
		c.Policy.Evict = "lowest_youngest"
		// A leg of the request of the higher class may meet the fault of decode.
		c.Timeouts.FirstByte, c.Timeouts.Prefill = config.Duration(10*time.Second), config.Duration(10*time.Second)
	}
	return startFleet(t, connector, o)
}

// evicts sends a request of the class batch, evicts it by one of the class interactive when reached is
// true, and returns its answer. The other one must get its whole answer, and nothing may be left.
func (f *fleet) evicts(body, what string, reached func() bool, then func()) answer {
	f.t.Helper()
	low := make(chan answer, 1)
	go func() { low <- f.post(context.Background(), f.url, chatPath, body, "x-priority", "batch") }()
	f.eventually(what, reached)
	high := make(chan answer, 1)
	urgent := chat("let me in", 5, true)
	go func() { high <- f.post(context.Background(), f.url, chatPath, urgent, "x-priority", "interactive") }()
	a := <-low
	then()
	f.right(<-high, chatPath, urgent)
	f.settled()
	f.eventually("the eviction is counted", func() bool {
		return f.metric("pdproxy_evictions_total", `class="batch"`, `reason="max_exchanges"`) == 1 && f.metric("pdproxy_leases_open") == 0
	})
	return a
}

// evicted checks the answer of a request that was evicted before its first byte.
func (f *fleet) evicted(a answer) {
	f.t.Helper()
	if a.status != 429 || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, `"code":"evicted"`) {
		f.t.Errorf("the evicted request got status %d, %v: %s", a.status, a.err, a.body)
	}
}

func TestEvictedInPrefill(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := evicting(t, connector, fleetOptions{engine: slow(enginesim.RolePrefill, 2000)})
		f.evicted(f.evicts(chat(long, 20, true), "prefill works", func() bool { return f.busy(f.prefill) }, func() {}))
	})
}

// TestEvictedBetweenTheLegs: decode accepts the request and does not process it. Prefill has answered,
// and its blocks are free after the eviction.
func TestEvictedBetweenTheLegs(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := evicting(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 20000)})
		f.leaveStream()
		f.settled()
		for _, d := range f.decode {
			d.SetFault("", 0, "head")
		}
		f.evicted(f.evicts(chat(long, 20, true), "blocks are held for decode", f.heldForDecode, func() {
			for _, d := range f.decode {
				d.SetFault("", 0, "")
			}
		}))
	})
}

func TestEvictedStream(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := evicting(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 20000)})
		a := f.evicts(chat(long, 2000, true), "the stream has begun", func() bool {
			return f.metric("pdproxy_time_to_first_token_seconds_count") == 1
		}, func() {})
		if a.status != 200 || !strings.Contains(a.body, `"code":"evicted"`) || strings.Contains(a.body, "[DONE]") {
			t.Errorf("the evicted stream got status %d, %v: %.200s ... %.300s", a.status, a.err, a.body, a.body[max(0, len(a.body)-300):])
		}
	})
}
