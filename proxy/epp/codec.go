package epp

import (
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // for all messages but parts of bodies
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// Field numbers of the oneof of ProcessingRequest. ProcessingResponse has each of them one
// number below. Source: envoy/service/ext_proc/v3/external_processor.proto.
const (
	fieldRequestHeaders   protowire.Number = 2
	fieldRequestBody      protowire.Number = 4
	fieldResponseBody     protowire.Number = 5
	fieldResponseTrailers protowire.Number = 7
)

// incoming is a message of a gateway. Parts of bodies, which are most of the bytes, are not
// decoded by protobuf and not copied.
type incoming struct {
	*extproc.ProcessingRequest                  // nil: the message has a part of a body and needed no protobuf
	of                         protowire.Number // fieldRequestBody or fieldResponseBody; 0: no part of a body
	body                       []byte           // the part; valid until release
	over                       bool             // the part is the last one
	held                       mem.Buffer       // has body; nil: the garbage collector has
	offset                     int              // of body in held
}

// release frees the memory of the part. The zero value and nil have none.
func (m *incoming) release() {
	if m != nil && m.held != nil {
		m.held.Free()
		m.held, m.body = nil, nil
	}
}

// outgoing is a part of a body for the gateway, in FULL_DUPLEX_STREAMED mode.
type outgoing struct {
	of   protowire.Number // of the oneof of ProcessingRequest
	over bool
	data mem.Buffer // Marshal takes the reference; nil: the part is empty
}

// returned is the part m for the gateway, without a copy.
func returned(m *incoming) *outgoing {
	o := &outgoing{of: m.of, over: m.over}
	switch {
	case len(m.body) == 0:
	case m.held != nil:
		o.data = m.held.Slice(m.offset, m.offset+len(m.body))
	default:
		o.data = mem.SliceBuffer(m.body)
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
	whole := data.MaterializeToBuffer(mem.DefaultBufferPool())
	if m.decode(whole.ReadOnlyData()) {
		m.held = whole
		return nil
	}
	whole.Free()
	m.ProcessingRequest = new(extproc.ProcessingRequest)
	if err := c.proto.Unmarshal(data, m.ProcessingRequest); err != nil {
		return err
	}
	if b := m.GetRequestBody(); b != nil {
		m.of, m.body, m.over = fieldRequestBody, b.GetBody(), b.GetEndOfStream()
	} else if b := m.GetResponseBody(); b != nil {
		m.of, m.body, m.over = fieldResponseBody, b.GetBody(), b.GetEndOfStream()
	}
	return nil
}

// decode reads a message that has one part of a body, in the form that gateways send. It reports
// false for each other message, also for a malformed one: protobuf decodes these. Metadata and
// attributes beside a part are not read.
func (m *incoming) decode(raw []byte) bool {
	var of protowire.Number
	var part []byte
	at := 0 // of part in raw
	for rest := raw; len(rest) > 0; {
		number, kind, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return false
		}
		size := protowire.ConsumeFieldValue(number, kind, rest[n:])
		if size < 0 {
			return false
		}
		if number >= fieldRequestHeaders && number <= fieldResponseTrailers {
			if of != 0 || kind != protowire.BytesType || number != fieldRequestBody && number != fieldResponseBody {
				return false
			}
			of = number
			part, _ = protowire.ConsumeBytes(rest[n:])
			at = len(raw) - len(rest) + n + size - len(part)
		}
		rest = rest[n+size:]
	}
	if of == 0 || !m.decodePart(part) {
		return false
	}
	m.of = of
	m.offset += at
	return true
}

// decodePart reads HttpBody. It reports false if the message has more than body (1) and
// end_of_stream (2), or has one of them twice.
func (m *incoming) decodePart(raw []byte) bool {
	var body []byte
	over, offset, seen := false, 0, protowire.Number(0)
	for rest := raw; len(rest) > 0; {
		number, kind, n := protowire.ConsumeTag(rest)
		if n < 0 || number <= seen {
			return false
		}
		switch seen = number; {
		case number == 1 && kind == protowire.BytesType:
			value, size := protowire.ConsumeBytes(rest[n:])
			if size < 0 {
				return false
			}
			body, n = value, n+size
			offset = len(raw) - len(rest) + n - len(value)
		case number == 2 && kind == protowire.VarintType:
			value, size := protowire.ConsumeVarint(rest[n:])
			if size < 0 {
				return false
			}
			over, n = value != 0, n+size
		default:
			return false
		}
		rest = rest[n:]
	}
	m.body, m.over, m.offset = body, over, offset
	return true
}

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	o, ok := v.(*outgoing)
	if !ok {
		return c.proto.Marshal(v)
	}
	length := 0
	if o.data != nil {
		length = o.data.Len()
	}
	head := o.head(length)
	if o.data == nil {
		return mem.BufferSlice{mem.SliceBuffer(head)}, nil
	}
	return mem.BufferSlice{mem.SliceBuffer(head), o.data}, nil
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
