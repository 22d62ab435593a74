package connector

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Retainer is a connector whose decode engines may retain the KV of a finished request,
// so that prefill can pull it at the conversation's next turn
// (config.Engine.Bidirectional). Its methods are pure and safe for concurrent use.
type Retainer interface {
	// Retained returns the KV that decode retains, from a whole answer with a 2xx
	// status. ok is false if it retains none.
	Retained(a *Attempt, answer []byte) (k Retained, ok bool)
	// NamesInStreams reports whether the streams of an API name the KV that a decode engine
	// with the facts f retains, and can have the token ids that belong to it.
	NamesInStreams(api openai.API, f *engine.Facts) bool
	// CutRetained returns whole events of decode's stream without the parameters of retained
	// KV, and the KV. The result aliases events if they have no parameters. ok is false if
	// they name no KV. The token ids of k are missing.
	CutRetained(a *Attempt, events []byte) (rest []byte, k Retained, ok bool)
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
	// Prompt and Answer are raw lists of token ids. One of them may be missing. A stream
	// has none of them.
	Prompt, Answer []byte
	// Unfit is the reason why no request may pull the KV; "" if one may. kv_groups:
	// there is more than one group of blocks, and their ends may differ from those of
	// the tokens. kv_blocks: the number of blocks does not match the tokens, so an
	// engine that counts from the end would read wrong blocks. Also
	// incomplete_kv_params and, from a whole answer, no_token_ids.
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

// asksIDs reports whether the proxy requests token ids in a whole answer of decode although
// the client did not. The ids determine the text to which the retained KV belongs. For a
// stream, Attempt.ReturnIDs requests them.
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
	if k, ok = readRetained(a, params); !ok || k.Unfit != "" {
		return k, ok
	}
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

// readRetained returns the KV that parameters of decode's answer name. ok is false if they
// name none.
func readRetained(a *Attempt, params []byte) (k Retained, ok bool) {
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
	case groups > 1:
		k.Unfit = "kv_groups"
	case size == 0 || blocks != (int(n)+size-1)/size:
		k.Unfit = "kv_blocks"
	default:
		k.Tokens = int(n)
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
