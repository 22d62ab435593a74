package epp

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"testing"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	envoytype "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// FuzzMessage: the codec reads in each message that protobuf decodes the same facts as protobuf, also
// if the message comes in two buffers. A part that goes back is decoded by protobuf.
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
		{Request: &extproc.ProcessingRequest_RequestTrailers{RequestTrailers: &extproc.HttpTrailers{}}, ObservabilityMode: true},
		{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{Headers: &core.HeaderMap{Headers: []*core.HeaderValue{
			{Key: ":status", RawValue: []byte("200")}, {Key: "content-type", Value: "text/event-stream"}, {Key: "empty"},
		}}}}, MetadataContext: metadataWith(lbSpace, servedKey, structpb.NewStringValue("127.0.0.1:1")),
			ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: filter.ProcessingMode_BUFFERED, ResponseBodyMode: filter.ProcessingMode_STREAMED}},
		{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{}},
			MetadataContext: metadataWith(subsetSpace, subsetKey, structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{structpb.NewStringValue("127.0.0.1:1")}}))},
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw, 5)
	}
	f.Add([]byte{0x22, 4, 0x0a, 0, 0x0a, 0}, 2)          // a body twice
	f.Add([]byte{0x22, 2, 0x0a, 0, 0x2a, 2, 0x10, 1}, 4) // two parts
	f.Add([]byte{0x22, 2, 0x10, 2}, 3)                   // true is not 1
	f.Add([]byte{0x1a, 0, 0x58, 1, 0x58, 0}, 1)          // a field of a message as a varint, and twice
	f.Add([]byte{0x12, 0, 0x50, 1, 0x50, 0}, 1)          // observability_mode twice
	f.Fuzz(func(t *testing.T, raw []byte, cut int) {
		p, want, m := new(extproc.ProcessingRequest), new(incoming), new(incoming)
		failed := proto.Unmarshal(raw, p)
		cut = min(max(0, cut), len(raw))
		err := newCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(raw[:cut]), mem.SliceBuffer(raw[cut:])}, m)
		if failed != nil {
			return // what nobody needs is not read
		}
		want.read(p)
		if err != nil || m.of != want.of || !slices.Equal(m.lines, want.lines) || !bytes.Equal(m.body, want.body) || m.over != want.over || m.observes != want.observes ||
			m.configured != want.configured || m.requestMode != want.requestMode || m.responseMode != want.responseMode || !proto.Equal(m.subset, want.subset) || m.served != want.served {
			t.Fatalf("got %+v, %v, want %+v", m, err, want)
		}
		if m.of == fieldRequestBody || m.of == fieldResponseBody {
			sendBack(t, m)
		}
		m.release()
	})
}

// metadataWith returns metadata with one value.
func metadataWith(space, key string, v *structpb.Value) *core.Metadata {
	return &core.Metadata{FilterMetadata: map[string]*structpb.Struct{space: {Fields: map[string]*structpb.Value{key: v}}}}
}

// sendBack returns the part m as the server does.
func sendBack(t *testing.T, m *incoming) {
	t.Helper()
	data, err := newCodec().Marshal(returned(m))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Free()
	got := new(extproc.ProcessingResponse)
	if err := proto.Unmarshal(data.Materialize(), got); err != nil {
		t.Fatal(err)
	}
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
func decoded(t *testing.T, m message) *extproc.ProcessingResponse {
	t.Helper()
	data, err := newCodec().Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	p := new(extproc.ProcessingResponse)
	if err := proto.Unmarshal(data.Materialize(), p); err != nil {
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
	lines := message(nil).set("a", long, overwrite).remove("b").set("c", "", overwrite)
	for name, c := range map[string]struct {
		got  message
		want *extproc.ProcessingResponse
	}{
		"lines": {answerTo(fieldRequestHeaders, message(nil).with(2, lines).number(5, 1).within(1)).with(8, metadataOf("127.0.0.1:1")), &extproc.ProcessingResponse{
			DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{lbSpace: structpb.NewStructValue(&structpb.Struct{
				Fields: map[string]*structpb.Value{headerDestination: structpb.NewStringValue("127.0.0.1:1")},
			})}},
			Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
				ClearRouteCache: true,
				HeaderMutation:  &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{set("a", long, overwrite), set("c", "", overwrite)}, RemoveHeaders: []string{"b"}},
			}}},
		}},
		"trailers": {answerTo(fieldResponseTrailers, nil), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}}},
		"a part that stays": {carryOn(fieldResponseBody), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{
			ResponseBody: &extproc.BodyResponse{Response: &extproc.CommonResponse{}},
		}}},
		"immediate": {immediate(429, http.Header{"Retry-After": {"1", "2"}}, []byte(long)), &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{
			ImmediateResponse: &extproc.ImmediateResponse{
				Status:  &envoytype.HttpStatus{Code: envoytype.StatusCode_TooManyRequests},
				Headers: &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{set("retry-after", "1", overwrite), set("retry-after", "2", add)}},
				Body:    []byte(long), Details: "pdproxy",
			},
		}}},
	} {
		got := decoded(t, c.got)
		if !proto.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

// BenchmarkPart decodes a part of an answer of 16 KB and encodes it for the gateway.
func BenchmarkPart(b *testing.B) {
	raw, err := proto.Marshal(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: make([]byte, 16<<10)}}})
	if err != nil {
		b.Fatal(err)
	}
	c, data := newCodec(), mem.BufferSlice{mem.Copy(raw, mem.DefaultBufferPool())}
	b.ReportAllocs()
	for b.Loop() {
		m := new(incoming)
		if err := c.Unmarshal(data, m); err != nil {
			b.Fatal(err)
		}
		out, err := c.Marshal(returned(m))
		if err != nil {
			b.Fatal(err)
		}
		out.Free()
		m.release()
	}
}
