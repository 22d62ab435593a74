package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Retainer is a connector whose decode engines may keep the KV of what they have
// answered, for prefill to pull at the conversation's next turn
// (config.Engine.Bidirectional). Its methods are pure and safe for concurrent use.
type Retainer interface {
	// Retained is what decode says, in a whole answer with a 2xx status, that it keeps;
	// ok is false where that is nothing.
	Retained(a *Attempt, answer []byte) (k Retained, ok bool)
	// CutRetained appends whole events of decode's stream less what they say of that to
	// dst, and gives it: parameters alone, nil for none.
	CutRetained(dst, events []byte) (rest, params []byte)
	// FreeRetained has prefill, which must be bidirectional, tell decode to free what it
	// keeps.
	FreeRetained(a *Attempt, params []byte) Cleanup
}

// Retained is KV that a decode engine keeps of a request. Its slices alias the answer
// and the request.
type Retained struct {
	// Params is the raw object by which prefill pulls it: Attempt.RetainedKV of one later
	// request.
	Params []byte
	// Host is where prefill would look for it.
	Host string
	// Tokens is of how many tokens it is the KV: the first of Prompt and Answer.
	Tokens int
	// Prompt and Answer are raw lists of token ids, of which one may be absent.
	Prompt, Answer []byte
	// Unfit says why no request may pull it; "" for none. kv_groups: more than one
	// group of blocks, whose ends need not be those of the tokens; kv_blocks: their
	// number is not what the tokens need, so that an engine which counts from the
	// end would read others; incomplete_kv_params; no_token_ids.
	Unfit string
}

// Sources, in vLLM: distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py
// (get_num_new_matched_tokens: what prefill pulls is the KV of as many tokens as
// it is told, whatever its prompt is; request_finished: what decode keeps, and
// how long), base_worker.py (_apply_prefix_caching: blocks are matched from the
// end), tests/v1/kv_connector/unit/test_bidirectional_kv_transfer.py. Pull
// requests 32553 and 47021.

// keeps reports whether a's decode engine keeps what it answers. A trusted client
// gets the parameters, and with them the use of the blocks.
func keeps(a *Attempt) bool {
	return a.Decode.Spec.Bidirectional && !a.Prefill.IsZero() && !a.Trust
}

// asksIDs reports whether decode is to say the token ids, which prove what the
// kept KV is of, although the client did not ask for them. A stream would say
// them in each event, and never what is kept.
func asksIDs(a *Attempt) bool {
	r := a.Request
	if !keeps(a) || r.Stream || r.API != openai.Completions && r.API != openai.Chat {
		return false
	}
	v, _ := r.Get("return_token_ids")
	return string(v) != "true"
}

// Retained implements Retainer.
func (nixl) Retained(a *Attempt, answer []byte) (k Retained, ok bool) {
	params, _ := openai.Find(answer, "kv_transfer_params")
	if !keeps(a) || !isObject(params) {
		return Retained{}, false
	}
	if order, _ := openai.Find(params, "do_remote_decode"); string(order) != "true" {
		return Retained{}, false
	}
	blocks, groups := countBlocks(params)
	if blocks == 0 {
		return Retained{}, false
	}
	k = Retained{Params: params, Host: text(params, "remote_host")}
	tokens, _ := openai.Find(params, "remote_num_tokens")
	n, _ := openai.Int64(tokens)
	request, _ := openai.Find(params, "remote_request_id")
	size := a.Decode.BlockTokens()
	switch {
	case n <= 0 || n > 1<<31-1 || openai.IsNull(request) || !addressed(params) || checkParams(params) != nil:
		k.Unfit = "incomplete_kv_params"
		return k, true
	case groups > 1:
		k.Unfit = "kv_groups"
		return k, true
	case size == 0 || blocks != (int(n)+size-1)/size:
		k.Unfit = "kv_blocks"
		return k, true
	}
	k.Tokens = int(n)
	k.Answer, _ = openai.Find(answer, "choices", "0", "token_ids")
	switch a.Request.API {
	case openai.VLLMGenerate:
		k.Prompt = a.Request.PromptRaw()
	case openai.Chat:
		k.Prompt, _ = openai.Find(answer, "prompt_token_ids")
	default:
		k.Prompt, _ = openai.Find(answer, "choices", "0", "prompt_token_ids")
	}
	if openai.IsNull(k.Prompt) || openai.IsNull(k.Answer) {
		k.Unfit = "no_token_ids"
	}
	return k, true
}

// countBlocks counts the blocks of the first group of remote_block_ids, and the
// groups.
func countBlocks(params []byte) (blocks, groups int) {
	list, _ := openai.Find(params, "remote_block_ids")
	outer, err := openai.Elements(list)
	if err != nil {
		return 0, 0
	}
	for group := range outer {
		if groups++; groups > 1 {
			continue
		}
		inner, err := openai.Elements(group)
		if err != nil { // flat, of releases that keep nothing
			return 0, 0
		}
		for range inner {
			blocks++
		}
	}
	return blocks, groups
}

// vllmPublic is an answer less its transfer parameters, and less the token ids
// that the client did not ask for. What was null without asking is null again;
// messages leave absent members out.
func vllmPublic(a *Attempt, answer []byte) []byte {
	asked := asksIDs(a)
	kv, _ := openai.Find(answer, "kv_transfer_params")
	if a.Trust || openai.IsNull(kv) && !asked {
		return answer
	}
	var o openai.Object
	if o.Parse(answer) != nil { // the client is to see it as it is
		return answer
	}
	room := make([]openai.Edit, 0, 3)
	edits := hide(room, &o, "kv_transfer_params", a.Request.API == openai.Messages)
	if asked {
		edits = hide(edits, &o, "prompt_token_ids", false)
		if choices, ok := publicChoice(&o); ok {
			edits = append(edits, openai.Edit{Key: "choices", Value: choices})
		}
	}
	return o.Append(make([]byte, 0, len(answer)), edits...)
}

// hide adds the edit that takes a member's value away, where it has one.
func hide(edits []openai.Edit, o *openai.Object, key string, remove bool) []openai.Edit {
	switch v, _ := o.Get(key); {
	case openai.IsNull(v):
		return edits
	case remove:
		return append(edits, cut(key))
	}
	return append(edits, openai.Edit{Key: key, Value: literal("null")})
}

// publicChoice gives the list of the one choice, less its token ids.
func publicChoice(answer *openai.Object) (list []byte, ok bool) {
	raw, _ := answer.Get("choices")
	choices, err := openai.Elements(raw)
	if err != nil {
		return nil, false
	}
	list = append(make([]byte, 0, len(raw)), '[')
	for choice := range choices {
		var o openai.Object
		if o.Parse(choice) != nil {
			return nil, false
		}
		if len(list) > 1 {
			list = append(list, ',')
		}
		edits := hide(make([]openai.Edit, 0, 2), &o, "token_ids", false)
		list = append(list, o.Append(nil, hide(edits, &o, "prompt_token_ids", false)...)...)
	}
	return append(list, ']'), true
}

// CutRetained implements Retainer. Releases up to vLLM pull request 40186 say nothing of
// it in streams, but for the last event of responses.
func (nixl) CutRetained(dst, events []byte) (rest, params []byte) {
	word := literal(`"kv_transfer_params"`)
	for len(events) > 0 {
		event, after, found := bytes.Cut(events, literal("\n\n"))
		if found {
			event = events[:len(event)+2]
		}
		events = after
		before, data, isData := bytes.Cut(event, literal("data: "))
		if !isData || !bytes.Contains(data, word) {
			dst = append(dst, event...)
			continue
		}
		var o, response openai.Object
		if o.Parse(bytes.TrimRight(data, "\n")) != nil {
			dst = append(dst, event...)
			continue
		}
		inner, _ := o.Get("response")
		if isObject(inner) && response.Parse(inner) == nil {
			if kv, _ := response.Get("kv_transfer_params"); !openai.IsNull(kv) {
				params = bytes.Clone(kv)
				inner = response.Append(nil, openai.Edit{Key: "kv_transfer_params", Value: literal("null")})
			}
			dst = append(append(dst, before...), "data: "...)
			dst = o.Append(dst, openai.Edit{Key: "response", Value: inner})
		} else {
			if kv, _ := o.Get("kv_transfer_params"); !openai.IsNull(kv) {
				params = bytes.Clone(kv)
			}
			dst = append(append(dst, before...), "data: "...)
			dst = o.Append(dst, cut("kv_transfer_params"))
		}
		dst = append(dst, data[len(bytes.TrimRight(data, "\n")):]...)
	}
	return dst, params
}

// FreeRetained has a prompt of one token computed, which is too little to pull anything
// for (kv_recompute_threshold): prefill then tells decode that it needs none of
// the blocks it was told of. When the first token comes that has happened, and the
// request is dropped, because one that ended would leave its own block behind for
// prefill's lease. The salt is for engines without a threshold: what they pull is
// not of that prompt.
func (nixl) FreeRetained(a *Attempt, params []byte) Cleanup {
	body := append(make([]byte, 0, len(params)+256), '{')
	if model, _ := a.Request.Get("model"); !openai.IsNull(model) {
		body = append(append(append(body, `"model":`...), model...), ',')
	}
	body = append(body, `"prompt":[0],"max_tokens":4096,"ignore_eos":true,"stream":true,"cache_salt":`...)
	body = openai.AppendQuoted(body, a.LegID)
	body = append(append(body, `,"kv_transfer_params":`...), params...)
	return Cleanup{
		Phase: abi.Prefill,
		Leg: Leg{
			Path:   openai.Completions.Path(),
			Header: []Field{{Name: "Content-Type", Value: "application/json"}, {Name: "X-Request-Id", Value: a.LegID + "-forget"}},
			Body:   append(body, '}'),
		},
		Until: UntilEvent,
		How:   "forget_turn",
	}
}
