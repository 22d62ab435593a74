package vllmgrpc

import (
	"encoding/binary"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/pdproxy/pdproxy/proxy/epp/fields"
)

// maxMessage bounds the message of an answer that is read, in bytes. A longer one, with
// log-probabilities of a long prompt, counts as content without numbers.
const maxMessage = 1 << 20

// Answer turns the messages of an answer into an answer of the HTTP API: whole, or a stream of
// events. Only the beginning, the tokens and the end are true. The zero value is not usable.
type Answer struct {
	Method Method
	Stream bool // the request asks for a stream

	head    [frameHead]byte
	known   int    // bytes of head
	left    int    // bytes of the message that have not come
	message []byte // the bytes that have come
	skipped bool   // the message is not read: it is too long or compressed

	prompt, cached       int64 // tokens; -1: not known
	completion, streamed int64 // tokens of the sequences that have ended, and of those that have not
	whole                bool  // a message says how many tokens a sequence has
}

// Reset prepares for an answer.
func (a *Answer) Reset(m Method, stream bool) {
	*a = Answer{Method: m, Stream: stream, prompt: -1, cached: -1}
}

// contentEvent is the event of a message with content.
const contentEvent = "data: {\"choices\":[{\"text\":\"x\"}]}\n\n"

// Feed takes the next bytes of the answer and appends an event for each message of a stream.
func (a *Answer) Feed(dst, p []byte) []byte {
	for len(p) > 0 {
		if a.known < frameHead {
			n := copy(a.head[a.known:], p)
			p = p[n:]
			if a.known += n; a.known < frameHead {
				break
			}
			a.left = int(binary.BigEndian.Uint32(a.head[1:]))
			a.skipped = a.head[0] != 0 || a.left > maxMessage
		}
		n := min(a.left, len(p))
		if !a.skipped {
			a.message = append(a.message, p[:n]...)
		}
		p = p[n:]
		if a.left -= n; a.left > 0 {
			break
		}
		a.read()
		a.known, a.message = 0, a.message[:0]
		if a.Stream {
			dst = append(dst, contentEvent...)
		}
	}
	return dst
}

// read reads a whole message. A malformed one has no numbers.
func (a *Answer) read() {
	if a.skipped {
		return
	}
	read := a.readEngine
	switch a.Method {
	case EngineEmbed:
		read = a.readEmbed
	case Generate, GenerateStream:
		read = a.readInference
	}
	fields.Each(a.message, read)
}

// readEngine reads a field of vllm.grpc.engine.GenerateResponse: chunk (1) or complete (2), whose
// numbers have the fields from 2 or from 3 on.
func (a *Answer) readEngine(number protowire.Number, value []byte, _ uint64) bool {
	if value == nil || number != 1 && number != 2 {
		return true
	}
	return fields.Each(value, func(field protowire.Number, text []byte, n uint64) bool {
		if text != nil {
			return true
		}
		switch field - number {
		case 1:
			a.prompt = tokens(n)
		case 2:
			if a.streamed = max(a.streamed, tokens(n)); number == 2 {
				a.completion, a.whole = a.completion+tokens(n), true
			}
		case 3:
			a.cached = tokens(n)
		}
		return true
	})
}

// tokens returns a count that a message has: an engine may report any number.
func tokens(n uint64) int64 { return int64(min(n, 1<<32)) }

// readEmbed reads a field of vllm.grpc.engine.EmbedResponse.
func (a *Answer) readEmbed(number protowire.Number, value []byte, n uint64) bool {
	if number == 2 && value == nil {
		a.prompt, a.whole = tokens(n), true
	}
	return true
}

// readInference reads a field of vllm.GenerateResponse: prompt_info (1) or outputs (2).
func (a *Answer) readInference(number protowire.Number, value []byte, _ uint64) bool {
	if value == nil || number != 1 && number != 2 {
		return true
	}
	return fields.Each(value, func(field protowire.Number, inner []byte, n uint64) bool {
		switch {
		case number == 1 && field == 1 && inner == nil: // num_prompt_tokens
			a.prompt = tokens(n)
		case number == 2 && field == 3 && inner == nil: // num_tokens
			a.streamed += tokens(n)
		case number == 2 && field == 8 && inner != nil: // finish_info, with num_output_tokens (1)
			return fields.Each(inner, func(field protowire.Number, text []byte, n uint64) bool {
				if field == 1 && text == nil {
					a.completion, a.whole = a.completion+tokens(n), true
				}
				return true
			})
		}
		return true
	})
}

// End appends the end of an answer with that gRPC status.
func (a *Answer) End(dst []byte, status int) []byte {
	switch {
	case status != 0 && a.Stream:
		dst = strconv.AppendInt(append(dst, `data: {"error":{"code":`...), int64(HTTPStatus(status)), 10)
		return append(dst, "}}\n\ndata: [DONE]\n\n"...)
	case status != 0:
		dst = strconv.AppendInt(append(dst, `{"error":{"code":`...), int64(HTTPStatus(status)), 10)
		return append(dst, "}}"...)
	case a.Stream:
		dst = a.usage(append(dst, `data: {"choices":[]`...))
		return append(dst, "}\n\ndata: [DONE]\n\n"...)
	}
	dst = append(dst, `{"object":"text_completion","choices":[{"text":"x","finish_reason":"stop"}]`...)
	return append(a.usage(dst), '}')
}

// usage appends the member usage, if the engine has reported the tokens of the prompt.
func (a *Answer) usage(dst []byte) []byte {
	if a.prompt < 0 {
		return dst
	}
	completion := a.streamed
	if a.whole {
		completion = a.completion
	}
	dst = strconv.AppendInt(append(dst, `,"usage":{"prompt_tokens":`...), a.prompt, 10)
	dst = strconv.AppendInt(append(dst, `,"completion_tokens":`...), completion, 10)
	if a.cached >= 0 {
		dst = strconv.AppendInt(append(dst, `,"prompt_tokens_details":{"cached_tokens":`...), a.cached, 10)
		dst = append(dst, '}')
	}
	return append(dst, '}')
}
