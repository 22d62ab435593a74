package epp_test

import (
	"strings"
	"testing"
	"time"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// newEvictingGateway is a gateway of a picker with one place, whose requests of the class batch end for
// others.
func newEvictingGateway(t *testing.T) *gateway {
	t.Helper()
	return newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) {
		for name, priority := range map[string]int{"default": 0, "batch": -1} {
			class := config.DefaultPriorityClass()
			class.Name, class.Priority = name, priority
			c.PriorityClasses = append(c.PriorityClasses, class)
		}
		c.Limits.PriorityHeader, c.Limits.MaxExchanges, c.Policy.Evict = "x-priority", 1, "first"
		c.Limits.QueueTimeout, c.EPP.Metadata = config.Duration(time.Minute), "own"
	}, Options: func(o *proxy.Options) {
		o.Evict = func(*abi.EvictFacts) (int32, string, bool) { return 0, "first", true }
	}})
}

// urgent lets a request of the class default evict the running one, calls f, and lets it finish.
func (g *gateway) urgent(f func()) {
	g.T.Helper()
	x := g.ask(duplex, nil, nil, world.Completions(false))
	f()
	x.decided().finish()
	for g.Running() != 0 {
		time.Sleep(time.Millisecond)
	}
	if n := g.Metric("pdproxy_evictions_total", "batch", "max_exchanges"); n != 1 || g.Local.Open() != 0 || g.Metric("pdproxy_leg_errors_total") != 0 {
		g.T.Errorf("%v evictions, %d leases, %v failed legs", n, g.Local.Open(), g.Metric("pdproxy_leg_errors_total"))
	}
}

// evicted receives the reply for an evicted request.
func (x *exchanged) evicted() {
	x.t.Helper()
	r := x.receive().GetImmediateResponse()
	if s := r.GetStatus().GetCode(); s != 429 || setBy(r.GetHeaders())["retry-after"] != "1" || !strings.Contains(string(r.GetBody()), `"code":"evicted"`) {
		x.t.Errorf("%d %v %s", s, r.GetHeaders(), r.GetBody())
	}
}

// TestGatewayEvicts: the gateway ends a stream with an error event if the picker sees the body. Otherwise
// it gets the reply 429, with which it answers or cuts, and an error if the head has passed.
func TestGatewayEvicts(t *testing.T) {
	batch := []string{"x-priority", "batch"}
	t.Run("before the head", func(t *testing.T) {
		g := newEvictingGateway(t)
		x := g.ask(duplex, nil, batch, world.Completions(true)).decided()
		g.urgent(func() {
			x.evicted()
			if err := x.ended(); err != nil {
				t.Error(err)
			}
		})
	})
	t.Run("stream", func(t *testing.T) {
		g := newEvictingGateway(t)
		x := g.ask(duplex, nil, batch, world.Completions(true)).decided()
		x.endless = true
		x.answers(200, "text/event-stream", "", world.EventA)
		g.urgent(func() {
			last := x.receive().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
			if !last.GetEndOfStream() || !strings.HasPrefix(string(last.GetBody()), `data: {"error":{`) || !strings.Contains(string(last.GetBody()), `"code":"evicted"`) {
				t.Errorf("the last part is %v", last)
			}
			if err := x.ended(); err != nil {
				t.Error(err)
			}
		})
	})
	for name, tt := range map[string]struct {
		mode  filter.ProcessingMode_BodySendMode
		parts []string
	}{
		"before the body": {duplex.response, nil},
		"within an event": {duplex.response, []string{`data: {"choices":[{"te`}},
		"streamed body":   {filter.ProcessingMode_STREAMED, []string{world.EventA}},
		"buffered body":   {filter.ProcessingMode_BUFFERED, nil},
		"hidden body":     {filter.ProcessingMode_NONE, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g := newEvictingGateway(t)
			x := g.ask(modes{duplex.request, tt.mode}, nil, batch, world.Completions(true)).decided()
			x.endless = true
			x.answers(200, "text/event-stream", "", tt.parts...)
			g.urgent(func() {
				x.evicted()
				if err := x.ended(); grpcstatus.Code(err) != codes.Aborted {
					t.Errorf("the stream ended with %v, want a cut", err)
				}
			})
		})
	}
	t.Run("gRPC call", func(t *testing.T) {
		g := newEvictingGateway(t)
		x := g.calls(duplex, "/vllm.grpc.engine.VllmEngine/Generate", framed(3, "text", 5, 1), batch...).decided()
		x.endless = true
		x.answers(200, "application/grpc", "", framed(1, inner(1, "\x01", 2, 3, 3, 1)))
		g.urgent(func() {
			if r := x.receive().GetImmediateResponse(); codes.Code(r.GetGrpcStatus().GetStatus()) != codes.ResourceExhausted {
				t.Errorf("got %v", r)
			}
			if err := x.ended(); grpcstatus.Code(err) != codes.Aborted {
				t.Errorf("the stream ended with %v, want a cut", err)
			}
		})
	})
}
