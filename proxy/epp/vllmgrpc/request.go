package vllmgrpc

import (
	"cmp"
	"strconv"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/pdproxy/pdproxy/proxy/epp/fields"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// request has the facts of a request that placement needs.
type request struct {
	model     string
	adapter   string // engines list it as a model
	text      string
	ids       []uint32
	tokenized bool // ids, not text, is the prompt
	prompt    bool // there is one
	maxTokens uint64
	n         uint64
	stream    bool
	transfer  string // a field that coordinates KV transfers or chooses a rank; "": none
}

// AppendBody appends the body of the API that asks for the same as the message of body. trust permits
// fields by which a client coordinates KV transfers. stream reports whether the request asks for a
// stream. The error is an *openai.Error.
func (m Method) AppendBody(dst, body []byte, trust bool) (form []byte, stream bool, err error) {
	raw, err := message(body)
	if err != nil {
		return dst, false, err
	}
	r := request{stream: m == GenerateStream}
	read := r.readEngine
	switch m {
	case EngineEmbed:
		read = r.readEmbed
	case Generate, GenerateStream:
		read = r.readInference
	}
	switch {
	case !fields.Each(raw, read) || !utf8.ValidString(r.text) || !utf8.ValidString(r.model) || !utf8.ValidString(r.adapter):
		return dst, false, errMalformed
	case r.transfer != "" && !trust:
		return dst, false, openai.NewFieldError(openai.CodeFieldNotAllowed, r.transfer, "'"+r.transfer+"' coordinates engines, and the proxy does not allow it (server.trust_pd_fields)")
	case !r.prompt:
		return dst, false, openai.NewFieldError(openai.CodeMissingRequiredParameter, "prompt", "The request has neither a text nor token ids.")
	}
	return r.append(dst, m.API()), r.stream, nil
}

// append appends the body. A prompt without token ids is an empty list, which the API rejects.
func (r *request) append(dst []byte, api openai.API) []byte {
	dst = append(dst, '{')
	if model := cmp.Or(r.adapter, r.model); model != "" {
		dst = append(openai.AppendQuoted(append(dst, `"model":`...), model), ',')
	}
	if api == openai.Embeddings {
		dst = append(dst, `"input":`...)
	} else {
		dst = append(dst, `"prompt":`...)
	}
	if r.tokenized {
		dst = append(dst, '[')
		for i, id := range r.ids {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(dst, uint64(id), 10)
		}
		dst = append(dst, ']')
	} else {
		dst = openai.AppendQuoted(dst, r.text)
	}
	if r.maxTokens > 0 {
		dst = strconv.AppendUint(append(dst, `,"max_tokens":`...), r.maxTokens, 10)
	}
	if r.n > 1 {
		dst = strconv.AppendUint(append(dst, `,"n":`...), r.n, 10)
	}
	if r.stream {
		dst = append(dst, `,"stream":true,"stream_options":{"include_usage":true}`...)
	}
	return append(dst, '}')
}

// readEngine reads a field of vllm.grpc.engine.GenerateRequest.
func (r *request) readEngine(number protowire.Number, value []byte, n uint64) bool {
	switch {
	case number == 2 && value != nil: // tokenized
		return r.readIDs(value, 2)
	case number == 3 && value != nil: // text
		r.readText(value)
	case number == 4 && value != nil: // sampling_params
		return fields.Each(value, func(number protowire.Number, value []byte, n uint64) bool {
			switch {
			case value != nil:
			case number == 8:
				r.maxTokens = n
			case number == 15:
				r.n = n
			}
			return true
		})
	case number == 5 && value == nil:
		r.stream = n != 0
	case number == 6 || number == 8:
		r.transfer = "kv_transfer_params"
	case number == 9:
		r.transfer = "data_parallel_rank"
	}
	return true
}

// readEmbed reads a field of vllm.grpc.engine.EmbedRequest.
func (r *request) readEmbed(number protowire.Number, value []byte, _ uint64) bool {
	return number != 2 || value == nil || r.readIDs(value, 2)
}

// readInference reads a field of vllm.GenerateRequest.
func (r *request) readInference(number protowire.Number, value []byte, _ uint64) bool {
	switch {
	case value == nil:
	case number == 2: // model
		r.model = string(value)
	case number == 3: // text
		r.readText(value)
	case number == 4: // token_ids
		return r.readIDs(value, 1)
	case number == 6: // sampling
		return fields.Each(value, func(number protowire.Number, value []byte, n uint64) bool {
			if number == 1 && value == nil {
				r.n = n
			}
			return true
		})
	case number == 8: // stopping
		return fields.Each(value, func(number protowire.Number, value []byte, n uint64) bool {
			if number == 1 && value == nil {
				r.maxTokens = n
			}
			return true
		})
	case number == 10: // kv
		return fields.Each(value, func(number protowire.Number, _ []byte, _ uint64) bool {
			if number == 3 || number == 4 {
				r.transfer = "kv_transfer_params"
			}
			return true
		})
	case number == 15: // lora_name
		r.adapter = string(value)
	}
	return true
}

// readText reads a text as the prompt.
func (r *request) readText(value []byte) {
	r.text, r.ids, r.tokenized, r.prompt = string(value), nil, false, true
}

// readIDs reads a message with token ids in the field of that number, packed or not. A second one
// continues the first, as protobuf merges messages.
func (r *request) readIDs(raw []byte, of protowire.Number) bool {
	r.text, r.tokenized, r.prompt = "", true, true
	return fields.Each(raw, func(number protowire.Number, value []byte, n uint64) bool {
		switch {
		case number != of:
		case value == nil:
			r.ids = append(r.ids, uint32(n))
		default:
			for len(value) > 0 {
				id, used := protowire.ConsumeVarint(value)
				if used < 0 {
					return false
				}
				r.ids = append(r.ids, uint32(id))
				value = value[used:]
			}
		}
		return true
	})
}
