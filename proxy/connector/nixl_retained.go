package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Retainer is a connector whose decode engines may retain the KV of a finished request,
// so that prefill can pull it at the conversation's next turn
// (config.Engine.Bidirectional). Its methods are pure and safe for concurrent use.
type Retainer interface {
	// Retained returns the KV that decode retains, from a whole answer with a 2xx
	// status. ok is false if it retains none.
	Retained(a *Attempt, answer []byte) (k Retained, ok bool)
	// CutRetained appends whole events of decode's stream to dst, without the
	// parameters of retained KV, and returns these parameters; nil for none.
	CutRetained(dst, events []byte) (rest, params []byte)
	// FreeRetained returns a call to prefill. Prefill, which must be bidirectional, then makes
	// decode free the retained KV.
	FreeRetained(a *Attempt, params []byte) Cleanup
}

// Retained describes KV that a decode engine retains of a request. Its slices alias the
// answer and the request.
type Retained struct {
	// Params is the raw object with which prefill pulls the KV: Attempt.RetainedKV of
	// one later request.
	Params []byte
	// Host is the host from which prefill pulls it.
	Host string
	// Tokens is the number of tokens whose KV is retained: the first ones of Prompt and
	// Answer.
	Tokens int
	// Prompt and Answer are raw lists of token ids. One of them may be missing.
	Prompt, Answer []byte
	// Unfit is the reason why no request may pull the KV; "" if one may. kv_groups:
	// there is more than one group of blocks, and their ends may differ from those of
	// the tokens. kv_blocks: the number of blocks does not match the tokens, so an
	// engine that counts from the end would read wrong blocks. Also
	// incomplete_kv_params and no_token_ids.
	Unfit string
}

// Sources, in vLLM: distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py
// (get_num_new_matched_tokens: prefill pulls the KV of the given number of tokens,
// whatever its prompt is; request_finished: which KV decode retains, and how long),
// base_worker.py (_apply_prefix_caching: blocks are matched from the end),
// tests/v1/kv_connector/unit/test_bidirectional_kv_transfer.py. Pull requests 32553 and
// 47021.

// keeps reports whether a's decode engine retains KV for the proxy. A trusted client
// gets the parameters itself and may use the blocks.
func keeps(a *Attempt) bool {
	return a.Decode.Spec.Bidirectional && !a.Prefill.IsZero() && !a.Trust
}

// asksIDs reports whether the proxy requests token ids from decode although the client
// did not. The ids determine the text to which the retained KV belongs. The proxy does
// not request them for a stream: decode would send ids with each event, and no parameters
// of retained KV.
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
	_, bad := checkParams(params, nil, nil)
	switch {
	case n <= 0 || n > 1<<31-1 || openai.IsNull(request) || !addressed(params) || bad != nil:
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

// countBlocks returns the number of blocks in the first group of remote_block_ids, and
// the number of groups.
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
		if err != nil { // a flat list comes from releases that retain nothing
			return 0, 0
		}
		for range inner {
			blocks++
		}
	}
	return blocks, groups
}

// vllmPublic returns an answer without its transfer parameters, and without the token ids that the
// client did not request. A member that an engine sends as null without a request becomes null. In
// answers of messages the member is removed.
func vllmPublic(a *Attempt, answer []byte) []byte {
	asked := asksIDs(a)
	kv, _ := openai.Find(answer, "kv_transfer_params")
	if a.Trust || openai.IsNull(kv) && !asked {
		return answer
	}
	var o openai.Object
	if o.Parse(answer) != nil { // the client gets the malformed answer unchanged
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

// hide appends the edit that removes a member's value, if it has one.
func hide(edits []openai.Edit, o *openai.Object, key string, remove bool) []openai.Edit {
	switch v, _ := o.Get(key); {
	case openai.IsNull(v):
		return edits
	case remove:
		return append(edits, cut(key))
	}
	return append(edits, openai.Edit{Key: key, Value: literal("null")})
}

// publicChoice returns the list with the one choice, without its token ids.
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

// CutRetained implements Retainer. Releases up to vLLM pull request 40186 send no
// parameters in streams, except in the last event of responses.
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

// FreeRetained sends prefill a prompt of one token, which is too short to pull anything
// (kv_recompute_threshold). Prefill then informs decode that it needs none of the named blocks.
// That has happened when the first token arrives, and the call ends there: a request that finished
// would leave its own block pinned for prefill's lease. The salt is for engines without a
// threshold: the KV that they pull does not belong to this prompt.
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
