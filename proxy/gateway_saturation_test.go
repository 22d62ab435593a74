package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// newSaturatedGateway is a gateway of a picker whose only engine has requests in its queue, so
// that the picker holds requests. A token of a prompt takes 1 ms.
func newSaturatedGateway(t *testing.T) *gateway {
	t.Helper()
	g := newGateway(t, setup{engines: []*fakeEngine{{at: "10.0.0.1:80"}}, config: func(c *config.Config) {
		bySaturation(c)
		c.Limits.QueueTimeout = config.Duration(time.Minute)
	}})
	g.registry.Snapshot().Instance("e").Load[0].Prefill.Measure(1000, time.Second)
	g.queued(500)
	return g
}

// queued sets the tokens of the prompts in the queue of the engine.
func (g *gateway) queued(tokens int64) {
	c := &g.registry.Snapshot().Instance("e").Load[0]
	c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 4, Queued: tokens}, c.Mark())
}

// holds waits until so many requests are held.
func (g *gateway) holds(n float64) {
	g.t.Helper()
	for end := time.Now().Add(time.Minute); g.metric("pdproxy_requests_waiting", "m", "saturated") != n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			g.t.Fatalf("%v requests are held, want %v", g.metric("pdproxy_requests_waiting", "m", "saturated"), n)
		}
	}
}

// held sends a request, and waits until it is held.
func (g *gateway) held(m modes, header ...string) *exchanged {
	g.t.Helper()
	x := g.ask(m, nil, header, completions(false))
	g.holds(1)
	return x
}

// refused receives the refusal of a request.
func (x *exchanged) refused(retry string) {
	x.t.Helper()
	defer x.cancel()
	x.decided()
	if s := x.immediate.GetStatus().GetCode(); s != 503 || setBy(x.immediate.GetHeaders())["retry-after"] != retry || !strings.Contains(string(x.immediate.GetBody()), `"code":"saturated"`) {
		x.t.Errorf("%d %v %s, want a refusal for %s s", s, x.immediate.GetHeaders(), x.immediate.GetBody(), retry)
	}
}

// TestGatewaySaturation: the picker holds a request while the engines are saturated, and chooses
// an endpoint when they are not.
func TestGatewaySaturation(t *testing.T) {
	for _, m := range []modes{duplex, {duplex.request, 0}} {
		g := newSaturatedGateway(t)
		x := g.held(m, "x-deadline", "60000")
		g.says("e", 3, 0, 0)
		if x.decided(); x.set["x-gateway-destination-endpoint"] != "10.0.0.1:80" || x.immediate != nil {
			t.Errorf("the picker answers %v and sets %v", x.immediate, x.set)
		}
		g.holds(0)
		x.cancel()
	}
}

// TestGatewaySaturationSheds: the gateway answers a request whose deadline is too near with the
// picker's error: at once, or when the work of the engines has grown.
func TestGatewaySaturationSheds(t *testing.T) {
	t.Run("at once", func(t *testing.T) {
		g := newSaturatedGateway(t)
		g.ask(duplex, nil, []string{"x-deadline", "100"}, completions(false)).refused("1")
		g.outcome(telemetry.OutcomeShed)
	})
	t.Run("held", func(t *testing.T) {
		g := newSaturatedGateway(t)
		x := g.held(duplex, "x-deadline", "60000")
		g.queued(70_000)
		x.refused("70")
		g.holds(0)
		g.outcome(telemetry.OutcomeShed)
	})
}

// TestGatewaySaturationLeaves: nothing is left of a held request whose gateway ends the stream.
func TestGatewaySaturationLeaves(t *testing.T) {
	g := newSaturatedGateway(t)
	x := g.held(duplex)
	x.cancel()
	g.holds(0)
	for g.books.Running.Len() != 0 {
		time.Sleep(time.Millisecond)
	}
	g.outcome(telemetry.OutcomeCancelled)
	if n := g.local.Open(); n != 0 {
		t.Errorf("%d leases are open", n)
	}
}
