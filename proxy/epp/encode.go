package epp

import (
	"math"
	"net/http"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
)

// message is an encoded ProcessingResponse, or a part of it. Source of the field numbers:
// envoy/service/ext_proc/v3/external_processor.proto, envoy/config/core/v3/base.proto and
// google/protobuf/struct.proto.
type message []byte

// usual is the room for a short piece of a message, on the stack.
const usual = 128

// with returns m with a further field that has a length.
func (m message) with(number protowire.Number, value []byte) message {
	return protowire.AppendBytes(protowire.AppendTag(m, number, protowire.BytesType), value)
}

// text is with for a text.
func (m message) text(number protowire.Number, value string) message {
	return protowire.AppendString(protowire.AppendTag(m, number, protowire.BytesType), value)
}

// number returns m with a further varint.
func (m message) number(number protowire.Number, value uint64) message {
	return protowire.AppendVarint(protowire.AppendTag(m, number, protowire.VarintType), value)
}

// within returns m as the only field of a message.
func (m message) within(number protowire.Number) message {
	const room = 8 // a tag and a length
	return make(message, 0, len(m)+room).with(number, m)
}

// answerTo returns the answer to the message of that field, which has response as its content: a
// HeadersResponse, a BodyResponse or a TrailersResponse.
func answerTo(of protowire.Number, response message) message { return response.within(of - 1) }

// carryOn is the answer that changes nothing in a header or a buffered part of a body. Its
// CommonResponse is empty.
func carryOn(of protowire.Number) message { return answerTo(of, message(nil).within(1)) }

// set returns a HeaderMutation with a further line to set: set_headers (1), a HeaderValueOption of
// header (1), with key (1) and raw_value (3), and append_action (3).
func (m message) set(name, value string, action core.HeaderValueOption_HeaderAppendAction) message {
	header := protowire.SizeTag(1) + protowire.SizeBytes(len(name)) + protowire.SizeTag(3) + protowire.SizeBytes(len(value))
	option := protowire.SizeTag(1) + protowire.SizeBytes(header) + protowire.SizeTag(3) + protowire.SizeVarint(uint64(action))
	m = appendHead(m, 1, option)
	m = appendHead(m, 1, header)
	return m.text(1, name).text(3, value).number(3, uint64(action))
}

// remove returns a HeaderMutation with a further line to remove: remove_headers (2).
func (m message) remove(name string) message { return m.text(2, name) }

// headersOf returns the header lines of an answer as a HeaderMutation.
func headersOf(h http.Header) (m message) {
	for name, values := range h {
		action := core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
		for _, value := range values {
			m = m.set(strings.ToLower(name), value, action)
			action = core.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
		}
	}
	return m
}

// immediate returns the answer that the gateway sends to the client itself: immediate_response (7)
// with status (1), headers (2), body (3), grpc_status (4) and details (5). call is the status for a
// client of gRPC; nil: the client is none.
func immediate(status int, header http.Header, body []byte, call *codes.Code) message {
	m := message(nil).with(1, message(nil).number(1, uint64(status))).with(2, headersOf(header)).with(3, body)
	if call != nil {
		m = m.with(4, message(nil).number(1, uint64(*call)))
	}
	return m.text(5, "pdproxy").within(7)
}

// The next three functions encode a google.protobuf.Struct: fields (1) is a map with key (1) and
// value (2).

// fact returns a Struct with a further text; an empty one is left out.
func (m message) fact(name, value string) message {
	if value == "" {
		return m
	}
	content := make(message, 0, usual).text(3, strings.ToValidUTF8(value, "?")) // Value.string_value
	return m.with(1, make(message, 0, usual).text(1, name).with(2, content))
}

// count returns a Struct with a further number; a negative one is left out.
func (m message) count(name string, n int64) message {
	if n < 0 {
		return m
	}
	value := protowire.AppendFixed64(protowire.AppendTag(make(message, 0, usual), 2, protowire.Fixed64Type), math.Float64bits(float64(n))) // Value.number_value
	return m.with(1, make(message, 0, usual).text(1, name).with(2, value))
}

// space returns dynamic metadata, which is a Struct of namespaces, with a further namespace.
func (m message) space(name string, facts message) message {
	size := protowire.SizeTag(5) + protowire.SizeBytes(len(facts)) // Value.struct_value
	m = appendHead(m, 1, protowire.SizeTag(1)+protowire.SizeBytes(len(name))+protowire.SizeTag(2)+protowire.SizeBytes(size))
	return appendHead(m.text(1, name), 2, size).with(5, facts)
}
