package epp

import (
	"slices"
	"unicode/utf8"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/epp/fields"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
)

// Further fields of ProcessingRequest.
const (
	fieldMetadata       protowire.Number = 8
	fieldObservability  protowire.Number = 10
	fieldProtocolConfig protowire.Number = 11
)

// merged returns the content of a message whose field occurs again, with value: protobuf merges
// the two as if their contents followed each other.
func merged(before, value []byte) []byte {
	if before == nil {
		return slices.Clip(value)
	}
	return append(before, value...)
}

// decode reads a ProcessingRequest as protobuf does: of a field that occurs twice the last counts,
// and a field of an unexpected type is unknown. It reports false for a malformed message.
// Metadata beside a part of a body, trailers of requests and attributes are not read.
func (m *incoming) decode(raw []byte) bool {
	var metadata []byte
	if !fields.Each(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch {
		case number == fieldObservability && value == nil:
			m.observes = n != 0
		case value == nil:
		case number >= fieldRequestHeaders && number <= fieldResponseTrailers:
			return m.decodeOne(number, value)
		case number == fieldMetadata:
			metadata = merged(metadata, value)
		case number == fieldProtocolConfig:
			m.configured = true
			return m.decodeModes(value)
		}
		return true
	}) {
		return false
	}
	return m.of != fieldRequestHeaders && m.of != fieldResponseHeaders || m.decodeMetadata(metadata)
}

// decodeOne reads the field of the oneof: HttpHeaders, HttpBody or HttpTrailers.
func (m *incoming) decodeOne(of protowire.Number, raw []byte) bool {
	if m.of != of {
		m.of, m.lines, m.body, m.over = of, nil, nil, false
	}
	switch of {
	case fieldRequestHeaders, fieldResponseHeaders:
		return m.decodeHeader(raw)
	case fieldRequestBody, fieldResponseBody:
		return m.decodePart(raw)
	case fieldResponseTrailers: // HttpTrailers has its lines in the field of those of HttpHeaders
		return fields.Each(raw, func(number protowire.Number, value []byte, _ uint64) bool {
			return number != 1 || value == nil || m.decodeLines(value)
		})
	}
	return true
}

// decodeModes reads ProtocolConfiguration: request_body_mode (1) and response_body_mode (2).
func (m *incoming) decodeModes(raw []byte) bool {
	return fields.Each(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch mode := filter.ProcessingMode_BodySendMode(n); {
		case value != nil:
		case number == 1:
			m.requestMode = mode
		case number == 2:
			m.responseMode = mode
		}
		return true
	})
}

// decodeHeader reads HttpHeaders: headers (1) and end_of_stream (3).
func (m *incoming) decodeHeader(raw []byte) bool {
	return fields.Each(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch {
		case number == 1 && value != nil:
			return m.decodeLines(value)
		case number == 3 && value == nil:
			m.over = n != 0
		}
		return true
	})
}

// decodeLines reads HeaderMap: HeaderValue (1) with key (1), value (2) and raw_value (3), which
// takes precedence. All texts share one piece of memory.
func (m *incoming) decodeLines(raw []byte) bool {
	const usual = 16
	if m.lines == nil {
		m.lines = make([]line, 0, usual)
	}
	text := string(raw)
	textOf := func(value []byte) string {
		at := cap(raw) - cap(value)
		return text[at : at+len(value)]
	}
	return fields.Each(raw, func(number protowire.Number, header []byte, _ uint64) bool {
		if number != 1 || header == nil {
			return true
		}
		var key, value, rawValue []byte
		if !fields.Each(header, func(number protowire.Number, content []byte, _ uint64) bool {
			switch {
			case content == nil:
			case number == 1:
				key = content
			case number == 2:
				value = content
			case number == 3:
				rawValue = content
			}
			return content == nil || number > 2 || utf8.Valid(content)
		}) {
			return false
		}
		if len(rawValue) > 0 {
			value = rawValue
		}
		var l line
		if key != nil {
			l.name = textOf(key)
		}
		if value != nil {
			l.value = textOf(value)
		}
		m.lines = append(m.lines, l)
		return true
	})
}

// decodePart reads HttpBody: body (1) and end_of_stream (2).
func (m *incoming) decodePart(raw []byte) bool {
	return fields.Each(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch {
		case number == 1 && value != nil:
			m.body = value
		case number == 2 && value == nil:
			m.over = n != 0
		}
		return true
	})
}

// decodeMetadata reads from core.Metadata, in filter_metadata (1), the two facts of the endpoint
// picker protocol.
func (m *incoming) decodeMetadata(raw []byte) bool {
	return entries(raw, func(space, values []byte) bool {
		switch string(space) {
		case extproc.SubsetSpace:
			m.subset = nil
			return entries(values, func(key, value []byte) (ok bool) {
				if string(key) == extproc.SubsetKey {
					m.subset, ok = valueOf(value)
					return ok
				}
				return true
			})
		case extproc.LBSpace:
			m.served = ""
			return entries(values, func(key, value []byte) (ok bool) {
				if string(key) == extproc.ServedKey {
					m.served, ok = textOf(value)
					return ok
				}
				return true
			})
		}
		return true
	})
}

// valueOf reads a google.protobuf.Value.
func valueOf(raw []byte) (*structpb.Value, bool) {
	v := new(structpb.Value)
	return v, proto.Unmarshal(raw, v) == nil
}

// textOf reads the text of a google.protobuf.Value; "" if the value is no text.
func textOf(raw []byte) (string, bool) {
	const fieldText = 3 // string_value
	if number, kind, n := protowire.ConsumeTag(raw); n > 0 && number == fieldText && kind == protowire.BytesType {
		if text, size := protowire.ConsumeBytes(raw[n:]); size == len(raw)-n && utf8.Valid(text) { // the usual form
			return string(text), true
		}
	}
	v, ok := valueOf(raw)
	return v.GetStringValue(), ok
}

// entries calls each for the entries of the map with the number 1, from texts to messages: a
// message with key (1) and value (2) each. It reports false if the map is malformed or each
// reports false.
func entries(raw []byte, each func(key, value []byte) bool) bool {
	return fields.Each(raw, func(number protowire.Number, entry []byte, _ uint64) bool {
		if number != 1 || entry == nil {
			return true
		}
		var key, value []byte
		return fields.Each(entry, func(number protowire.Number, field []byte, _ uint64) bool {
			switch {
			case field == nil:
			case number == 1:
				key = field
			case number == 2:
				value = merged(value, field)
			}
			return true
		}) && each(key, value)
	})
}
