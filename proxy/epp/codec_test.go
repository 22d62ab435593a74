package epp

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	envoytype "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
)

// FuzzMessage: the codec reads in each message that protobuf decodes the same facts as protobuf, and
// decodes a part that goes back.
func FuzzMessage(f *testing.F) {
	metadata := &core.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb": {}}}
	for _, m := range []*extproc.ProcessingRequest{
		{},
		{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte("body")}}, MetadataContext: metadata},
		{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{EndOfStream: true}}},
		{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: make([]byte, 300), EndOfStream: true}}},
		{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{EndOfStreamWithoutMessage: true}}},
		{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{EndOfStream: true}}, MetadataContext: metadata},
		{Request: &extproc.ProcessingRequest_ResponseTrailers{}},
		{Request: &extproc.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extproc.HttpTrailers{Trailers: &core.HeaderMap{Headers: []*core.HeaderValue{{Key: "grpc-status", RawValue: []byte("14")}}}}}},
		{Request: &extproc.ProcessingRequest_RequestTrailers{RequestTrailers: &extproc.HttpTrailers{}}, ObservabilityMode: true},
		{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{Headers: &core.HeaderMap{Headers: []*core.HeaderValue{
			{Key: ":status", RawValue: []byte("200")}, {Key: "content-type", Value: "text/event-stream"}, {Key: "empty"},
		}}}}, MetadataContext: metadataWith("envoy.lb", "x-gateway-destination-endpoint-served", structpb.NewStringValue("127.0.0.1:1")),
			ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: filter.ProcessingMode_BUFFERED, ResponseBodyMode: filter.ProcessingMode_STREAMED}},
		{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{}},
			MetadataContext: metadataWith("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{structpb.NewStringValue("127.0.0.1:1")}}))},
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	for _, seed := range []string{
		"\x22\x06\x0a\x01a\x0a\x01b",                // a body twice
		"\x22\x03\x0a\x01a\x2a\x02\x10\x01",         // two parts
		"\x22\x03\x0a\x01a\x22\x02\x10\x01",         // a part in two pieces
		"\x22\x02\x10\x02",                          // true is not 1
		"\x1a\x00\x58\x01\x58\x00",                  // a field of a message as a varint, and twice
		"\x12\x00\x50\x01\x50\x00",                  // observability_mode twice
		"\x12\x09\x0a\x07\x0a\x05\x1a\x01r\x12\x00", // raw_value before value
		"\x12\x07\x0a\x05\x0a\x03\x12\x01v\x1a\x00", // HeaderValue in a HeaderMap, then a trailer's field
		"\x15\x01\x02\x03\x04\x12\x02\x18\x01",      // a field of four bytes
		"\x13\x08\x01\x14\x12\x00",                  // a group
		"\x5a\x02\x08\x04\x5a\x02\x10\x02\x12\x00",  // protocol_config in two pieces, first
	} {
		f.Add([]byte(seed))
	}
	again := func(first, second *structpb.Value) { // metadata in two pieces: the last value of a key counts
		raw := []byte{0x12, 0}
		for _, v := range []*structpb.Value{first, second} {
			b, err := proto.Marshal(&extproc.ProcessingRequest{MetadataContext: metadataWith("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", v)})
			if err != nil {
				f.Fatal(err)
			}
			raw = append(raw, b...)
		}
		f.Add(raw)
	}
	again(structpb.NewStringValue("10.0.0.1:1"), structpb.NewStringValue("10.0.0.2:1"))
	again(structpb.NewStringValue("10.0.0.1:1"), nil)
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, want, m := new(extproc.ProcessingRequest), new(incoming), new(incoming)
		failed := proto.Unmarshal(raw, p)
		ok := m.accept(grpcserver.Message{Data: raw})
		if failed != nil {
			return // what nobody needs is not read
		}
		want.read(p)
		if !ok || m.of != want.of || !slices.Equal(m.lines, want.lines) || !bytes.Equal(m.body, want.body) || m.over != want.over || m.observes != want.observes ||
			m.configured != want.configured || m.requestMode != want.requestMode || m.responseMode != want.responseMode || !proto.Equal(m.subset, want.subset) || m.served != want.served {
			t.Fatalf("got %+v, %t, want %+v", m, ok, want)
		}
		if m.of == fieldRequestBody || m.of == fieldResponseBody {
			sendBack(t, m)
		}
	})
}

// read takes the facts of a message that the generated code has decoded.
func (m *incoming) read(p *extproc.ProcessingRequest) {
	header := func(of protowire.Number, h *extproc.HttpHeaders) {
		m.of, m.over = of, h.GetEndOfStream()
		for _, v := range h.GetHeaders().GetHeaders() {
			value := string(v.GetRawValue())
			if value == "" {
				value = v.GetValue()
			}
			m.lines = append(m.lines, line{v.GetKey(), value})
		}
		spaces := p.GetMetadataContext().GetFilterMetadata()
		m.subset = spaces["envoy.lb.subset_hint"].GetFields()["x-gateway-destination-endpoint-subset"]
		m.served = spaces["envoy.lb"].GetFields()["x-gateway-destination-endpoint-served"].GetStringValue()
	}
	part := func(of protowire.Number, b *extproc.HttpBody) {
		m.of, m.body, m.over = of, b.GetBody(), b.GetEndOfStream()
	}
	switch r := p.GetRequest().(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		header(fieldRequestHeaders, r.RequestHeaders)
	case *extproc.ProcessingRequest_ResponseHeaders:
		header(fieldResponseHeaders, r.ResponseHeaders)
	case *extproc.ProcessingRequest_RequestBody:
		part(fieldRequestBody, r.RequestBody)
	case *extproc.ProcessingRequest_ResponseBody:
		part(fieldResponseBody, r.ResponseBody)
	case *extproc.ProcessingRequest_RequestTrailers:
		m.of = fieldRequestTrailers
	case *extproc.ProcessingRequest_ResponseTrailers:
		header(fieldResponseTrailers, &extproc.HttpHeaders{Headers: r.ResponseTrailers.GetTrailers()})
		m.subset, m.served = nil, ""
	}
	m.observes = p.GetObservabilityMode()
	if c := p.GetProtocolConfig(); c != nil {
		m.configured, m.requestMode, m.responseMode = true, c.GetRequestBodyMode(), c.GetResponseBodyMode()
	}
}

// metadataWith returns metadata with one value.
func metadataWith(space, key string, v *structpb.Value) *core.Metadata {
	return &core.Metadata{FilterMetadata: map[string]*structpb.Struct{space: {Fields: map[string]*structpb.Value{key: v}}}}
}

// sendBack returns the part m as the server does.
func sendBack(t *testing.T, m *incoming) {
	t.Helper()
	got := decoded(t, returned(m.of, m.body, m.over))
	b := got.GetRequestBody()
	if m.of == fieldResponseBody {
		b = got.GetResponseBody()
	}
	s := b.GetResponse().GetBodyMutation().GetStreamedResponse()
	if s == nil || !bytes.Equal(s.GetBody(), m.body) || s.GetEndOfStream() != m.over {
		t.Errorf("sent back %v, want %q %t", got, m.body, m.over)
	}
}

// decoded returns the message as protobuf decodes it.
func decoded(t testing.TB, o outgoing) *extproc.ProcessingResponse {
	t.Helper()
	p := new(extproc.ProcessingResponse)
	if err := proto.Unmarshal(slices.Concat(o.head, o.data, o.tail), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestMessages: protobuf decodes the messages for the gateway.
func TestMessages(t *testing.T) {
	set := func(key, value string, action core.HeaderValueOption_HeaderAppendAction) *core.HeaderValueOption {
		return &core.HeaderValueOption{Header: &core.HeaderValue{Key: key, RawValue: []byte(value)}, AppendAction: action}
	}
	const overwrite, add = core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD, core.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
	long := strings.Repeat("x", 300)
	forwarded := &attempt.Forwarding{Decode: engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: "d0"}}}, Model: "m", Tenant: "a\xff"}
	structOf := func(facts map[string]any) *structpb.Struct {
		s, err := structpb.NewStruct(facts)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	lines := message(nil).set("a", long, overwrite).remove("b").set("c", "", overwrite)
	for name, c := range map[string]struct {
		got  message
		want *extproc.ProcessingResponse
	}{
		"lines": {decisionOn(fieldRequestHeaders, lines, nil, (&stream{space: "own"}).decided(forwarded, "127.0.0.1:1")), &extproc.ProcessingResponse{
			DynamicMetadata: structOf(map[string]any{
				"envoy.lb": map[string]any{"x-gateway-destination-endpoint": "127.0.0.1:1"},
				"own":      map[string]any{"model": "m", "engine": "d0", "tenant": "a?"},
			}),
			Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
				ClearRouteCache: true,
				HeaderMutation:  &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{set("a", long, overwrite), set("c", "", overwrite)}, RemoveHeaders: []string{"b"}},
			}}},
		}},
		"lines and body": {decisionOn(fieldRequestBody, lines, message(nil).with(3, message(long).within(1)), nil), &extproc.ProcessingResponse{
			DynamicMetadata: &structpb.Struct{},
			Response: &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{Response: &extproc.CommonResponse{
				ClearRouteCache: true,
				HeaderMutation:  &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{set("a", long, overwrite), set("c", "", overwrite)}, RemoveHeaders: []string{"b"}},
				BodyMutation:    &extproc.BodyMutation{Mutation: &extproc.BodyMutation_Body{Body: []byte(long)}},
			}}},
		}},
		"trailers": {answerTo(fieldResponseTrailers, nil), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}}},
		"a part that stays": {carryOn(fieldResponseBody), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{
			ResponseBody: &extproc.BodyResponse{Response: &extproc.CommonResponse{}},
		}}},
		"immediate for gRPC": {immediate(404, http.Header{}, []byte("x"), new(codes.NotFound)), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{
			ImmediateResponse: &extproc.ImmediateResponse{
				Status: &envoytype.HttpStatus{Code: envoytype.StatusCode_NotFound}, Headers: &extproc.HeaderMutation{},
				Body: []byte("x"), GrpcStatus: &extproc.GrpcStatus{Status: 5}, Details: "pdproxy",
			},
		}}},
		"immediate": {immediate(429, http.Header{"Retry-After": {"1", "2"}}, []byte(long), nil), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{
			ImmediateResponse: &extproc.ImmediateResponse{
				Status:  &envoytype.HttpStatus{Code: envoytype.StatusCode_TooManyRequests},
				Headers: &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{set("retry-after", "1", overwrite), set("retry-after", "2", add)}},
				Body:    []byte(long), Details: "pdproxy",
			},
		}}},
	} {
		got := decoded(t, outgoing{head: c.got})
		if !proto.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

// BenchmarkMessages decodes the messages of a gateway for a request, and encodes the answers: by
// the codec of the server, and by the code that go-control-plane has generated. Its cpu-ns/op
// contains the garbage collections.
func BenchmarkMessages(b *testing.B) {
	for _, size := range []int{2 << 10, 220 << 10} {
		for _, way := range []string{"own", "generated"} {
			b.Run(fmt.Sprintf("%dKB/%s", size>>10, way), func(b *testing.B) {
				var messages [][]byte
				var answers []*extproc.ProcessingResponse
				for _, raw := range messagesOf(b, size) {
					m := new(incoming)
					if !m.decode(raw) {
						b.Fatal("a message is malformed")
					}
					messages, answers = append(messages, raw), append(answers, decoded(b, answerOf(m)))
				}
				b.ReportAllocs()
				began := usage.ProcessTime()
				for b.Loop() {
					for i, raw := range messages {
						m := new(incoming)
						if way == "own" {
							m.decode(raw)
							answerOf(m)
							continue
						}
						p := new(extproc.ProcessingRequest)
						if err := proto.Unmarshal(raw, p); err != nil {
							b.Fatal(err)
						}
						m.read(p)
						if _, err := proto.Marshal(answers[i]); err != nil {
							b.Fatal(err)
						}
					}
				}
				b.ReportMetric(float64(usage.ProcessTime()-began)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// messagesOf returns the messages of a gateway for a request with a body of that many bytes, and
// for an answer of 1 KB. Their fields are in the order of the numbers, as Envoy sends them.
func messagesOf(b *testing.B, size int) (messages [][]byte) {
	b.Helper()
	const part = 16 << 10 // Envoy sends the bytes that it has read from the client
	add := func(m *extproc.ProcessingRequest) {
		raw, err := proto.Marshal(&extproc.ProcessingRequest{Request: m.Request})
		m.Request = nil
		rest, failed := proto.Marshal(m)
		if err != nil || failed != nil {
			b.Fatal(err, failed)
		}
		messages = append(messages, append(raw, rest...))
	}
	lines := func(texts ...string) *extproc.HttpHeaders {
		h := &core.HeaderMap{}
		for pair := range slices.Chunk(texts, 2) {
			h.Headers = append(h.Headers, &core.HeaderValue{Key: pair[0], RawValue: []byte(pair[1])})
		}
		return &extproc.HttpHeaders{Headers: h}
	}
	const mode = filter.ProcessingMode_FULL_DUPLEX_STREAMED
	add(&extproc.ProcessingRequest{
		Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: lines(":authority", "proxy:8080", ":path", "/v1/chat/completions", ":method", "POST", ":scheme", "http",
			"authorization", "Bearer sk-0123456789012345678901234567890123456789", "content-type", "application/json", "content-length", "2048", "accept", "application/json",
			"user-agent", "OpenAI/Python 2.1.0", "x-forwarded-proto", "http", "x-request-id", "0f8b1c4e-6a41-4c3a-9a3e-1b2c3d4e5f60", "accept-encoding", "gzip, deflate")},
		ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: mode, ResponseBodyMode: mode},
	})
	for body := range slices.Chunk(make([]byte, size), part) {
		add(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: body}}})
	}
	add(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{EndOfStream: true}}})
	add(&extproc.ProcessingRequest{
		Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: lines(":status", "200", "date", "Sun, 29 Nov 2026 12:00:00 GMT", "server", "uvicorn",
			"content-length", "1024", "content-type", "application/json", "x-envoy-upstream-service-time", "12")},
		MetadataContext: metadataWith("envoy.lb", "x-gateway-destination-endpoint-served", structpb.NewStringValue("10.0.0.1:8000")),
	})
	add(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: make([]byte, 1<<10)}}})
	add(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{EndOfStream: true}}})
	return messages
}

// answerOf returns a usual answer of the server: the decision, the head without a change, or the
// part as it is.
func answerOf(m *incoming) outgoing {
	switch m.of {
	case fieldRequestHeaders:
		const overwrite = core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
		lines := message(nil).set("x-gateway-destination-endpoint", "10.0.0.1:8000", overwrite).set("content-length", "2048", overwrite)
		return outgoing{head: decisionOn(m.of, lines, nil, new(stream).decided(nil, "10.0.0.1:8000"))}
	case fieldResponseHeaders:
		return outgoing{head: carryOn(m.of)}
	}
	return returned(m.of, m.body, m.over)
}
