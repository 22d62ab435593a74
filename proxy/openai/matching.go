package openai

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/bits"
)

// The following methods serve the search for a prompt's KV blocks: they return the
// content of the prompt, and the values that separate equal prompts.

// CacheSalt returns the value outside of which the request's blocks must not be shared:
// cache_salt followed by SGLang's extra_key, which that engine joins in the same way.
// Like an id it may point into the body.
func (r *Request) CacheSalt() string {
	salt, extra := r.textAt("cache_salt"), r.textAt("extra_key")
	switch "" {
	case extra:
		return salt
	case salt:
		return extra
	}
	return salt + extra
}

// LoRA returns the name of the adapter that the request selects in addition to its
// model: lora_path of SGLang, lora_request.lora_name of TensorRT-LLM. vLLM's adapters
// are models. Like an id it may point into the body.
func (r *Request) LoRA() string {
	if name := r.textAt("lora_path"); name != "" {
		return name
	}
	return r.textAt("lora_request", "lora_name")
}

// Tools reports whether the request offers tools to the model.
func (r *Request) Tools() bool {
	for _, key := range [...]string{"tools", "functions"} {
		if v, _ := r.Get(key); len(v) > 0 && v[0] == '[' && v[skipSpace(v, 1)] != ']' {
			return true
		}
	}
	return false
}

// Media reports whether the prompt has parts of images and of audio. The types of the
// parts are those of OpenAI's chat and responses, of Anthropic's messages, and of vLLM
// (vllm/entrypoints/chat_utils.py); the fields are those of SGLang's native route
// (python/sglang/srt/managers/io_struct.py).
func (r *Request) Media() (images, audio bool) {
	if v, _ := r.Get("image_data"); !IsNull(v) {
		images = true
	}
	if v, _ := r.Get("audio_data"); !IsNull(v) {
		audio = true
	}
	if r.Prompt != PromptMessages {
		return images, audio
	}
	c := Cursor{Text: r.PromptRaw()}
	c.Walk("", 0, func(key string, _ int, value []byte) bool {
		if key == "type" {
			switch string(value) {
			case `"image_url"`, `"input_image"`, `"image"`, `"image_pil"`, `"image_embeds"`:
				images = true
			case `"input_audio"`, `"audio_url"`, `"audio_embeds"`:
				audio = true
			}
		}
		return true
	})
	return images, audio
}

// MediaParts visits the images, sounds and videos of the prompt that an engine encodes: the raw value
// with the URL or the content of each one. The types and fields are those of Media, and vLLM's
// video_url. A part with a uuid, by which vLLM finds media of earlier requests
// (vllm/renderers/chat_utils/chat_message.py), is visited as its uuid.
func (r *Request) MediaParts(yield func(raw []byte) bool) {
	more := true
	for _, key := range [...]string{"image_data", "audio_data", "video_data"} {
		v, _ := r.Get(key)
		c := Cursor{Text: v}
		switch {
		case IsNull(v):
		case v[0] != '[':
			more = more && yield(v)
		default:
			for c.Open('['); more && c.Next(']'); {
				more = yield(c.Skip())
			}
		}
	}
	if r.Prompt != PromptMessages {
		return
	}
	c := Cursor{Text: r.PromptRaw()}
	c.Walk("", 0, func(key string, lists int, value []byte) bool {
		if more && lists == 1 && value[0] == '{' && (key == "content" || key == "output") {
			if m := medium(value); !IsNull(m) {
				more = yield(m)
				return false
			}
		}
		return more
	})
}

// medium returns what identifies the medium of a part; nothing for parts without a medium.
func medium(part []byte) []byte {
	kind, _ := Find(part, "type")
	field := ""
	switch string(kind) {
	case `"image_url"`, `"audio_url"`, `"video_url"`, `"input_audio"`:
		field = string(kind[1 : len(kind)-1])
	case `"input_image"`:
		field = "image_url"
	case `"image"`:
		field = "source"
	default:
		return nil
	}
	if id, _ := Find(part, "uuid"); !IsNull(id) {
		return id
	}
	v, _ := Find(part, field)
	if IsNull(v) {
		v = part // input_image has a file_id beside its type
	}
	for _, key := range [...]string{"url", "data", "file_id"} {
		if m, _ := Find(v, key); !IsNull(m) {
			return m
		}
	}
	if v[0] == '{' {
		return nil
	}
	return v
}

// PromptText returns bytes that represent the prompt if its token ids are not known:
// the raw text of a string between its quotes, or the raw list of messages or token ids
// up to the end of its last element. So the bytes of a longer list begin with those of
// the shorter one, if the client writes both in the same way, and those of a turn begin
// with those of the previous turn. It is nil for several prompts.
func (r *Request) PromptText() []byte {
	raw, kind := r.PromptRaw(), r.Prompt
	switch kind {
	case PromptTexts, PromptTokenLists:
		if r.PromptCount != 1 {
			return nil
		}
		raw, _ = Find(raw, "0")
	case PromptNone:
		return nil
	}
	end := len(raw) - 1
	if raw[0] == '"' {
		return raw[1:end:end]
	}
	for isSpace(raw[end-1]) {
		end--
	}
	return raw[:end:end]
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }

// Preamble visits the raw values that an engine puts before the prompt or uses to build
// it, in the order of the body. For example, the same messages with other tools make
// another prompt. PromptText does not contain these values.
func (r *Request) Preamble(yield func(raw []byte) bool) {
	for i := range r.members {
		if r.members[i].kind == kindNull {
			continue
		}
		switch key, value := r.at(i); key {
		case "tools", "functions", "system", "instructions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort":
			if !yield(value) {
				return
			}
		}
	}
}

// ErrTokenIDs reports that a request has no usable token ids.
var ErrTokenIDs = errors.New("the prompt is not one list of token ids")

// AppendTokenIDs appends the token ids that the client sent: a prompt that is a list of
// ids (or a list of one such list), or prompt_token_ids beside the messages of a chat. It
// returns ErrTokenIDs and an unchanged dst if the request has no ids, if an id is not an
// integer from 0 to 2^32-1, or if the request has several prompts.
func (r *Request) AppendTokenIDs(dst []uint32) ([]uint32, error) {
	raw := r.rawTokenIDs()
	if len(raw) == 0 || raw[0] != '[' {
		return dst, ErrTokenIDs
	}
	ids := dst
	// The scan has checked the grammar: a digit begins a number, and the bytes that may
	// follow a number are known.
	for i := skipSpace(raw, 1); raw[i] != ']'; {
		n, end, ok := tokenID(raw, i)
		if !ok {
			return dst, ErrTokenIDs
		}
		ids = append(ids, n)
		if i = skipSpace(raw, end); raw[i] == ',' {
			i = skipSpace(raw, i+1)
		}
	}
	if len(ids) == len(dst) {
		return dst, ErrTokenIDs
	}
	return ids, nil
}

// rawTokenIDs returns the raw value that AppendTokenIDs reads, or nothing.
func (r *Request) rawTokenIDs() []byte {
	switch {
	case r.Prompt == PromptTokens:
		return r.PromptRaw()
	case r.Prompt == PromptTokenLists && r.PromptCount == 1:
		raw, _ := Find(r.PromptRaw(), "0")
		return raw
	case r.API == Chat:
		raw, _ := r.Get("prompt_token_ids")
		return raw
	}
	return nil
}

// MaxTokenIDs returns an upper bound of the number of token ids that AppendTokenIDs
// appends. It is exact if the client sent a list of ids.
func (r *Request) MaxTokenIDs() int {
	raw := r.rawTokenIDs()
	if len(raw) == 0 {
		return 0
	}
	return bytes.Count(raw, []byte{','}) + 1
}

// tokenID reads the token id at i; ok is false for any other value.
func tokenID(raw []byte, i int) (id uint32, end int, ok bool) {
	if len(raw)-i >= 8 {
		// Nearly all ids have fewer than eight digits. Move the digits to the upper end
		// of a word, then combine pairs.
		w := binary.LittleEndian.Uint64(raw[i:])
		d := w ^ ones*'0'
		if m := ((d + ones*(0x80-10)) | d) & tops; m != 0 {
			width := bits.TrailingZeros64(m) &^ 7
			d = d << (64 - width) // 0 if width is 0
			d = (d * (10<<8 + 1)) >> 8 & 0x00FF00FF00FF00FF
			d = (d * (100<<16 + 1)) >> 16 & 0x0000FFFF0000FFFF
			d = (d * (10000<<32 + 1)) >> 32
			end = i + width>>3
			return uint32(d), end, width > 0 && !inNumber(raw[end])
		}
	}
	n := uint64(0)
	for end = i; raw[end]-'0' <= 9; end++ {
		if n = n*10 + uint64(raw[end]-'0'); n > math.MaxUint32 {
			return 0, 0, false
		}
	}
	return uint32(n), end, end > i && !inNumber(raw[end])
}

// inNumber reports whether c continues a number after its first digits.
func inNumber(c byte) bool { return c == '.' || c|0x20 == 'e' }
