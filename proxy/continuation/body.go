package continuation

import (
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// defaultLimit is max_tokens of a completion that has none, in vLLM
// (entrypoints/openai/completion/protocol.py) and SGLang (srt/entrypoints/openai/protocol.py). The
// other routes generate up to the end of the context.
const defaultLimit = 16

// Left returns the number of tokens that a continuation may still generate behind kept tokens of
// the output; -1 for no limit. With 0 the answer is complete, and ends by its length.
func Left(r *openai.Request, kept int) int64 {
	limit := r.MaxTokens
	if limit < 0 && r.API == openai.Completions {
		limit = defaultLimit
	}
	if limit < 0 {
		return -1
	}
	return max(0, limit-int64(kept))
}

// Stub appends the body of r without its prompt, from which Body can build a continuation. So a
// stream keeps the ids of its prompt, and not the prompt itself. The messages of a chat with tools
// stay, because some parsers count the calls in them (vLLM parser/utils.py,
// count_history_tool_calls).
func Stub(dst []byte, r *openai.Request) []byte {
	switch {
	case r.API == openai.Completions:
		return r.Append(dst, openai.Edit{Key: "prompt", Value: []byte("[0]")})
	case r.API == openai.VLLMGenerate:
		return r.Append(dst, openai.Edit{Key: "token_ids", Value: []byte("[0]")})
	case r.Tools():
		return r.Append(dst)
	}
	return r.Append(dst, openai.Edit{Key: "messages", Value: []byte(noMessages)})
}

// StubRoom returns the room that Stub needs, in bytes.
func StubRoom(r *openai.Request) int {
	n := len(r.Raw()) + len(noMessages)
	if r.API != openai.Chat || !r.Tools() {
		n -= len(r.PromptRaw())
	}
	return n
}

// noMessages is the prompt of a chat's Stub.
const noMessages = `[{"role":"user","content":"-"}]`

// BodyRoom returns the room that Body needs, in bytes, for a text of the ids of that length.
func BodyRoom(r *openai.Request, text int) int {
	n := len(r.Raw()) + maxEdits
	if r.API != openai.Chat {
		n += text
	}
	return n
}

// maxEdits is what the edits of Body add to a request at most, in bytes, without the ids: the question for
// ids, and the limits, each with its name and a number of up to 20 digits.
const maxEdits = 256

// Body appends the body of the request that continues r, which may be a Stub: the prompt is ids, of which the last kept
// ones are output. The ids of a chat are not in it, because connectors write kv_transfer_params
// themselves; they add AppendIDs as prompt_token_ids
// (vLLM renderers/online_renderer.py, _reused_prompt_token_ids). Left must not be 0. The
// error is an *openai.Error of sampling_params that are not an object.
func Body(dst []byte, r *openai.Request, ids []uint32, kept int) ([]byte, error) {
	edits := []openai.Edit{
		{Key: "truncate_prompt_tokens", Remove: true}, // ids are cut already
		{Key: "truncation_side", Remove: true},
		{Key: "rid", Remove: true}, // SGLang refuses one that is in flight
	}
	switch r.API {
	case openai.VLLMGenerate:
		raw, _ := r.Get("sampling_params")
		params := openai.Object{Memory: r.Memory}
		if err := params.Parse(raw); err != nil {
			return dst, err
		}
		limits := limitEdits(nil, &params, r, kept)
		edits = append(edits, openai.Edit{Key: "token_ids", Value: AppendIDs(nil, ids)},
			openai.Edit{Key: "sampling_params", Value: params.Append(nil, limits...)})
	case openai.Completions:
		edits = append(edits, openai.Edit{Key: "prompt", Value: AppendIDs(nil, ids)})
		edits = limitEdits(edits, &r.Object, r, kept)
	default:
		edits = limitEdits(edits, &r.Object, r, kept)
	}
	return r.Append(dst, Ask(edits, r)...), nil
}

// limitEdits appends the edits that lower the limits in o by the kept tokens. Engines count only
// the output of the new request.
func limitEdits(edits []openai.Edit, o *openai.Object, r *openai.Request, kept int) []openai.Edit {
	left, set := Left(r, kept), false
	for _, key := range [...]string{"max_tokens", "max_completion_tokens"} {
		if v, _ := o.Get(key); !openai.IsNull(v) {
			set = true
			n, _ := openai.Int64(v)
			edits = append(edits, number(key, max(1, n-int64(kept))))
		}
	}
	if left > 0 && !set {
		edits = append(edits, number("max_tokens", left))
	}
	if v, _ := o.Get("min_tokens"); !openai.IsNull(v) {
		n, _ := openai.Int64(v)
		edits = append(edits, number("min_tokens", max(0, n-int64(kept))))
	}
	return edits
}

func number(key string, n int64) openai.Edit {
	return openai.Edit{Key: key, Value: strconv.AppendInt(nil, n, 10)}
}

// AppendIDs appends token ids as a JSON list, which has TextOf(ids) bytes.
func AppendIDs(dst []byte, ids []uint32) []byte {
	dst = append(slices.Grow(dst, TextOf(ids)), '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// TextOf returns the number of bytes of token ids as a JSON list.
func TextOf(ids []uint32) int {
	n := 1 + max(1, len(ids))
	for _, id := range ids {
		for n++; id > 9; id /= 10 {
			n++
		}
	}
	return n
}
