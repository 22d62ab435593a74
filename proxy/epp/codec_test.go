package epp

import (
	"bytes"
	"testing"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

// partOf returns the part of a body in a message of protobuf.
func partOf(m *extproc.ProcessingRequest) (of protowire.Number, body []byte, over bool) {
	if b := m.GetRequestBody(); b != nil {
		return fieldRequestBody, b.GetBody(), b.GetEndOfStream()
	}
	if b := m.GetResponseBody(); b != nil {
		return fieldResponseBody, b.GetBody(), b.GetEndOfStream()
	}
	return 0, nil, false
}

// FuzzPart: the codec reads in each message that protobuf decodes the same part as protobuf, also
// if the message comes in two buffers. The part that goes back is decoded by protobuf.
func FuzzPart(f *testing.F) {
	metadata := &core.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb": {}}}
	for _, m := range []*extproc.ProcessingRequest{
		{},
		{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte("body")}}, MetadataContext: metadata},
		{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{EndOfStream: true}}},
		{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: make([]byte, 300), EndOfStream: true}}},
		{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{EndOfStreamWithoutMessage: true}}},
		{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{EndOfStream: true}}, MetadataContext: metadata},
		{Request: &extproc.ProcessingRequest_ResponseTrailers{}},
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
	f.Fuzz(func(t *testing.T, raw []byte, cut int) {
		want, m := new(extproc.ProcessingRequest), new(incoming)
		failed := proto.Unmarshal(raw, want)
		cut = min(max(0, cut), len(raw))
		err := newCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(raw[:cut]), mem.SliceBuffer(raw[cut:])}, m)
		if failed != nil {
			return // metadata beside a part is not read
		}
		of, body, over := partOf(want)
		if err != nil || m.of != of || !bytes.Equal(m.body, body) || m.over != over {
			t.Fatalf("got %d %q %t, %v, want %d %q %t", m.of, m.body, m.over, err, of, body, over)
		}
		if of == 0 && !proto.Equal(m.ProcessingRequest, want) {
			t.Errorf("got %v, want %v", m.ProcessingRequest, want)
		}
		if of != 0 {
			sendBack(t, m)
		}
		m.release()
	})
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
