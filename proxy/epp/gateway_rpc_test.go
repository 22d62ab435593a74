package epp_test

import (
	"encoding/binary"
	"strconv"
	"strings"
	"testing"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// framed returns a gRPC message with texts and numbers in its fields.
func framed(fields ...any) string {
	var m []byte
	for i := 0; i+1 < len(fields); i += 2 {
		number := protowire.Number(fields[i].(int))
		switch v := fields[i+1].(type) {
		case string:
			m = protowire.AppendString(protowire.AppendTag(m, number, protowire.BytesType), v)
		case int:
			m = protowire.AppendVarint(protowire.AppendTag(m, number, protowire.VarintType), uint64(v))
		}
	}
	return string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m)))) + string(m)
}

// inner returns a message for a field.
func inner(fields ...any) string { return framed(fields...)[5:] }

// calls sends a call to the picker.
func (g *gateway) calls(m modes, method, body string, header ...string) *exchanged {
	g.T.Helper()
	parts := []string{body[:len(body)/2], body[len(body)/2:]}
	if m.request == filter.ProcessingMode_BUFFERED {
		parts = []string{body}
	}
	return g.ask(m, nil, append([]string{":path", method, "content-type", "application/grpc", "te", "trailers"}, header...), parts...)
}

// trailers sends the end of the answer to a call.
func (x *exchanged) trailers(status codes.Code) {
	x.t.Helper()
	x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extproc.HttpTrailers{Trailers: &core.HeaderMap{Headers: []*core.HeaderValue{
		{Key: "grpc-status", RawValue: []byte(strconv.Itoa(int(status)))},
	}}}}})
	if r := x.receive(); r.GetResponseTrailers() == nil {
		x.t.Errorf("got %v, want the answer to the trailers", r)
	} else if own := r.GetDynamicMetadata().GetFields()["own"]; own != nil {
		x.facts = own.GetStructValue().AsMap()
	}
}

// TestGatewayCall: the messages of a gRPC client reach the engine and the client unchanged. The picker
// places the call like the HTTP request that asks for the same, and records its answer.
func TestGatewayCall(t *testing.T) {
	engine := framed(2, inner(2, "\x01\x02\x03"), 4, inner(8, 16), 5, 1)
	chunk, complete := framed(1, inner(1, "\x01", 2, 3, 3, 1)), framed(2, inner(1, "\x01\x02", 3, 3, 4, 2, 5, 1))
	for _, tt := range []struct {
		name, method, body string
		answer             []string
		status             codes.Code
		outcome            telemetry.Outcome
		tokens             float64 // that the engine has generated
		failures           int
	}{
		{"a stream of VllmEngine", "/vllm.grpc.engine.VllmEngine/Generate", engine, []string{chunk, chunk[:3], chunk[3:] + complete}, codes.OK, telemetry.OutcomeOK, 2, 0},
		{"a whole answer of VllmEngine", "/vllm.grpc.engine.VllmEngine/Generate", framed(3, "text"), []string{complete}, codes.OK, telemetry.OutcomeOK, 2, 0},
		{"an embedding below a prefix", "/llama/vllm.grpc.engine.VllmEngine/Embed", framed(2, inner(2, "\x01")), []string{framed(2, 3)}, codes.OK, telemetry.OutcomeOK, 0, 0},
		{"a stream of Inference", "/vllm.Inference/GenerateStream", framed(2, "m", 3, "text"), []string{framed(1, inner(1, 3), 2, inner(3, 1)), framed(2, inner(3, 1, 8, inner(1, 2)))}, codes.OK, telemetry.OutcomeOK, 2, 0},
		{"a long text", "/vllm.Inference/Generate", framed(2, "m", 3, strings.Repeat("x\x01", 200_000)), []string{framed(1, inner(1, 3), 2, inner(3, 2, 8, inner(1, 2)))}, codes.OK, telemetry.OutcomeOK, 2, 0},
		{"a stream that breaks", "/vllm.Inference/GenerateStream", framed(2, "m", 3, "text"), []string{framed(1, inner(1, 3), 2, inner(3, 1))}, codes.Unavailable, telemetry.OutcomeBroken, 0, 1},
		{"an engine that fails", "/vllm.Inference/Generate", framed(2, "m", 3, "text"), []string{""}, codes.Internal, telemetry.OutcomeEngineError, 0, 1},
		{"an engine that refuses", "/vllm.Inference/Generate", framed(2, "m", 3, "text"), []string{""}, codes.InvalidArgument, telemetry.OutcomeEngineError, 0, 0},
	} {
		for _, m := range []modes{duplex, {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_STREAMED}} {
			t.Run(tt.name+" "+m.request.String(), func(t *testing.T) {
				g := newGateway(t, world.Setup{Engines: world.Wholes()})
				x := g.calls(m, tt.method, tt.body, "authorization", "Bearer of the engine").decided()
				if x.immediate != nil {
					t.Fatalf("%v", x.immediate)
				}
				for _, name := range []string{":path", "content-type", "content-length", "authorization", "te"} {
					if v, set := x.set[name]; set || x.removed[name] {
						t.Errorf("%s became %q", name, v)
					}
				}
				if x.body != tt.body || !strings.HasPrefix(x.metadata, "10.0.0.") {
					t.Errorf("%q gets %q", x.metadata, x.body)
				}
				x.endless = true
				if got := x.answers(200, "application/grpc", "", tt.answer...); m == duplex && got != strings.Join(tt.answer, "") {
					t.Errorf("the client gets %q", got)
				}
				x.trailers(tt.status)
				if err := x.ended(); err != nil {
					t.Error(err)
				}
				g.Outcome(tt.outcome)
				if n := g.Metric("pdproxy_tokens_total", "completion"); n != tt.tokens {
					t.Errorf("%v generated tokens are counted, want %v", n, tt.tokens)
				}
				if n := g.at(x.metadata).Breaker.Failures(); n != tt.failures {
					t.Errorf("the engine has %d failures, want %d", n, tt.failures)
				}
			})
		}
	}
}

// TestGatewayCallMetadata: the end of a call has its cost.
func TestGatewayCallMetadata(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.EPP.Metadata = "own" }})
	x := g.calls(duplex, "/vllm.grpc.engine.VllmEngine/Generate", framed(3, "text", 5, 1)).decided()
	x.endless = true
	x.answers(200, "application/grpc", "", framed(2, inner(3, 7, 4, 5, 5, 4)))
	x.trailers(codes.OK)
	if err := x.ended(); err != nil {
		t.Error(err)
	}
	if x.facts["total_tokens"] != 12. || x.facts["cached_tokens"] != 4. {
		t.Errorf("got %v", x.facts)
	}
}

// TestGatewayCallFails: trailers alone report a failure.
func TestGatewayCallFails(t *testing.T) {
	for _, tt := range []struct {
		status   codes.Code
		outcome  telemetry.Outcome
		failures int
	}{
		{codes.Unavailable, telemetry.OutcomeEngineError, 1},
		{codes.ResourceExhausted, telemetry.OutcomeEngineError, 0},
		{codes.DeadlineExceeded, telemetry.OutcomeTimeout, 1},
	} {
		for _, method := range []string{"/vllm.Inference/Generate", "/other.Service/Call"} {
			g := newGateway(t, world.Setup{Engines: world.Wholes()})
			x := g.calls(duplex, method, framed(3, "text")).decided()
			x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{EndOfStream: true,
				Headers: &core.HeaderMap{Headers: []*core.HeaderValue{{Key: ":status", RawValue: []byte("200")}, {Key: "grpc-status", RawValue: []byte(strconv.Itoa(int(tt.status)))}}}}}})
			x.receive()
			if err := x.ended(); err != nil {
				t.Error(err)
			}
			g.Outcome(tt.outcome)
			if n := g.at(x.metadata).Breaker.Failures(); n != tt.failures {
				t.Errorf("%s of %s: %d failures, want %d", tt.status, method, n, tt.failures)
			}
		}
	}
}

// TestGatewayCallRefusals: gRPC clients get the picker's errors as gRPC statuses.
func TestGatewayCallRefusals(t *testing.T) {
	const method = "/vllm.Inference/Generate"
	for _, tt := range []struct {
		name, path, body string
		want             codes.Code
		message          string
		config           func(*config.Config)
		keys             string
	}{
		{"an unknown model", method, framed(2, "other", 3, "x"), codes.NotFound, "the model", nil, ""},
		{"no protobuf", method, "\x00\x00\x00\x00\x01\xff", codes.InvalidArgument, "malformed", nil, ""},
		{"a compressed message", method, "\x01\x00\x00\x00\x00", codes.Unimplemented, "compressed", nil, ""},
		{"transfer parameters", "/vllm.grpc.engine.VllmEngine/Generate", framed(3, "x", 8, "{}"), codes.InvalidArgument, "kv_transfer_params", nil, ""},
		{"a message that is too large", method, framed(3, strings.Repeat("x", 5000)), codes.ResourceExhausted, "larger", func(c *config.Config) { c.Server.MaxBody = 4100 }, ""},
		{"a form that is too large", method, framed(3, strings.Repeat("\x01", 3000)), codes.ResourceExhausted, "larger", func(c *config.Config) { c.Server.MaxBody = 4100 }, ""},
		{"a path of operators", "/vllm.Control/Abort", framed(1, "x"), codes.Unimplemented, "no endpoint", nil, ""},
		{"no key", method, framed(3, "x"), codes.Unauthenticated, "key", nil, world.TenantLine("a", "rpm=1")},
		{"no engine for a whole request", method, framed(3, "x"), codes.Unavailable, "no engine", nil, "pair"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			setup := world.Setup{Engines: world.Wholes(), Config: tt.config, Keys: tt.keys}
			if tt.keys == "pair" {
				setup.Keys, setup.Engines = "", []*world.Engine{world.PrefillAt("p", "10.0.0.1:80"), world.DecodeAt("d", "10.0.0.2:80")}
			}
			g := newGateway(t, setup)
			x := g.calls(duplex, tt.path, tt.body).decided()
			defer x.cancel()
			if got := codes.Code(x.immediate.GetGrpcStatus().GetStatus()); got != tt.want || !strings.Contains(string(x.immediate.GetBody()), tt.message) || strings.HasPrefix(string(x.immediate.GetBody()), "{") {
				t.Errorf("got %s %q, want %s %q", got, x.immediate.GetBody(), tt.want, tt.message)
			}
			if kind, set := setBy(x.immediate.GetHeaders())["content-type"]; set {
				t.Errorf("the type of the answer is %q", kind)
			}
		})
	}
}
