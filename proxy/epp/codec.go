package epp

import (
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
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

	size int                // of the message, in bytes
	from grpcserver.Message // has body
}

// line is one header line. Pseudo-headers begin with a colon.
type line struct{ name, value string }

// accept decodes a message. It returns false, and releases the message, if the message is malformed.
func (m *incoming) accept(from grpcserver.Message) bool {
	m.from, m.size = from, len(from.Data)
	if !m.decode(from.Data) {
		m.release()
		return false
	}
	return true
}

// release frees the memory of the part. The zero value and nil have none.
func (m *incoming) release() {
	if m != nil {
		m.from.Release()
		m.body = nil
	}
}

// counted ends the counting of a message without a part of a body, when the message is handled.
// The long header of a request counts until the end of the stream, because the request has it.
func (m *incoming) counted() {
	const long = 16 << 10
	if m.body == nil && (m.of != fieldRequestHeaders || m.size <= long) {
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

var errMalformed = status.Error(codes.Internal, "the message is no ProcessingRequest")

// outgoing is a ProcessingResponse in pieces, so that a part of a body is not copied.
type outgoing struct {
	head message
	data []byte  // a part of a body
	tail message // further fields
}

// returned is a part of a body for the gateway, in FULL_DUPLEX_STREAMED mode. of is the field of the
// oneof of ProcessingRequest. The head has ProcessingResponse, BodyResponse (response = 1),
// CommonResponse (body_mutation = 3), BodyMutation (streamed_response = 3) and StreamedBodyResponse
// (end_of_stream = 2, body = 1).
func returned(of protowire.Number, data []byte, over bool) outgoing {
	const room = 48 // six tags and lengths
	streamed := 0
	if over {
		streamed += protowire.SizeTag(2) + protowire.SizeVarint(1)
	}
	if len(data) > 0 {
		streamed += protowire.SizeTag(1) + protowire.SizeBytes(len(data))
	}
	mutation := protowire.SizeTag(3) + protowire.SizeBytes(streamed)
	common := protowire.SizeTag(3) + protowire.SizeBytes(mutation)
	response := protowire.SizeTag(1) + protowire.SizeBytes(common)
	b := make(message, 0, room)
	b = appendHead(b, of-1, response)
	b = appendHead(b, 1, common)
	b = appendHead(b, 3, mutation)
	b = appendHead(b, 3, streamed)
	if over {
		b = b.number(2, 1)
	}
	if len(data) > 0 {
		b = appendHead(b, 1, len(data))
	}
	return outgoing{head: b, data: data}
}

// appendHead appends the tag and the length of a field with that many bytes.
func appendHead(b message, number protowire.Number, size int) message {
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.BytesType), uint64(size))
}
