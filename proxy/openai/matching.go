package openai

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/bits"
)

// What follows is read by those who look for a prompt's KV blocks: what the
// prompt is made of, and what keeps equal prompts apart.

// CacheSalt gives what the request says its blocks must not be shared beyond:
// cache_salt, and behind it SGLang's extra_key, which that engine puts together
// in the same way. Like an id it may lie in the body.
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

// LoRA gives the name of the adapter that the request asks for beside its
// model: lora_path of SGLang, lora_request.lora_name of TensorRT-LLM. vLLM's
// adapters are models. Like an id it may lie in the body.
func (r *Request) LoRA() string {
	if name := r.textAt("lora_path"); name != "" {
		return name
	}
	return r.textAt("lora_request", "lora_name")
}

// PromptText gives bytes that stand for the prompt where no token ids are to be
// had: the raw text of a string between its quotes, or the raw list of messages
// or token ids up to the end of its last element. So those of a longer list have
// those of the shorter one for a prefix, if the client writes both in the same
// way, and a next turn has the turn before. It is nil for several prompts.
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

// Preamble visits the raw values of what an engine puts in front of the prompt
// or shapes it by, in the order of the body: the same messages with other tools
// are another prompt. PromptText does not hold them.
func (r *Request) Preamble(yield func(raw []byte) bool) {
	for i := range r.members {
		m := &r.members[i]
		if m.kind == kindNull {
			continue
		}
		switch r.keyString(m) {
		case "tools", "functions", "system", "instructions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort":
			if !yield(r.value(m)) {
				return
			}
		}
	}
}

// ErrTokenIDs says that a request has no token ids to be read.
var ErrTokenIDs = errors.New("the prompt is not one list of token ids")

// AppendTokenIDs appends the token ids that the client sent: a prompt that is a
// list of them (or a list of one such list), or prompt_token_ids beside the
// messages of a chat. The error is ErrTokenIDs if there are none, if one is not a
// whole number from 0 to 2^32-1, or if there are several prompts; dst is then as
// it was.
func (r *Request) AppendTokenIDs(dst []uint32) ([]uint32, error) {
	raw := r.rawTokenIDs()
	if len(raw) == 0 || raw[0] != '[' {
		return dst, ErrTokenIDs
	}
	ids := dst
	// The scan has checked the grammar, so a digit begins a number, and what may
	// follow one is known.
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

// rawTokenIDs is the raw value that AppendTokenIDs reads; empty for none.
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

// MostTokenIDs is how many token ids AppendTokenIDs can append at most. It is exact
// where the client sent a list of ids.
func (r *Request) MostTokenIDs() int {
	raw := r.rawTokenIDs()
	if len(raw) == 0 {
		return 0
	}
	return bytes.Count(raw, []byte{','}) + 1
}

// tokenID reads the token id at i; ok is false for any other value.
func tokenID(raw []byte, i int) (id uint32, end int, ok bool) {
	if len(raw)-i >= 8 {
		// Less than eight digits, as nearly all are: put at the upper end of a
		// word, then added up in pairs.
		w := binary.LittleEndian.Uint64(raw[i:])
		d := w ^ ones*'0'
		if m := ((d + ones*(0x80-10)) | d) & tops; m != 0 {
			width := bits.TrailingZeros64(m) &^ 7
			d = d << (64 - width) // none if width is 0
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

// inNumber tells whether a number goes on with c behind its first digits.
func inNumber(c byte) bool { return c == '.' || c|0x20 == 'e' }
