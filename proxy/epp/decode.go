package epp

import (
	"slices"
	"unicode/utf8"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// Further fields of ProcessingRequest.
const (
	fieldMetadata       protowire.Number = 8
	fieldObservability  protowire.Number = 10
	fieldProtocolConfig protowire.Number = 11
)

// read takes the facts of a message that protobuf has decoded.
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
		m.subset = spaces[subsetSpace].GetFields()[subsetKey]
		m.served = spaces[lbSpace].GetFields()[servedKey].GetStringValue()
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
		m.of = fieldResponseTrailers
	}
	m.observes = p.GetObservabilityMode()
	if c := p.GetProtocolConfig(); c != nil {
		m.configured, m.requestMode, m.responseMode = true, c.GetRequestBodyMode(), c.GetResponseBodyMode()
	}
}

// fields calls each for the fields of a message in ascending order of their numbers. It reports
// false if a number does not ascend, a field is malformed or each reports false. value is the
// content of a field with a length, else nil; n is a varint.
func fields(raw []byte, each func(number protowire.Number, value []byte, n uint64) bool) bool {
	last := protowire.Number(0)
	for len(raw) > 0 {
		number, kind, n := protowire.ConsumeTag(raw)
		if n < 0 || number <= last {
			return false
		}
		last, raw = number, raw[n:]
		var value []byte
		var varint uint64
		switch kind {
		case protowire.BytesType:
			value, n = protowire.ConsumeBytes(raw)
		case protowire.VarintType:
			varint, n = protowire.ConsumeVarint(raw)
		default:
			return false
		}
		if n < 0 || !each(number, value, varint) {
			return false
		}
		raw = raw[n:]
	}
	return true
}

// decode reads a message in the form that gateways send: the fields of each message once and in
// the order of their numbers. It reports false for each other message, also for a malformed one:
// protobuf decodes these. Metadata beside a part of a body and attributes are not read.
func (m *incoming) decode(raw []byte) bool {
	var metadata []byte
	ok := fields(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch number {
		case fieldRequestHeaders, fieldResponseHeaders, fieldRequestBody, fieldResponseBody, fieldRequestTrailers, fieldResponseTrailers:
			if m.of != 0 || value == nil {
				return false
			}
			switch m.of = number; number {
			case fieldRequestHeaders, fieldResponseHeaders:
				return m.decodeHeader(value)
			case fieldRequestBody, fieldResponseBody:
				return m.decodePart(value)
			}
		case fieldMetadata:
			metadata = value
			return value != nil
		case fieldObservability:
			m.observes = n != 0
			return value == nil
		case fieldProtocolConfig:
			m.configured = true
			return value != nil && fields(value, func(number protowire.Number, value []byte, n uint64) bool {
				switch mode := filter.ProcessingMode_BodySendMode(n); number {
				case 1:
					m.requestMode = mode
				case 2:
					m.responseMode = mode
				}
				return value == nil
			})
		}
		return true
	})
	if !ok || m.of == 0 {
		return false
	}
	if m.body != nil {
		m.offset = cap(raw) - cap(m.body)
	}
	return m.of != fieldRequestHeaders && m.of != fieldResponseHeaders || m.decodeMetadata(metadata)
}

// decodeHeader reads HttpHeaders: headers (1) and end_of_stream (3).
func (m *incoming) decodeHeader(raw []byte) bool {
	return fields(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch number {
		case 1:
			return value != nil && m.decodeLines(value)
		case 3:
			m.over = n != 0
			return value == nil
		}
		return true
	})
}

// decodeLines reads HeaderMap: HeaderValue (1) with key (1), value (2) and raw_value (3). All
// texts share one piece of memory.
func (m *incoming) decodeLines(raw []byte) bool {
	const usual = 16
	m.lines = make([]line, 0, usual)
	text := string(raw)
	textOf := func(value []byte) string {
		at := cap(raw) - cap(value)
		return text[at : at+len(value)]
	}
	for rest := raw; len(rest) > 0; {
		number, kind, n := protowire.ConsumeTag(rest)
		if n < 0 || number != 1 || kind != protowire.BytesType {
			return false
		}
		header, size := protowire.ConsumeBytes(rest[n:])
		if size < 0 {
			return false
		}
		var l line
		if !fields(header, func(number protowire.Number, value []byte, _ uint64) bool {
			switch {
			case value == nil, number < 3 && !utf8.Valid(value):
				return false
			case number == 1:
				l.name = textOf(value)
			case number == 2, number == 3 && len(value) > 0:
				l.value = textOf(value)
			}
			return true
		}) {
			return false
		}
		m.lines = append(m.lines, l)
		rest = rest[n+size:]
	}
	return true
}

// decodePart reads HttpBody: body (1) and end_of_stream (2).
func (m *incoming) decodePart(raw []byte) bool {
	return fields(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch {
		case number == 1 && value != nil:
			m.body = value
		case number == 2 && value == nil:
			m.over = n != 0
		default:
			return false
		}
		return true
	})
}

// decodeMetadata reads from core.Metadata, in filter_metadata (1), the two facts of the endpoint
// picker protocol.
func (m *incoming) decodeMetadata(raw []byte) bool {
	seen := make([]string, 0, 2)
	return entries(raw, func(space string, fields []byte) bool {
		if space != subsetSpace && space != lbSpace {
			return true
		}
		if slices.Contains(seen, space) {
			return false
		}
		seen = append(seen, space)
		return entries(fields, func(key string, value []byte) bool {
			subset, served := space == subsetSpace && key == subsetKey, space == lbSpace && key == servedKey
			if !subset && !served {
				return true
			}
			v := new(structpb.Value)
			if m.subset != nil && subset || m.served != "" && served || proto.Unmarshal(value, v) != nil {
				return false
			}
			if subset {
				m.subset = v
			} else {
				m.served = v.GetStringValue()
			}
			return true
		})
	})
}

// entries calls each for the entries of the map with the number 1, from texts to messages. It
// reports false if the map is malformed or each reports false.
func entries(raw []byte, each func(key string, value []byte) bool) bool {
	for len(raw) > 0 {
		number, kind, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return false
		}
		size := protowire.ConsumeFieldValue(number, kind, raw[n:])
		if size < 0 {
			return false
		}
		if number == 1 {
			entry, _ := protowire.ConsumeBytes(raw[n:])
			var key string
			var value []byte
			if kind != protowire.BytesType || !fields(entry, func(number protowire.Number, field []byte, _ uint64) bool {
				switch number {
				case 1:
					key = string(field)
				case 2:
					value = field
				}
				return field != nil
			}) || !each(key, value) {
				return false
			}
		}
		raw = raw[n+size:]
	}
	return true
}
