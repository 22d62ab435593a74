package epp_test

import (
	"fmt"
	"maps"
	"testing"
	"time"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestGatewayMetadata: the gateway gets the facts of a request with the decision, and its cost with
// the end of the answer, once.
func TestGatewayMetadata(t *testing.T) {
	event := `data: {"choices":[{"text":"a"}]}` + "\n\n"
	used := `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":3}}}` + "\n\n"
	cost := map[string]any{"prompt_tokens": 7., "completion_tokens": 5., "total_tokens": 12.}
	cached := maps.Clone(cost)
	cached["cached_tokens"] = 3.
	for _, tt := range []struct {
		name   string
		stream bool
		status int
		parts  []string
		want   map[string]any
	}{
		{"a whole answer", false, 200, []string{wholeAnswer[:20], wholeAnswer[20:]}, cost},
		{"the end in a part of its own", false, 200, []string{wholeAnswer, ""}, cost},
		{"a stream", true, 200, []string{event, used, "data: [DONE]\n\n"}, cached},
		{"a stream with a late end", true, 200, []string{event, used + "data: [DONE]\n\n", "\n", ""}, cached},
		{"estimates", true, 200, []string{event, event, "data: [DONE]\n\n"}, map[string]any{"prompt_tokens": 1., "completion_tokens": 2., "total_tokens": 3.}},
		{"a refusal", false, 400, []string{"{}"}, map[string]any{}},
	} {
		for _, response := range []filter.ProcessingMode_BodySendMode{filter.ProcessingMode_FULL_DUPLEX_STREAMED, filter.ProcessingMode_STREAMED} {
			t.Run(tt.name+" "+response.String(), func(t *testing.T) {
				g := newGateway(t, world.Setup{Engines: world.Wholes(), Keys: world.TenantLine("a", "class=gold"), Config: func(c *config.Config) {
					c.EPP.Metadata = "own"
					c.PriorityClasses = []config.PriorityClass{{Name: "gold", Priority: 1}}
				}})
				x := g.ask(modes{duplex.request, response}, nil, []string{"authorization", "Bearer a-key"}, world.Completions(tt.stream)).decided()
				engine := g.at(x.metadata).Spec.Name
				if want := map[string]any{"model": "m", "engine": engine, "tenant": "a", "class": "gold"}; !maps.Equal(x.facts, want) {
					t.Errorf("with the decision: %v, want %v", x.facts, want)
				}
				kind := map[bool]string{true: "text/event-stream", false: "application/json"}[tt.stream]
				x.answers(tt.status, kind, "", tt.parts...)
				if err := x.ended(); err != nil {
					t.Error(err)
				}
				want := maps.Clone(tt.want)
				want["engine"] = engine
				if x.told != 1 || !maps.Equal(x.facts, want) {
					t.Errorf("%d times with the answer: %v, want %v", x.told, x.facts, want)
				}
			})
		}
	}
}

// TestGatewayMetadataOff: without a namespace the gateway gets only the endpoint. With that of the
// endpoint it gets one Struct.
func TestGatewayMetadataOff(t *testing.T) {
	for space, want := range map[string]int{"": 1, "envoy.lb": 3} {
		g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.EPP.Metadata = space }})
		x := g.ask(duplex, nil, nil, world.Completions(false))
		facts := x.receive().GetDynamicMetadata().GetFields()
		if len(facts) != 1 || len(facts["envoy.lb"].GetStructValue().GetFields()) != want {
			t.Errorf("%q: %v", space, facts)
		}
		x.decided()
		x.finish()
	}
}

// TestGatewayMetadataTrailers: trailers end the answer, and have its cost.
func TestGatewayMetadataTrailers(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.EPP.Metadata = "own" }})
	x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
	x.endless = true
	x.answers(200, "application/json", "", wholeAnswer)
	x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extproc.HttpTrailers{}}})
	r := x.receive()
	if n := fmt.Sprint(r.GetDynamicMetadata().GetFields()["own"].GetStructValue().AsMap()["total_tokens"]); r.GetResponseTrailers() == nil || n != "12" {
		t.Errorf("got %v", r)
	}
	if err := x.ended(); err != nil {
		t.Error(err)
	}
}

// TestGatewayMetadataEvicted: the gateway gets the known cost of an evicted request, with the last part of a
// stream or with the reply.
func TestGatewayMetadataEvicted(t *testing.T) {
	const usage = `data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}` + "\n\n"
	prompt := map[string]any{"prompt_tokens": 1.}
	for name, tt := range map[string]struct {
		stream, head bool
		mode         filter.ProcessingMode_BodySendMode
		parts        []string
		want         map[string]any
	}{
		"before the head of a stream":       {true, false, duplex.response, nil, map[string]any{"prompt_tokens": 1., "completion_tokens": 0., "total_tokens": 1.}},
		"before the head of a whole answer": {false, false, duplex.response, nil, prompt},
		"stream":                            {true, true, duplex.response, []string{world.EventA, world.EventA}, map[string]any{"prompt_tokens": 1., "completion_tokens": 2., "total_tokens": 3.}},
		"stream with usage":                 {true, true, duplex.response, []string{world.EventA, usage}, map[string]any{"prompt_tokens": 7., "completion_tokens": 3., "total_tokens": 10., "cached_tokens": 2.}},
		"stream within an event":            {true, true, duplex.response, []string{world.EventA, `data: {"choi`}, map[string]any{"prompt_tokens": 1., "completion_tokens": 1., "total_tokens": 2.}},
		"streamed body":                     {true, true, filter.ProcessingMode_STREAMED, []string{world.EventA}, map[string]any{"prompt_tokens": 1., "completion_tokens": 1., "total_tokens": 2.}},
		"buffered body":                     {true, true, filter.ProcessingMode_BUFFERED, nil, prompt},
		"hidden body":                       {true, true, filter.ProcessingMode_NONE, nil, prompt},
		"half an answer":                    {false, true, duplex.response, []string{wholeAnswer[:20]}, prompt},
	} {
		t.Run(name, func(t *testing.T) {
			g := newEvictingGateway(t)
			x := g.ask(modes{duplex.request, tt.mode}, nil, []string{"x-priority", "batch"}, world.Completions(tt.stream)).decided()
			engine := g.at(x.metadata).Spec.Name
			if x.endless = true; tt.head {
				x.answers(200, map[bool]string{true: "text/event-stream", false: "application/json"}[tt.stream], "", tt.parts...)
			}
			g.urgent(func() {
				want := maps.Clone(tt.want)
				want["engine"] = engine
				r := x.receive()
				if got := r.GetDynamicMetadata().GetFields()["own"].GetStructValue().AsMap(); x.told != 0 || !maps.Equal(got, want) {
					t.Errorf("got %v with %v, %d times before; want %v", got, r, x.told, want)
				}
				_ = x.ended() // TestGatewayEvicts checks the error
			})
		})
	}
}

// TestGatewayCutStreamCosts: a stream that its client leaves costs the tenant its prompt and its events, and
// one without an event its reservation.
func TestGatewayCutStreamCosts(t *testing.T) {
	for _, tt := range []struct {
		parts []string
		want  float64
	}{{[]string{world.EventA, world.EventA}, 1 + 2}, {nil, 1 + 5}} {
		g := newGateway(t, world.Setup{Engines: world.Wholes(), Keys: world.TenantLine("a", "tpm=1000")})
		x := g.ask(duplex, nil, []string{"authorization", "Bearer a-key"}, world.Completions(true)).decided()
		x.endless = true
		x.answers(200, "text/event-stream", "", tt.parts...)
		x.cancel()
		for g.Running() != 0 {
			time.Sleep(time.Millisecond)
		}
		if n := g.Metric("pdproxy_tenant_tokens_total", "a"); n != tt.want {
			t.Errorf("%d events: the tenant pays %v tokens, want %v", len(tt.parts), n, tt.want)
		}
	}
}
