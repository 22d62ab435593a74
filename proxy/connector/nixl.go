package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// nixl is vLLM's NixlConnector in pull mode (also called NixlPullConnector). Prefill
// answers one token and the address of its KV blocks. Decode gets that address with the
// client's request, reads the blocks and tells prefill to free them.
//
// Sources, in vLLM: tests/v1/kv_connector/nixl_integration/toy_proxy_server.py (the
// fields of the prefill leg),
// distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py (how the engines use
// kv_transfer_params, and when they free blocks), v1/core/sched/utils.py check_stop.
type nixl struct{}

// nixlPrefill makes prefill keep its blocks. Engines read do_remote_decode; the nulls
// are customary. Block ids in their place would make prefill wait for KV that no engine
// sends.
var nixlPrefill = literal(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`)

func (nixl) Name() string   { return "vllm-nixl" }
func (nixl) Flow() abi.Flow { return abi.FlowPrefillFirst }

// AggregatesOn includes decode engines: without kv_transfer_params a decode engine
// computes the prompt itself.
func (nixl) AggregatesOn() abi.Role { return abi.RoleDecode }

// Serves excludes the routes that only SGLang has.
func (nixl) Serves(api openai.API) bool {
	return api != 0 && api != openai.EngineRoute && api != openai.Generate && api != openai.ClassifyV1
}

func (nixl) HealthPath(abi.Role) (path string, bootstrap bool) { return healthPath, false }

func (nixl) FactPaths(abi.Role) []string {
	return []string{modelsPath, versionPath, metricsPath, eventSourcesPath}
}

func (nixl) Tokenizes() tokens.Dialect { return tokens.VLLM }

func (nixl) Loads() []engine.LoadRoute { return []engine.LoadRoute{metricsRoute} }

func (nixl) ReadFacts(f *engine.Facts, path string, status int, body []byte) error {
	ok, err := served(path, status)
	switch {
	case path == metricsPath:
		if ok {
			readCacheConfig(f, body)
		}
		return nil
	case path == eventSourcesPath:
		readEventSources(f, status, body)
		return nil
	case !ok:
		return err
	case path == modelsPath:
		return readModels(f, body)
	}
	return readVersion(f, body)
}

// BothPairs: an engine with kv_role kv_both is producer and consumer.
func (nixl) BothPairs() bool { return true }

// Compatible calls nixlCompatible. An operator who disables the engines' own check also
// disables this one (pairs.allow_incompatible).
func (nixl) Compatible(p, d *engine.Facts) error { return nixlCompatible(p, d) }

func (nixl) Pairable(r *openai.Request) error {
	if err := oneSequence(r); err != nil {
		return err
	}
	if field := vllmUnsplit(r); field != "" {
		return notPairable(field, "'"+field+"' cannot be split into prefill and decode, and no engine here serves it whole.")
	}
	return nil
}

func (nixl) Aggregated(a *Attempt, dst []byte) (Leg, error) {
	var room [editRoom]openai.Edit
	return vllmLeg(a, a.LegID, a.Decode, dst, room[:0]), nil
}

// Prefill requests one token, which no client sees: decode samples the first token again.
// The leg must end by the limit of tokens: before vLLM pull request 32553, the answer had
// no transfer parameters if the first token stopped the text. So the leg ignores the end
// of text and has none of the client's stops. All members that determine the prompt
// (template, truncation, salt, adapter) stay as the client sent them.
func (nixl) Prefill(a *Attempt, dst []byte) (Leg, error) {
	params := a.RetainedKV
	if len(params) == 0 {
		params = nixlPrefill
	}
	return vllmPrefill(a, a.LegID, dst, params)
}

// The edits of legs that are the same for every request. Their values must not be written to.
var (
	literalOne, literalTrue, literalFalse = literal("1"), literal("true"), literal("false")

	unstreamed = []openai.Edit{
		{Key: "stream", Value: literalFalse}, // streamed answers have no params
		cut("stream_options"),                // engines reject it if stream is not true
	}
	firstTokenText = []openai.Edit{
		{Key: "max_tokens", Value: literalOne}, {Key: "ignore_eos", Value: literalTrue}, cut("stop"), cut("stop_token_ids"),
		cut("min_tokens"), cut("min_completion_tokens"), // engines reject a minimum above the limit
	}
	firstTokenResponses = []openai.Edit{
		{Key: "max_output_tokens", Value: literalOne}, {Key: "ignore_eos", Value: literalTrue}, cut("stop"),
		{Key: "store", Value: literalFalse}, // clients retrieve decode's answer
	}
	firstTokenMessages = []openai.Edit{{Key: "max_tokens", Value: literalOne}, cut("stop_sequences")}
	firstTokenGenerate = []openai.Edit{
		{Key: "max_tokens", Value: literalOne}, {Key: "ignore_eos", Value: literalTrue}, cut("min_tokens"), cut("stop"), cut("stop_token_ids"),
	}
)

// vllmPrefill returns a prefill leg with that request id. params are its kv_transfer_params;
// nil for none.
func vllmPrefill(a *Attempt, id string, dst, params []byte) (Leg, error) {
	var room [editRoom]openai.Edit
	edits := room[:0]
	if params != nil {
		edits = append(edits, openai.Edit{Key: "kv_transfer_params", Value: params})
	}
	edits = append(edits, unstreamed...)
	edits, err := appendFirstToken(edits, a, params)
	if err != nil {
		return Leg{}, err
	}
	leg := vllmLeg(a, id, a.Prefill, dst, edits)
	leg.Unary = true
	return leg, nil
}

// appendFirstToken appends the edits that make the leg end after its first token, by
// the limit alone. transfer is the leg's kv_transfer_params.
func appendFirstToken(edits []openai.Edit, a *Attempt, transfer []byte) ([]openai.Edit, error) {
	switch a.Request.API {
	case openai.VLLMGenerate:
		params, err := vllmSamplingParams(a, transfer, firstTokenGenerate...)
		return append(edits, openai.Edit{Key: "sampling_params", Value: params}), err
	case openai.Responses:
		return append(edits, firstTokenResponses...), nil
	case openai.Messages:
		if edits = append(edits, firstTokenMessages...); budgets(a.Request) {
			edits = append(edits, cut("thinking"))
		}
		return edits, nil
	default: // completions and chat
		edits = append(edits, firstTokenText...)
		if _, ok := a.Request.Get("max_completion_tokens"); ok { // it takes precedence over max_tokens
			edits = append(edits, openai.Edit{Key: "max_completion_tokens", Value: literalOne})
		}
		return edits, nil
	}
}

// budgets reports whether r limits its thinking. Engines since vLLM 0.32 reject a budget that is
// not below max_tokens, except in a request with do_remote_decode. The budget does not change the
// prompt (entrypoints/anthropic/protocol.py, validate_thinking_budget). Other types of thinking
// have no budget, and stay.
func budgets(r *openai.Request) bool {
	thinking, _ := r.Get("thinking")
	kind, _ := openai.Find(thinking, "type")
	return string(kind) == `"enabled"`
}

// CountsTransferred holds for every connector of vLLM: the scheduler adds the tokens that a
// connector has loaded to the cached ones (v1/core/sched/scheduler.py, num_cached_tokens). Newer
// releases in pull mode report prefill's number themselves, which then does not change.
func (nixl) CountsTransferred() {}

// ReadPrefill copies kv_transfer_params unchanged if their types are those of an
// engine. An answer without them is legal: decode then computes the prompt itself, as
// it does if there is no block to read. Decode must get no kv_transfer_params in that
// case: an order to read an empty list of blocks crashes a vLLM engine.
//
// Decode also gets no parameters that contain, at any depth, a host or known port at
// which prefill is not known to be. Otherwise decode would connect to any address that
// an engine, or an impostor, names.
func (nixl) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	params, own, err := transferParams(body, a.Prefill.Instance, a.Decode.Instance)
	if err != nil {
		return Handoff{}, err
	}
	if params == nil {
		return Handoff{Fallback: "no_kv_params"}, nil
	}
	if mode, _ := openai.Find(params, "transfer_mode"); string(mode) == `"push"` {
		return Handoff{}, badReply("prefill runs in push mode, which cannot be paired with pull")
	}
	blocks := namesBlocks(params)
	if !blocks {
		if order, _ := openai.Find(params, "do_remote_prefill"); string(order) == "true" {
			return Handoff{Fallback: "no_kv_blocks"}, nil
		}
		if len(bytes.Trim(params, "{} \n\t\r")) == 0 {
			return Handoff{Fallback: "no_kv_params"}, nil
		}
	}
	switch {
	case blocks && !addressed(params):
		return Handoff{Fallback: "incomplete_kv_params"}, nil
	case !own:
		return Handoff{Fallback: ForeignHost}, nil
	case !blocks:
		return Handoff{Params: params}, nil // parameters of another connector of the same engine
	}
	return Handoff{Params: params, Pinned: true, Lease: a.Prefill.KVLease, Renews: true, RefusalFrees: refusalFrees(params)}, nil
}

// refusalFrees reports whether params are those of a release whose decode makes prefill free the
// blocks when its serving layer refuses the leg, for lack of room too
// (entrypoints/generate/base/serving.py, _with_kv_transfer_rejection_cleanup, since pull request
// 41269). Such releases send the number of tokens.
func refusalFrees(params []byte) bool {
	n, _ := openai.Find(params, "remote_num_tokens")
	return !openai.IsNull(n)
}

// addressed reports whether params contain the address of the blocks. A vLLM 0.32 decode
// engine without this address waits without end, and crashes when the request is aborted
// (KeyError in its core). remote_request_id is not required: releases before NIXL
// connector version 2 neither send nor read it.
func addressed(params []byte) bool {
	for _, key := range [...]string{"remote_engine_id", "remote_host", "remote_port"} {
		if v, _ := openai.Find(params, key); openai.IsNull(v) {
			return false
		}
	}
	return true
}

// Decode is the client's request with prefill's params, or without if there is nothing
// to transfer. It has the client's limit of tokens: decode generates the first token
// again.
func (nixl) Decode(a *Attempt, h *Handoff, dst []byte) (Leg, error) {
	var params []byte
	if h != nil {
		params = h.Params
	}
	return vllmDecode(a, a.LegID, dst, params)
}

// vllmDecode returns a decode leg with that request id. params are its kv_transfer_params;
// empty for none.
func vllmDecode(a *Attempt, id string, dst, params []byte) (Leg, error) {
	var room [editRoom]openai.Edit
	edits := room[:0]
	if a.Decode.Spec.Bidirectional && asksIDs(a) {
		edits = append(edits, openai.Edit{Key: "return_token_ids", Value: literalTrue})
	}
	if len(params) > 0 {
		edits = append(edits, openai.Edit{Key: "kv_transfer_params", Value: params})
		if a.Request.API == openai.VLLMGenerate {
			sampling, err := vllmSamplingParams(a, params)
			if err != nil {
				return Leg{}, err
			}
			edits = append(edits, openai.Edit{Key: "sampling_params", Value: sampling})
		}
	}
	return vllmLeg(a, id, a.Decode, dst, edits), nil
}

// Public removes the data about KV that decode retains.
func (nixl) Public(a *Attempt, answer []byte) []byte { return vllmPublic(a, answer) }

// Reclaims: only the answer names the blocks that prefill holds.
func (nixl) Reclaims() bool { return true }

// Cleanup frees the blocks that prefill keeps for a decode leg that was not sent. It sends decode a
// request that names the blocks. When that request ends, decode makes prefill free them. If the
// request is aborted before decode schedules it, decode reads no block. Otherwise decode reads at
// most as many blocks as the request's prompt has, which is one. So the prompt has one token, the
// only data of the client is the model, and the proxy hangs up when the head of the answer arrives.
// The salt keeps the block that decode may have read out of the prefix cache. Otherwise the cache
// would contain the block under a wrong prompt.
func (n nixl) Cleanup(a *Attempt, o Orphan) []Cleanup {
	if o.Handoff == nil || !o.Handoff.Pinned || o.KVRead {
		return nil
	}
	if id, _ := openai.Find(o.Handoff.Params, "remote_request_id"); openai.IsNull(id) {
		return n.cleanupByID(a, o.Handoff)
	}
	body := make([]byte, 0, len(o.Handoff.Params)+256)
	body = append(body, '{')
	if model, _ := a.Request.Get("model"); !openai.IsNull(model) {
		body = append(append(append(body, `"model":`...), model...), ',')
	}
	body = append(body, `"prompt":[0],"max_tokens":1,"stream":true,"cache_salt":`...)
	body = openai.AppendQuoted(body, a.LegID)
	body = append(append(body, `,"kv_transfer_params":`...), o.Handoff.Params...)
	return []Cleanup{{
		Phase:     abi.Decode,
		AnyTarget: true,
		Hosts:     []string{text(o.Handoff.Params, "remote_host")},
		Leg: Leg{
			Path:   openai.Completions.Path(),
			Header: []Field{{Name: "Content-Type", Value: "application/json"}, {Name: "X-Request-Id", Value: a.LegID + "-cleanup"}},
			Body:   append(body, '}'),
		},
		Until: UntilHead,
		Hold:  o.Handoff.Lease,
		How:   "abort_decode",
	}}
}

// cleanupByID frees the blocks if params do not name prefill's request (before vLLM pull
// request 29665). Such a decode engine reports the end of a request to prefill under
// decode's own request id. So the call must have the same id and route as the prefill
// leg. A prompt of another length would crash the engine (assert num_local_blocks <=
// num_remote_blocks), so the call has the client's prompt.
func (nixl) cleanupByID(a *Attempt, h *Handoff) []Cleanup {
	params := h.Params
	var room [editRoom]openai.Edit
	edits := append(room[:0],
		openai.Edit{Key: "kv_transfer_params", Value: params},
		openai.Edit{Key: "stream", Value: literal("true")},
		openai.Edit{Key: "cache_salt", Value: openai.AppendQuoted(nil, a.LegID)},
		cut("stream_options"),
	)
	edits, err := appendFirstToken(edits, a, params)
	if err != nil {
		return nil
	}
	leg := vllmLeg(a, a.LegID, a.Decode, nil, edits)
	leg.Header = []Field{{Name: "Content-Type", Value: "application/json"}, {Name: "X-Request-Id", Value: a.LegID}}
	return []Cleanup{{
		Phase: abi.Decode, AnyTarget: true, Hosts: []string{text(params, "remote_host")},
		Leg: leg, Until: UntilHead, Hold: h.Lease, How: "abort_decode",
	}}
}
