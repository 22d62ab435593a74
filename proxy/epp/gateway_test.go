package epp_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// queued sets the tokens of the prompts in the queue of the engine.
func (g *gateway) queued(tokens int64) {
	c := &g.Registry.Snapshot().Instance("e").Load[0]
	c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 4, Queued: tokens}, c.Mark())
}

// holds waits until so many requests are held.
func (g *gateway) holds(n float64) {
	g.T.Helper()
	for end := time.Now().Add(time.Minute); g.Metric("pdproxy_requests_waiting", "m", "saturated") != n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			g.T.Fatalf("%v requests are held, want %v", g.Metric("pdproxy_requests_waiting", "m", "saturated"), n)
		}
	}
}

// held sends a request, and waits until it is held.
func (g *gateway) held(m modes, header ...string) *exchanged {
	g.T.Helper()
	x := g.ask(m, nil, header, world.Completions(false))
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

// gateway is a client of the endpoint picker of a world.
type gateway struct {
	*world.World
	conn *grpc.ClientConn
}

// newGateway connects a gateway to the world's picker. The end of the test drains the picker.
func newGateway(t *testing.T, o world.Setup) *gateway {
	t.Helper()
	edit := o.Config
	o.Config = func(c *config.Config) {
		c.Health.Interval = config.Duration(5 * time.Millisecond) // the engines are ready after the second probe
		if edit != nil {
			edit(c)
		}
	}
	w := world.New(t, o)
	l := proxytest.NewPipeListener()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	picker := w.EPP(nil)
	go func() { ended <- picker.Serve(ctx, l, func() time.Duration { return time.Minute }) }()
	conn, err := grpc.NewClient("passthrough:///picker", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the picker ended with %v", err)
		}
		conn.Close()
	})
	return &gateway{World: w, conn: conn}
}

// settled waits until no request runs: the picker ends the stream of an answer before it records the
// request.
func (g *gateway) settled() {
	g.T.Helper()
	for g.Running() != 0 {
		time.Sleep(time.Millisecond)
	}
}

// Outcome asserts the outcome of the only request, which has ended or is about to end.
func (g *gateway) Outcome(want telemetry.Outcome) {
	g.T.Helper()
	g.settled()
	g.World.Outcome(want)
}

// Explained returns the explanation of the only request, which has ended or is about to end.
func (g *gateway) Explained() journal.Explanation {
	g.T.Helper()
	g.settled()
	return g.World.Explained()
}

// exchanged is one request as the gateway sees it.
type exchanged struct {
	t         *testing.T
	stream    extproc.ExternalProcessor_ProcessClient
	mode      filter.ProcessingMode_BodySendMode
	cancel    context.CancelFunc
	set       map[string]string // header lines that the picker sets
	removed   map[string]bool
	shown     map[string]string // header lines that the picker adds to the answer
	metadata  string            // the destination in the metadata
	facts     map[string]any    // of the decision, and later of the answer, in the namespace "own"
	told      int               // messages with facts, of the answer
	body      string            // that the engine gets
	immediate *extproc.ImmediateResponse
	bodyless  bool // the request has no body
	endless   bool // answers does not end the answer
}

// modes are those of the body of request and answer.
type modes struct {
	request, response filter.ProcessingMode_BodySendMode
}

var duplex = modes{filter.ProcessingMode_FULL_DUPLEX_STREAMED, filter.ProcessingMode_FULL_DUPLEX_STREAMED}

// ask sends the request to the picker. parts are those of the body.
func (g *gateway) ask(m modes, meta *core.Metadata, header []string, parts ...string) *exchanged {
	g.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	x := &exchanged{t: g.T, mode: m.request, cancel: cancel, bodyless: len(parts) == 0, set: map[string]string{}, removed: map[string]bool{}}
	var err error
	if x.stream, err = extproc.NewExternalProcessorClient(g.conn).Process(ctx); err != nil {
		g.T.Fatal(err)
	}
	lines := []*core.HeaderValue{}
	all := append([]string{":method", "POST", ":path", world.CompletionsPath, ":authority", "proxy"}, header...)
	if !slices.Contains(header, "content-type") {
		all = append(all, "content-type", "application/json")
	}
	for i := 0; i < len(all); i += 2 {
		lines = append(lines, &core.HeaderValue{Key: all[i], RawValue: []byte(all[i+1])})
	}
	x.send(&extproc.ProcessingRequest{
		Request:         &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{Headers: &core.HeaderMap{Headers: lines}, EndOfStream: len(parts) == 0}},
		MetadataContext: meta, ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: m.request, ResponseBodyMode: m.response},
	})
	if m.request == filter.ProcessingMode_BUFFERED && len(parts) > 0 {
		if r := x.receive(); r.GetRequestHeaders() == nil {
			x.note(r)
			return x
		}
	}
	for i, part := range parts {
		x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(part), EndOfStream: i == len(parts)-1}}})
	}
	return x
}

func (x *exchanged) send(m *extproc.ProcessingRequest) {
	x.t.Helper()
	if err := x.stream.Send(m); err != nil && err != io.EOF { // EOF: the answer tells why
		x.t.Fatal(err)
	}
}

func (x *exchanged) receive() *extproc.ProcessingResponse {
	x.t.Helper()
	r, err := x.stream.Recv()
	if err != nil {
		x.t.Fatal(err)
	}
	return r
}

// decided receives the decision.
func (x *exchanged) decided() *exchanged {
	x.t.Helper()
	for x.immediate == nil && !x.note(x.receive()) {
	}
	return x
}

// note notes a part of the decision. It reports whether the part is the last one.
func (x *exchanged) note(r *extproc.ProcessingResponse) bool {
	if x.immediate = r.GetImmediateResponse(); x.immediate != nil {
		return true
	}
	common := r.GetRequestHeaders().GetResponse()
	if common == nil {
		common = r.GetRequestBody().GetResponse()
	}
	for _, h := range common.GetHeaderMutation().GetSetHeaders() {
		x.set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	for _, name := range common.GetHeaderMutation().GetRemoveHeaders() {
		x.removed[name] = true
	}
	if m := r.GetDynamicMetadata(); m != nil {
		x.metadata = m.GetFields()["envoy.lb"].GetStructValue().GetFields()["x-gateway-destination-endpoint"].GetStringValue()
		x.facts = m.GetFields()["own"].GetStructValue().AsMap()
	}
	if s := common.GetBodyMutation().GetStreamedResponse(); s != nil {
		x.body += string(s.GetBody())
		return s.GetEndOfStream()
	}
	x.body += string(common.GetBodyMutation().GetBody())
	return r.GetRequestBody() != nil || x.bodyless
}

// answers shows the picker an answer in parts, and receives what the client gets.
func (x *exchanged) answers(code int, contentType, served string, parts ...string) (client string) {
	x.t.Helper()
	var meta *core.Metadata
	if served != "" {
		meta = metadata("envoy.lb", "x-gateway-destination-endpoint-served", structpb.NewStringValue(served))
	}
	x.send(&extproc.ProcessingRequest{MetadataContext: meta, Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{
		Headers: &core.HeaderMap{Headers: []*core.HeaderValue{{Key: ":status", RawValue: fmt.Append(nil, code)}, {Key: "content-type", RawValue: []byte(contentType)}}},
	}}})
	r := x.receive()
	if r.GetResponseHeaders() == nil {
		x.t.Fatalf("got %v, want the answer to the response's head", r)
	}
	x.shown = setBy(r.GetResponseHeaders().GetResponse().GetHeaderMutation())
	for i, part := range parts {
		x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: []byte(part), EndOfStream: !x.endless && i == len(parts)-1}}})
		r := x.receive()
		if own := r.GetDynamicMetadata().GetFields()["own"]; own != nil {
			x.facts = own.GetStructValue().AsMap()
			x.told++
		}
		client += string(r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
	}
	return client
}

// setBy returns the header lines that a mutation sets.
func setBy(m *extproc.HeaderMutation) map[string]string {
	lines := map[string]string{}
	for _, h := range m.GetSetHeaders() {
		lines[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	return lines
}

// ended waits until the picker has ended the stream, and returns the error.
func (x *exchanged) ended() error {
	x.t.Helper()
	defer x.cancel()
	_, err := x.stream.Recv()
	if err == io.EOF {
		return nil
	}
	return err
}

func metadata(space, key string, v *structpb.Value) *core.Metadata {
	return &core.Metadata{FilterMetadata: map[string]*structpb.Struct{space: {Fields: map[string]*structpb.Value{key: v}}}}
}

func subset(v *structpb.Value) *core.Metadata {
	return metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", v)
}

// finish answers a request and expects no error.
func (x *exchanged) finish() {
	x.t.Helper()
	x.answers(200, "application/json", "", wholeAnswer)
	if err := x.ended(); err != nil {
		x.t.Error(err)
	}
}

const wholeAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}`

// TestGatewayDestination: the endpoint is in the header and in the metadata, and the two are
// equal. The engine gets the body. (Endpoint picker protocol, Destination Endpoint; conformance
// GatewayFollowingEPPRouting.)
func TestGatewayDestination(t *testing.T) {
	text := world.Completions(false)
	for name, m := range map[string]modes{
		"full duplex": duplex, "buffered": {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_FULL_DUPLEX_STREAMED},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGateway(t, world.Setup{Engines: world.Wholes()})
			parts := []string{text[:10], text[10:]}
			if m.request == filter.ProcessingMode_BUFFERED {
				parts = []string{text}
			}
			x := g.ask(m, nil, []string{"x-request-id", "id-1"}, parts...).decided()
			to := x.set["x-gateway-destination-endpoint"]
			if !strings.HasPrefix(to, "10.0.0.") || !strings.HasSuffix(to, ":80") || x.metadata != to {
				t.Errorf("the header has %q, the metadata %q", to, x.metadata)
			}
			if x.body != text || x.set["content-length"] != fmt.Sprint(len(text)) {
				t.Errorf("the engine gets %q of length %s", x.body, x.set["content-length"])
			}
			if g.Local.Open() != 1 {
				t.Errorf("%d leases are open before the answer", g.Local.Open())
			}
			if got := x.answers(200, "application/json", to, wholeAnswer[:20], wholeAnswer[20:]); got != wholeAnswer {
				t.Errorf("the client gets %q", got)
			}
			if err := x.ended(); err != nil {
				t.Error(err)
			}
			g.Outcome(telemetry.OutcomeOK)
			if n := g.Metric("pdproxy_tokens_total", "prompt"); n != 7 {
				t.Errorf("%v prompt tokens are counted, want 7", n)
			}
			if e := g.Explained(); e.RequestID != "id-1" || len(e.Legs) != 1 || e.Legs[0].Status != 200 || len(e.Candidates) != 3 {
				t.Errorf("explained: %+v", e)
			}
		})
	}
}

// TestGatewaySubset: the picker chooses only endpoints of the subset. (Endpoint picker protocol,
// Endpoint Subset.)
func TestGatewaySubset(t *testing.T) {
	list := func(texts ...any) *structpb.Value {
		l, _ := structpb.NewList(texts) // strings never fail
		return structpb.NewListValue(l)
	}
	for _, tt := range []struct {
		name   string
		subset *core.Metadata
		want   string // "": 503
	}{
		{"one of the list", subset(list("10.0.0.3:80")), "10.0.0.3:80"},
		{"text with commas", subset(structpb.NewStringValue("10.9.9.9:1, 10.0.0.2:80")), "10.0.0.2:80"},
		{"address without port", subset(list("10.0.0.2")), "10.0.0.2:80"},
		{"none is eligible", subset(list("10.0.0.3:81")), ""},
		{"empty list", subset(list()), ""},
		{"no text", subset(list("", 7)), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newGateway(t, world.Setup{Engines: world.Wholes()})
			for range 4 {
				x := g.ask(duplex, tt.subset, nil, world.Completions(false)).decided()
				if got := x.set["x-gateway-destination-endpoint"]; got != tt.want {
					t.Errorf("got %q, want %q", got, tt.want)
				}
				if tt.want != "" {
					x.finish()
				} else if s := x.immediate.GetStatus().GetCode(); s != 503 {
					t.Errorf("got status %d, want 503", s)
				}
				x.cancel()
			}
		})
	}
}

// TestGatewayPair: with two legs the destination is the sidecar of decode, and a header line
// names prefill. Lines of the client with the picker's names do not pass.
func TestGatewayPair(t *testing.T) {
	for _, trust := range []bool{false, true} {
		g := newGateway(t, world.Setup{Engines: []*world.Engine{world.PrefillAt("p", "10.0.0.1:80"), world.DecodeAt("d", "10.0.0.2:80")}, Config: func(c *config.Config) {
			c.Server.TrustPDFields = trust
		}})
		x := g.ask(duplex, nil, []string{"x-prefiller-host-port", "evil:1", "x_encoder_hosts_ports", "evil:1", "x-gateway-destination-endpoint-subset", "evil", "x-client", "stays"}, world.Completions(false)).decided()
		if x.set["x-gateway-destination-endpoint"] != "10.0.0.2:80" || x.set["x-prefiller-host-port"] != "10.0.0.1:80" {
			t.Errorf("the picker sets %v", x.set)
		}
		if !x.removed["x-prefiller-host-port"] || !x.removed["x_encoder_hosts_ports"] || !x.removed["x-gateway-destination-endpoint-subset"] || x.removed["x-client"] {
			t.Errorf("the picker removes %v", x.removed)
		}
		x.finish()
	}
}

// TestGatewayStream: the first event and the usage of a stream are observed.
func TestGatewayStream(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes()})
	x := g.ask(duplex, nil, nil, world.Completions(true)).decided()
	events := []string{"data: {\"choices\":[{\"text\":\"a\"}]}\n\n", "data: {\"choices\":[{\"te", "xt\":\"b\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n", "data: [DONE]\n\n"}
	if got := x.answers(200, "text/event-stream", "", events...); got != strings.Join(events, "") {
		t.Errorf("the client gets %q", got)
	}
	if err := x.ended(); err != nil {
		t.Error(err)
	}
	g.Outcome(telemetry.OutcomeOK)
	if n := g.Metric("pdproxy_tokens_total", "completion"); n != 2 {
		t.Errorf("%v generated tokens are counted, want 2", n)
	}
	if e := g.Explained(); len(e.Legs) != 1 || e.Legs[0].FirstByteMS == nil {
		t.Errorf("explained: %+v", e)
	}
}

// TestGatewayOutcomes: answers of engines that are no success, and streams that break.
func TestGatewayOutcomes(t *testing.T) {
	for _, tt := range []struct {
		name    string
		status  int
		events  bool
		answer  string
		outcome telemetry.Outcome
		failed  float64 // legs
	}{
		{"the request is at fault", 400, false, `{"error":{}}`, telemetry.OutcomeClientError, 1},
		{"the engine is at fault", 500, false, `{"error":{}}`, telemetry.OutcomeEngineError, 1},
		{"the gateway waited in vain", 504, false, "upstream request timeout", telemetry.OutcomeTimeout, 1},
		{"a stream without an end", 200, true, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", telemetry.OutcomeBroken, 1},
		{"an error in a stream", 200, true, "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\ndata: [DONE]\n\n", telemetry.OutcomeBroken, 1},
		{"an aborted answer", 200, false, `{"choices":[{"finish_reason":"abort"}]}`, telemetry.OutcomeEngineError, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newGateway(t, world.Setup{Engines: world.Wholes()})
			x := g.ask(duplex, nil, nil, world.Completions(tt.events)).decided()
			kind := map[bool]string{true: "text/event-stream", false: "application/json"}[tt.events]
			if got := x.answers(tt.status, kind, "", tt.answer); got != tt.answer {
				t.Errorf("the client gets %q", got)
			}
			if err := x.ended(); err != nil {
				t.Error(err)
			}
			g.Outcome(tt.outcome)
			if n := g.Metric("pdproxy_leg_errors_total"); n != tt.failed {
				t.Errorf("%v legs have failed, want %v", n, tt.failed)
			}
		})
	}
}

// TestGatewayServedByOther: the gateway has used another endpoint of the list. (Endpoint picker
// protocol, Destination Endpoint Served; conformance GatewayDestinationEndpointServed.)
func TestGatewayServedByOther(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.EPP.Fallbacks = 2 }})
	x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
	list := strings.Split(x.set["x-gateway-destination-endpoint"], ",")
	if len(list) != 3 || x.metadata != x.set["x-gateway-destination-endpoint"] {
		t.Fatalf("the picker names %v and %q", list, x.metadata)
	}
	chosen, served := g.at(list[0]), g.at(list[1])
	x.answers(200, "application/json", list[1], wholeAnswer)
	if err := x.ended(); err != nil {
		t.Error(err)
	}
	g.settled()
	if n := g.Metric("pdproxy_fallbacks_total", "gateway", "other_endpoint"); n != 1 {
		t.Errorf("%v fallbacks are counted", n)
	}
	if n := chosen.Breaker.Failures(); n != 1 {
		t.Errorf("the engine that the gateway left has %d failures", n)
	}
	if n := served.Breaker.Failures(); n != 0 {
		t.Errorf("the engine that has answered has %d failures", n)
	}
}

// at returns the engine at an address.
func (g *gateway) at(address string) *engine.Instance {
	g.T.Helper()
	for _, i := range g.Registry.Snapshot().Instances {
		if i.Spec.URL == "http://"+address {
			return i
		}
	}
	g.T.Fatalf("no engine at %s", address)
	return nil
}

// TestGatewayFollowsServed: the load of a request moves to the engine that has answered, and an
// engine that the gateway has to leave again and again loses its place.
func TestGatewayFollowsServed(t *testing.T) {
	for _, prefill := range []bool{false, true} {
		engines := world.Wholes()
		if prefill {
			engines = []*world.Engine{world.PrefillAt("p", "10.0.0.9:80"), world.DecodeAt("a", "10.0.0.1:80"), world.DecodeAt("b", "10.0.0.2:80")}
		}
		g := newGateway(t, world.Setup{Engines: engines, Config: func(c *config.Config) { c.EPP.Fallbacks, c.Circuit.Failures = 2, 3 }})
		var bad *engine.Instance
		left := 0
		for range 12 {
			x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
			list := strings.Split(x.set["x-gateway-destination-endpoint"], ",")
			if bad == nil {
				bad = g.at(list[0])
			}
			if g.at(list[0]) != bad {
				x.answers(200, "application/json", list[0], wholeAnswer)
			} else {
				left++
				x.endless = true
				x.answers(200, "application/json", list[1], wholeAnswer)
				chosen, served := bad.Load[0].Requests(), g.at(list[1]).Load[0].Requests()
				if chosen != 0 || served != 1 {
					t.Errorf("prefill %v: the left engine has %d requests, the one that answers %d", prefill, chosen, served)
				}
				if h := x.shown["x-pdproxy-decode"]; h != "" && h != g.at(list[1]).Spec.Name {
					t.Errorf("the placement in the answer names %q", h)
				}
				x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{EndOfStream: true}}})
				x.receive()
			}
			if err := x.ended(); err != nil {
				t.Error(err)
			}
			g.settled()
		}
		if left != 3 {
			t.Errorf("prefill %v: the bad engine was first %d times, want 3", prefill, left)
		}
		if c := bad.Breaker.Circuit(time.Now()); c != circuit.Open {
			t.Errorf("its circuit is %v", c)
		}
	}
}

// TestGatewayServedByUnknown: an endpoint that no engine has answers. The chosen engine is left
// all the same, and nothing is held.
func TestGatewayServedByUnknown(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes()})
	for _, served := range []string{"10.9.9.9:80", "nonsense"} {
		x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
		chosen := g.at(x.set["x-gateway-destination-endpoint"])
		before := chosen.Breaker.Failures()
		x.answers(500, "application/json", served, "{}")
		if err := x.ended(); err != nil {
			t.Error(err)
		}
		g.settled()
		if n := chosen.Breaker.Failures(); n != before+1 {
			t.Errorf("%s: %d failures after %d", served, n, before)
		}
	}
}

// TestGatewayOverload: an engine without room keeps its circuit; other 5xx answers count.
func TestGatewayOverload(t *testing.T) {
	for _, tt := range []struct {
		status   int
		body     string
		failures int
	}{
		{429, "{}", 0},
		{503, `{"message":"The request queue is full."}`, 0},
		{503, "no healthy upstream", 3},
		{500, "{}", 3},
		{401, "{}", 0},
		{404, "{}", 0},
		{408, "{}", 0},
	} {
		g := newGateway(t, world.Setup{Engines: world.Wholes()[:1]})
		for range 3 {
			x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
			x.answers(tt.status, "application/json", "", tt.body)
			if err := x.ended(); err != nil {
				t.Error(err)
			}
		}
		g.settled()
		if n := g.at("10.0.0.1:80").Breaker.Failures(); n != tt.failures {
			t.Errorf("%d %s: %d failures, want %d", tt.status, tt.body, n, tt.failures)
		}
	}
}

// TestGatewayPrefix: the endpoint is the longest end of the path. The prefix, which the gateway
// removes later, and the query stay.
func TestGatewayPrefix(t *testing.T) {
	for _, tt := range []struct{ client, want string }{
		{"/v1/completions", ""},
		{"/llama/v1/completions", ""},
		{"/a/b/v1/v1/completions?x=1&y=%2F", ""},
		{"/v1/completions?x=1", ""},
		{"/llama%20x/v1/completions", ""},
		{"/llama/v1/completions/?x=1", "/llama/v1/completions?x=1"},
		{"/llama/extra/route?kv_transfer_params=1", "/llama/extra/route"},
		{"/extra/route?x=1", ""},
	} {
		g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.Server.EngineRoutes = []string{"/extra/route"} }})
		x := g.ask(duplex, nil, []string{":path", tt.client}, world.Completions(false)).decided()
		if x.immediate != nil {
			t.Errorf("%s: %s", tt.client, x.immediate.GetBody())
			x.cancel()
			continue
		}
		if got := x.set[":path"]; got != tt.want {
			t.Errorf("%s became %q, want %q", tt.client, got, tt.want)
		}
		x.finish()
	}
	t.Run("refused", func(t *testing.T) {
		for _, path := range []string{"/llama/v1/other", "/v1/completions/more", "/xv1/completions", "/llama", "/"} {
			g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.EPP.PassThrough = false }})
			x := g.ask(duplex, nil, []string{":path", path}, world.Completions(false)).decided()
			if s := x.immediate.GetStatus().GetCode(); s != 404 {
				t.Errorf("%s: got %d", path, s)
			}
			x.cancel()
		}
	})
	t.Run("models", func(t *testing.T) {
		for _, path := range []string{"/v1/models", "/llama/v1/models"} { // requests without a body
			g := newGateway(t, world.Setup{Engines: world.Wholes()})
			x := g.ask(duplex, nil, []string{":path", path, ":method", "GET"}).decided()
			if s := x.immediate.GetStatus().GetCode(); s != 200 || !strings.Contains(string(x.immediate.GetBody()), `"id":"m"`) {
				t.Errorf("%s: got %d %s", path, s, x.immediate.GetBody())
			}
			x.cancel()
		}
	})
}

// TestGatewayRefusals: the gateway answers with the picker's errors in OpenAI's form.
func TestGatewayRefusals(t *testing.T) {
	tests := []struct {
		name, body, code string
		status           int
		config           func(*config.Config)
	}{
		{"malformed body", `{"model":`, "invalid_json", 400, nil},
		{"unknown model", `{"model":"other","prompt":"x"}`, "model_not_found", 404, nil},
		{"body too large", world.Completions(false), "body_too_large", 413, func(c *config.Config) { c.Server.MaxBody = 10 }},
	}
	for _, tt := range tests {
		for _, m := range []modes{duplex, {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_NONE}} {
			g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: tt.config})
			x := g.ask(m, nil, nil, tt.body).decided()
			if s := int(x.immediate.GetStatus().GetCode()); s != tt.status || !strings.Contains(string(x.immediate.GetBody()), `"`+tt.code+`"`) {
				t.Errorf("%s: %d %s", tt.name, s, x.immediate.GetBody())
			}
			x.cancel()
		}
	}
	t.Run("too many requests", func(t *testing.T) {
		g := newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.Limits.MaxExchanges, c.Limits.Queue = 1, 0 }})
		first := g.ask(duplex, nil, nil, world.Completions(false)).decided()
		x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
		if s := x.immediate.GetStatus().GetCode(); s != 429 {
			t.Errorf("got status %d, want 429", s)
		}
		x.cancel()
		first.finish()
	})
	t.Run("no key", func(t *testing.T) {
		g := newGateway(t, world.Setup{Engines: world.Wholes(), Keys: "me 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n"})
		x := g.ask(duplex, nil, nil, world.Completions(false)).decided()
		if s := x.immediate.GetStatus().GetCode(); s != 401 {
			t.Errorf("got status %d, want 401", s)
		}
		x.cancel()
		x = g.ask(duplex, nil, []string{"authorization", "Bearer secret"}, world.Completions(false)).decided()
		if !x.removed["authorization"] {
			t.Errorf("the engine would get the key of the client: %v", x.removed)
		}
		x.finish()
	})
}

// The gateway adds the lines of the tenant's budgets to the answer of the engine, and to that of
// the picker if the budgets do not suffice.
func TestGatewayTenant(t *testing.T) {
	for _, m := range []modes{duplex, {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_NONE}} {
		g := newGateway(t, world.Setup{Engines: world.Wholes(), Keys: world.TenantLine("a", "rpm=1 tpm=60000")})
		key := []string{"authorization", "Bearer a-key"}
		x := g.ask(m, nil, key, world.Completions(false)).decided()
		var parts []string
		if m == duplex {
			parts = append(parts, wholeAnswer)
		}
		x.answers(200, "application/json", "", parts...)
		x.cancel()
		for name, want := range map[string]string{"limit-requests": "1", "remaining-requests": "0", "reset-requests": "1m0s", "limit-tokens": "60000"} {
			if got := x.shown["x-ratelimit-"+name]; got != want {
				t.Errorf("x-ratelimit-%s: %q, want %q", name, got, want)
			}
		}
		if x.shown["retry-after"] != "" || x.shown["x-ratelimit-remaining-tokens"] == "" || x.shown["x-ratelimit-reset-tokens"] == "" {
			t.Errorf("lines of the answer: %v", x.shown)
		}
		x = g.ask(m, nil, key, world.Completions(false)).decided()
		lines := setBy(x.immediate.GetHeaders())
		wait, err := strconv.Atoi(lines["retry-after"])
		if s := x.immediate.GetStatus().GetCode(); s != 429 || err != nil || wait < 1 || wait > 60 || lines["x-ratelimit-remaining-requests"] != "0" ||
			lines["x-ratelimit-limit-tokens"] != "60000" || !strings.Contains(string(x.immediate.GetBody()), `"type":"requests","param":null,"code":"rate_limit_exceeded"`) {
			t.Errorf("above the limit: %d %v %s", s, lines, x.immediate.GetBody())
		}
		x.cancel()
	}
}

// TestGatewayLeaves: the lease ends with the gateway's stream, before and inside an answer.
func TestGatewayLeaves(t *testing.T) {
	for _, answered := range []bool{false, true} {
		for _, regular := range []bool{false, true} {
			g := newGateway(t, world.Setup{Engines: world.Wholes()})
			x := g.ask(duplex, nil, nil, world.Completions(true)).decided()
			if answered {
				x.endless = true
				x.answers(200, "text/event-stream", "", "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
			}
			if g.Local.Open() != 1 {
				t.Errorf("%d leases are open", g.Local.Open())
			}
			if regular {
				if err := x.stream.CloseSend(); err != nil {
					t.Fatal(err)
				}
				if err := x.ended(); err != nil {
					t.Error(err)
				}
			}
			x.cancel()
			for g.Local.Open() != 0 || g.Running() != 0 {
				time.Sleep(time.Millisecond)
			}
			g.Outcome(telemetry.OutcomeCancelled)
		}
	}
}

// TestGatewayMisuse: ways to configure a gateway that cannot be served.
func TestGatewayMisuse(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes()})
	for _, m := range []filter.ProcessingMode_BodySendMode{filter.ProcessingMode_NONE, filter.ProcessingMode_STREAMED, filter.ProcessingMode_GRPC} {
		x := g.ask(modes{m, m}, nil, nil, world.Completions(false))
		if err := x.ended(); grpcstatus.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), m.String()) {
			t.Errorf("mode %s: %v", m, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for name, first := range map[string]*extproc.ProcessingRequest{
		"no header":     {Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{}}},
		"no message":    {},
		"observability": {ObservabilityMode: true, Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{}}},
	} {
		s, err := extproc.NewExternalProcessorClient(g.conn).Process(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(first); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(); grpcstatus.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestGatewayHealth: the services of the health protocol. (Endpoint picker protocol, Health
// Checking.)
func TestGatewayHealth(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes()})
	health := grpc_health_v1.NewHealthClient(g.conn)
	check := func(service string) grpc_health_v1.HealthCheckResponse_ServingStatus {
		r, err := health.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetStatus()
	}
	const ready = "envoy.service.ext_proc.v3.ExternalProcessor"
	for _, service := range []string{"", "liveness", "readiness", ready} {
		if s := check(service); s != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Errorf("%q: %s", service, s)
		}
	}
	if _, err := health.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{Service: "other"}); grpcstatus.Code(err) != codes.NotFound {
		t.Errorf("an unknown service: %v", err)
	}
	g.Drain()
	for check(ready) != grpc_health_v1.HealthCheckResponse_NOT_SERVING || check("readiness") != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		time.Sleep(time.Millisecond)
	}
	if s := check("liveness"); s != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("liveness during the drain: %s", s)
	}
}
