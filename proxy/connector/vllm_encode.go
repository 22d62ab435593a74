package connector

import (
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Encoder is a connector whose engines can take images and sounds that other
// engines, of role encode, have worked up before. Its method is pure and safe for
// concurrent use.
type Encoder interface {
	// Encode shapes the calls by which encoders work up what a's request holds,
	// one for each part, to be answered with success before any other leg is
	// sent; none for a request without such parts. Nothing of their answers is
	// needed.
	Encode(a *Attempt) []Leg
}

// encoded are the types of message parts that a vLLM encoder takes.
// Source, in vLLM: examples/disaggregated/disaggregated_encoder/
// disagg_epd_proxy.py MM_TYPES.
func encoded(part []byte) bool {
	kind, _ := openai.Find(part, "type")
	switch string(kind) {
	case `"image_url"`, `"audio_url"`, `"input_audio"`:
		return true
	}
	return false
}

// Encode asks for each part by itself, and for one token, should the encoder
// sample at all. Encoder and prefill must find the same name for a part: each
// hashes its content and what the request says about its processing, so that all
// of that goes along as it is, and no name of the proxy's is put in. Prefill then
// loads what is there under the name (vllm/distributed/ec_transfer).
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

// encodeLeg is the call for one part, the n-th.
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
