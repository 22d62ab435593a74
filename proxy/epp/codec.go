package epp

import (
	"errors"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // for the health service
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/structpb"
)

// Field numbers of the oneof of ProcessingRequest. ProcessingResponse has each of them one
// number below. Source: envoy/service/ext_proc/v3/external_processor.proto.
const (
	fieldRequestHeaders   protowire.Number = 2
	fieldResponseHeaders  protowire.Number = 3
	fieldRequestBody      protowire.Number = 4
	fieldResponseBody     protowire.Number = 5
	fieldRequestTrailers  protowire.Number = 6
	fieldResponseTrailers protowire.Number = 7
)

// incoming is a ProcessingRequest of a gateway. Parts of bodies are not copied. The zero value has
// nothing.
type incoming struct {
	of    protowire.Number // the field of the oneof; 0: none
	lines []line           // of a header
	body  []byte           // a part of a body; valid until release
	over  bool             // the header or the part is the end of the request or of the answer

	observes                  bool                               // observability_mode
	configured                bool                               // protocol_config is present and has the next two
	requestMode, responseMode filter.ProcessingMode_BodySendMode // body modes
	subset                    *structpb.Value                    // metadata of a header: the allowed endpoints; nil: all
	served                    string                             // metadata of a header: the endpoint that has answered; "": unknown

	size   int        // of the message, in bytes
	held   mem.Buffer // has body; nil: there is none
	offset int        // of body in held
	stream *arriving  // counts the message until release; nil: no longer
}

// line is one header line. Pseudo-headers begin with a colon.
type line struct{ name, value string }

// release frees the memory of the part. The zero value and nil have none.
func (m *incoming) release() {
	if m == nil {
		return
	}
	if m.held != nil {
		m.held.Free()
		m.held, m.body = nil, nil
	}
	m.stream.taken(m.size)
	m.stream = nil
}

// counted ends the counting of a message without a part of a body, when the message is handled.
// The long header of a request counts until the end of the stream, because the request has it.
func (m *incoming) counted() {
	const long = 16 << 10
	if m != nil && m.body == nil && (m.of != fieldRequestHeaders || m.size <= long) {
		m.release()
	}
}

// shorten drops the header lines of a message of more than most bytes. A request with such a
// header is refused.
func (m *incoming) shorten(most int) {
	if m.size > most {
		m.lines, m.subset = nil, nil
	}
}

// outgoing is a part of a body for the gateway, in FULL_DUPLEX_STREAMED mode.
type outgoing struct {
	of   protowire.Number // of the oneof of ProcessingRequest
	over bool
	data mem.Buffer // Marshal takes the reference; nil: the part is empty
	tail []byte     // further fields of the ProcessingResponse
}

// returned is the part m for the gateway, without a copy.
func returned(m *incoming) *outgoing {
	o := &outgoing{of: m.of, over: m.over}
	if len(m.body) == 0 {
		return o
	}
	o.data = m.held.Slice(m.offset, m.offset+len(m.body))
	if len(m.body) > writeQuota && m.stream != nil {
		o.data = m.stream.lend(m.body, o.data)
	}
	return o
}

// codec is the codec of grpc-go for all messages of the server. Safe for concurrent use.
type codec struct{ proto encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Name implements encoding.CodecV2.
func (c codec) Name() string { return c.proto.Name() }

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*incoming)
	if !ok {
		return c.proto.Unmarshal(data, v)
	}
	m.size = data.Len()
	whole := data.MaterializeToBuffer(mem.DefaultBufferPool())
	if !m.decode(whole.ReadOnlyData()) {
		whole.Free()
		return errMalformed
	}
	if m.body != nil {
		m.held = whole
	} else {
		whole.Free()
	}
	return nil
}

var errMalformed = errors.New("the message is no ProcessingRequest")

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	switch o := v.(type) {
	case mem.Buffer:
		return mem.BufferSlice{o}, nil
	case message:
		return mem.BufferSlice{mem.SliceBuffer(o)}, nil
	case *outgoing:
		if o.data == nil {
			return mem.BufferSlice{mem.SliceBuffer(append(o.head(0), o.tail...))}, nil
		}
		parts := mem.BufferSlice{mem.SliceBuffer(o.head(o.data.Len())), o.data}
		if o.tail != nil {
			parts = append(parts, mem.SliceBuffer(o.tail))
		}
		return parts, nil
	}
	return c.proto.Marshal(v)
}

// head returns the message up to a part of that length: ProcessingResponse, BodyResponse
// (response = 1), CommonResponse (body_mutation = 3), BodyMutation (streamed_response = 3) and
// StreamedBodyResponse (end_of_stream = 2, body = 1).
func (o *outgoing) head(length int) []byte {
	const room = 48 // six tags and lengths
	streamed := 0
	if o.over {
		streamed += protowire.SizeTag(2) + protowire.SizeVarint(1)
	}
	if length > 0 {
		streamed += protowire.SizeTag(1) + protowire.SizeBytes(length)
	}
	mutation := protowire.SizeTag(3) + protowire.SizeBytes(streamed)
	common := protowire.SizeTag(3) + protowire.SizeBytes(mutation)
	response := protowire.SizeTag(1) + protowire.SizeBytes(common)
	b := make([]byte, 0, room)
	b = appendHead(b, o.of-1, response)
	b = appendHead(b, 1, common)
	b = appendHead(b, 3, mutation)
	b = appendHead(b, 3, streamed)
	if o.over {
		b = protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), 1)
	}
	if length > 0 {
		b = appendHead(b, 1, length)
	}
	return b
}

// appendHead appends the tag and the length of a field with that many bytes.
func appendHead(b []byte, number protowire.Number, size int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.BytesType), uint64(size))
}
