package epp_test

import (
	"slices"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestGatewaySpan: the spans of a request that a gateway sends name the model and the finish
// reasons of the answer, as far as the gateway has shown the answer.
func TestGatewaySpan(t *testing.T) {
	const head = "data: {\"model\":\"served\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n"
	for _, tt := range []struct {
		name, contentType string
		parts             []string
		cut               bool // the gateway leaves before the end
		model             string
		reasons           []string
	}{
		{"whole", "application/json", []string{`{"model":"served","choices":[{"finish_reason":"length"}`, `,{"finish_reason":"stop"}]}`}, false, "served", []string{"length", "stop"}},
		{"whole, aborted", "application/json", []string{`{"model":"served","choices":[{"text":"a","finish_reason":"abort"}]}`}, false, "served", []string{"abort"}},
		{"stream", "text/event-stream", []string{": ping\n\n" + head[:20], head[20:] + "data: {\"choices\":[{\"index\":1,\"finish_reason\":\"stop\"}]}\n\ndata: {\"choices\":[{\"index\":0,\"finish_re", "ason\":\"length\"}]}\n\ndata: [DONE]\n\n"}, false, "served", []string{"length", "stop"}},
		{"stream that stays open", "text/event-stream", []string{head + "data: {\"choices\":[{\"index\":0,\"finish_reason\":\"stop\"}]}\n\n"}, true, "served", []string{"stop"}},
		{"stream without a choice", "text/event-stream", []string{"data: [DONE]\n\n"}, false, "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rec := tracetest.NewSpanRecorder()
			g := newGateway(t, world.Setup{Engines: world.Wholes(), Tracer: telemetry.NewTracerTo(sdk.WithSpanProcessor(rec))})
			stream := tt.contentType == "text/event-stream"
			x := g.ask(duplex, nil, nil, world.Completions(stream)).decided()
			x.endless = tt.cut
			x.answers(200, tt.contentType, "", tt.parts...)
			if tt.cut {
				x.cancel()
			} else if err := x.ended(); err != nil {
				t.Error(err)
			}
			seen := 0
			for g.Running() > 0 {
				time.Sleep(time.Millisecond)
			}
			for _, s := range rec.Ended() {
				if s.Name() != "pdproxy.exchange" && s.SpanKind() != trace.SpanKindClient {
					continue
				}
				seen++
				model, reasons := "", []string(nil)
				for _, a := range s.Attributes() {
					switch a.Key {
					case "gen_ai.response.model":
						model = a.Value.AsString()
					case "gen_ai.response.finish_reasons":
						reasons = a.Value.AsStringSlice()
					}
				}
				if model != tt.model || !slices.Equal(reasons, tt.reasons) {
					t.Errorf("span %q: model %q, reasons %q, want %q and %q", s.Name(), model, reasons, tt.model, tt.reasons)
				}
			}
			if seen != 2 {
				t.Errorf("%d spans describe the request, want 2", seen)
			}
		})
	}
}
