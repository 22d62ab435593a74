package connector

import (
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Encoder is a connector whose engines can use images and sounds that other engines, of
// role encode, have encoded before. Its method is pure and safe for concurrent use.
type Encoder interface {
	// Encode builds the calls that make encoders process the images and sounds of a's
	// request, one call for each part. All calls must succeed before the proxy sends any
	// other leg. The content of their answers is not needed. A request without such parts
	// has no calls.
	Encode(a *Attempt) []Leg
}

// encoded reports whether a vLLM encoder processes a message part of this type. Source,
// in vLLM: examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py MM_TYPES.
func encoded(part []byte) bool {
	kind, _ := openai.Find(part, "type")
	switch string(kind) {
	case `"image_url"`, `"audio_url"`, `"input_audio"`:
		return true
	}
	return false
}

// Encode sends each part in a separate call, and requests one token in case the encoder
// samples. Encoder and prefill must derive the same name for a part: each hashes the
// part's content and the request's processing options. So the proxy copies both unchanged
// and adds no name. Prefill then loads the encoded part under that name
// (vllm/distributed/ec_transfer).
func (nixl) Encode(a *Attempt) []Leg {
	if a.Request.API != openai.Chat {
		return nil
	}
	messages, err := openai.Elements(a.Request.PromptRaw())
	if err != nil {
		return nil
	}
	var legs []Leg
	for message := range messages {
		content, _ := openai.Find(message, "content")
		if len(content) == 0 || content[0] != '[' {
			continue
		}
		parts, err := openai.Elements(content)
		if err != nil {
			continue
		}
		for part := range parts {
			if encoded(part) {
				legs = append(legs, encodeLeg(a, part, len(legs)))
			}
		}
	}
	return legs
}

// encodeLeg returns the call for the n-th part.
func encodeLeg(a *Attempt, part []byte, n int) Leg {
	body := make([]byte, 0, len(part)+512)
	body = append(body, '{')
	for _, key := range [...]string{"model", "mm_processor_kwargs", "media_io_kwargs"} {
		if v, _ := a.Request.Get(key); !openai.IsNull(v) {
			body = openai.AppendQuoted(body, key)
			body = append(append(append(body, ':'), v...), ',')
		}
	}
	body = append(body, `"messages":[{"role":"user","content":[`...)
	body = append(append(body, part...), `]}],"max_tokens":1,"stream":false}`...)
	return Leg{
		Path:   a.Request.API.Path(),
		Header: []Field{{Name: "X-Request-Id", Value: a.LegID + "-e" + strconv.Itoa(n)}},
		Body:   body,
		Unary:  true,
	}
}
