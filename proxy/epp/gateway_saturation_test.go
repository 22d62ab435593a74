package epp_test

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// newSaturatedGateway is a gateway of a picker whose only engine has requests in its queue, so
// that the picker holds requests. A token of a prompt takes 1 ms.
func newSaturatedGateway(t *testing.T) *gateway {
	t.Helper()
	g := newGateway(t, world.Setup{Engines: []*world.Engine{{At: "10.0.0.1:80"}}, Config: func(c *config.Config) {
		world.BySaturation(c)
		c.Limits.QueueTimeout = config.Duration(time.Minute)
	}})
	g.Registry.Snapshot().Instance("e").Load[0].Prefill.Measure(1000, time.Second)
	g.queued(500)
	return g
}

// TestGatewaySaturation: the picker holds a request while the engines are saturated, and chooses
// an endpoint when they are not.
func TestGatewaySaturation(t *testing.T) {
	for _, m := range []modes{duplex, {duplex.request, 0}} {
		g := newSaturatedGateway(t)
		x := g.held(m, "x-deadline", "60000")
		g.Says("e", 3, 0, 0)
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
		g.ask(duplex, nil, []string{"x-deadline", "100"}, world.Completions(false)).refused("1")
		g.Outcome(telemetry.OutcomeShed)
	})
	t.Run("held", func(t *testing.T) {
		g := newSaturatedGateway(t)
		x := g.held(duplex, "x-deadline", "60000")
		g.queued(70_000)
		x.refused("70")
		g.holds(0)
		g.Outcome(telemetry.OutcomeShed)
	})
}

// TestGatewaySaturationLeaves: nothing is left of a held request whose gateway ends the stream.
func TestGatewaySaturationLeaves(t *testing.T) {
	g := newSaturatedGateway(t)
	x := g.held(duplex)
	x.cancel()
	g.holds(0)
	for g.Running() != 0 {
		time.Sleep(time.Millisecond)
	}
	g.Outcome(telemetry.OutcomeCancelled)
	if n := g.Local.Open(); n != 0 {
		t.Errorf("%d leases are open", n)
	}
}
