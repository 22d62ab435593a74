package connector

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// trtllm is TensorRT-LLM's disaggregated serving. In the order context first, prefill
// (the context worker) answers the first token and the disaggregated_params. Decode (the
// generation worker) finds the KV by these parameters. There is no decode leg if the
// first token ended the text. The order generation first is in trtllm_first.go.
//
// Sources, in TensorRT-LLM: tensorrt_llm/serve/openai_disagg_service.py (the requests of
// the orchestrator, and when a generation is needed),
// tensorrt_llm/serve/openai_protocol.py (the fields; they differ between releases, and a
// worker rejects unknown ones).
type trtllm struct{ settings TRTLLM }

// Configure implements Configurer.
func (t trtllm) Configure(a *Attempt) { a.TRTLLM = t.settings }

func (trtllm) Name() string   { return "trtllm" }
func (trtllm) Flow() abi.Flow { return abi.FlowPrefillFirst }

// AggregatesOn includes decode engines: TensorRT-LLM's own orchestrator sends them
// requests without disaggregated_params when a prefill leg would cost more than it saves.
func (trtllm) AggregatesOn() abi.Role { return abi.RoleDecode }

// Serves includes responses, which a worker answers whole: their requests have no
// disaggregated_params. Workers of visual models serve images. Source:
// serve/openai_server.py.
func (trtllm) Serves(api openai.API) bool {
	switch api {
	case openai.Completions, openai.Chat, openai.Responses, openai.Embeddings, openai.ImageGenerations, openai.ImageEdits:
		return true
	default:
		return false
	}
}

func (trtllm) HealthPath(abi.Role) (path string, bootstrap bool) { return healthPath, false }

func (trtllm) FactPaths(abi.Role) []string {
	return []string{versionPath, serverInfoPath, modelsPath}
}

func (trtllm) Tokenizes() tokens.Dialect { return tokens.TRTLLM }

func (trtllm) Loads() []engine.LoadRoute {
	return []engine.LoadRoute{{Path: metricsPath, Form: engine.LoadTRTLLM}}
}

func (trtllm) ReadFacts(f *engine.Facts, path string, status int, body []byte) error {
	ok, err := served(path, status)
	switch {
	case !ok:
		return err
	case path == modelsPath:
		return readModels(f, body)
	case path == versionPath:
		if err := readVersion(f, body); err != nil {
			return err
		}
		f.Wire = wireOf(f.Version)
		return nil
	}
	var info openai.Object
	if err := info.Parse(body); err != nil {
		return fmt.Errorf("read facts: %s: no JSON object", path)
	}
	f.PageSize = count(&info, "tokens_per_block")
	f.Rendezvous = rendezvous(&info)
	if algo, ok := info.Get("kv_cache_hash_algo"); ok {
		if f.KVHash, _ = openai.String(algo); f.Wire == "" {
			f.Wire = wireG2 // workers of the first generation do not report their cache
		}
	}
	return nil
}

// BothPairs: the request_type of each request determines the phase that a worker runs.
func (trtllm) BothPairs() bool { return true }

// Compatible rejects a pair whose decode would reject prefill's params: the first wire
// generation has other members than the later ones.
func (trtllm) Compatible(p, d *engine.Facts) error {
	if p.Wire != "" && d.Wire != "" && (p.Wire == wireG1) != (d.Wire == wireG1) {
		return fmt.Errorf("wire generations differ: prefill %s, decode %s", p.Wire, d.Wire)
	}
	return nil
}

func (trtllm) Pairable(r *openai.Request) error {
	if r.API == openai.Responses {
		return notPairable("", "This route cannot be split into prefill and decode, and no engine here serves it whole.")
	}
	return oneSequence(r)
}

// Aggregated is the client's request. It also has the model, which a client may omit
// but a worker requires.
func (trtllm) Aggregated(a *Attempt, dst []byte) (Leg, error) {
	if a.Request.API == openai.EngineRoute { // nothing is known about its members
		return plain(a, dst), nil
	}
	named := conversationNamed(a, a.Decode)
	if a.Request.HasModel && named.Key == "" {
		return finished(a, plain(a, dst)), nil
	}
	edits := [editRoom]openai.Edit{modelNamed(a), named}
	return finished(a, spliced(a, dst, edits[:2])), nil
}

// conversationNamed returns the edit that names the conversation if the client did not.
// Workers route by it to their ranks. Generation g1 has the field only in the params,
// and rejects unknown members (openai_protocol.py, ConversationParams).
func conversationNamed(a *Attempt, target engine.Target) openai.Edit {
	if a.Conversation == "" || wire(target) == wireG1 || a.Request.API == openai.Responses { // responses have no such field
		return openai.Edit{}
	}
	if v, ok := a.Request.Get("conversation_params"); ok && !openai.IsNull(v) {
		return openai.Edit{}
	}
	value := append(openai.AppendQuoted([]byte(`{"conversation_id":`), a.Conversation), '}')
	return openai.Edit{Key: "conversation_params", Value: value}
}

// modelNamed returns the edit that names the model if the client did not: workers
// reject a body without it (openai_protocol.py, model: str).
func modelNamed(a *Attempt) openai.Edit {
	models := a.Decode.Models()
	if a.Request.HasModel || len(models) == 0 {
		return openai.Edit{}
	}
	return openai.Edit{Key: "model", Value: openai.AppendQuoted(nil, models[0])}
}

// Prefill is the client's request with its own limits of tokens: the params alone make
// it end after the first token.
func (trtllm) Prefill(a *Attempt, dst []byte) (Leg, error) {
	var scratch [128]byte
	params := append(scratch[:0], `{"request_type":"context_only"`...)
	if wire(a.Prefill) != wireG1 {
		params = append(params, `,"disagg_request_id":`...)
		params = strconv.AppendUint(params, a.ID, 10)
		params = append(params, `,"schedule_style":`+style(a)...)
	}
	params = append(params, '}')
	prompt, _ := lone(a.Request)
	edits := [editRoom]openai.Edit{
		{Key: "disaggregated_params", Value: params},
		{Key: "stream", Value: literal("false")},
		cut("stream_options"), // rejected if stream is not true
		{Key: "prompt", Value: prompt},
		modelNamed(a),
		conversationNamed(a, a.Prefill),
	}
	leg := spliced(a, dst, edits[:6])
	leg.Unary = true
	return finished(a, leg), nil
}

// ReadPrefill reads the finish reason of the first choice. If the text continues, a
// decode leg is needed; otherwise prefill's answer is the whole answer. The decode leg
// gets the ids of prefill's answer, not the ids of the prefill leg: a component between
// the proxy and the engine may have replaced them.
func (t trtllm) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	var answer openai.Object
	if answer.Parse(body) != nil {
		return Handoff{}, badReply("no JSON object")
	}
	choices, _ := answer.Get("choices")
	if a.Flow == abi.FlowDecodeFirst {
		return readSecond(a, choices)
	}
	reason, ok, err := openai.Lookup(choices, "0", "finish_reason")
	if err != nil || !ok {
		return Handoff{}, badReply("no choice with a finish reason")
	}
	switch string(reason) {
	case `"length"`, `"not_finished"`:
		return t.handoff(a, &answer, choices)
	case "null":
		return Handoff{}, badReply("the finish reason is null")
	}
	return t.done(a, &answer)
}

// handoff handles an answer that decode must continue.
func (trtllm) handoff(a *Attempt, answer *openai.Object, choices []byte) (Handoff, error) {
	params, _ := openai.Find(choices, "0", "disaggregated_params")
	if !isObject(params) {
		return Handoff{}, badReply("no disaggregated_params")
	}
	own, err := checkParams(params, a.Prefill.Instance, a.Decode.Instance)
	if err != nil {
		return Handoff{}, err
	}
	if id, _ := openai.Find(params, "ctx_request_id"); openai.IsNull(id) {
		return Handoff{}, badReply("ctx_request_id is null")
	}
	if id, _ := openai.Find(params, "disagg_request_id"); openai.IsNull(id) && wire(a.Prefill) != wireG1 {
		return Handoff{}, badReply("disagg_request_id is null")
	}
	if where, _ := openai.Find(params, "ctx_info_endpoint"); !own || !ownEndpoint(a, where) {
		return Handoff{Fallback: ForeignHost}, nil
	}
	h := Handoff{Pinned: true, Params: params}
	if usage, _ := answer.Get("usage"); isObject(usage) {
		h.Usage = usage
	}
	tokens, _ := answer.Get("prompt_token_ids")
	switch {
	case !openai.IsNull(tokens) && !tokenIDs(tokens):
		return Handoff{}, badReply("prompt_token_ids are no token ids")
	case !openai.IsNull(tokens):
		h.Prompt = tokens
	case a.Request.API == openai.Completions:
		return Handoff{}, badReply("no prompt_token_ids")
	}
	return h, nil
}

// Decode is the client's request with prefill's params, in which only request_type and
// its companions change, and with the prompt in prefill's form, so that it is not
// tokenized again. Prefill's usage is added: decode reports it as the usage of the
// prompt. The first token is in the params, and decode emits it. Without params decode
// gets the whole request.
func (t trtllm) Decode(a *Attempt, h *Handoff, dst []byte) (Leg, error) {
	switch {
	case a.Flow == abi.FlowDecodeFirst:
		return generationFirst(a, dst), nil
	case h == nil:
		return Leg{}, errors.New("shape decode leg: prefill has not answered")
	}
	if h.Fallback != "" {
		return t.Aggregated(a, dst)
	}
	var params openai.Object
	if params.Parse(h.Params) != nil {
		return Leg{}, badReply("disaggregated_params is no object")
	}
	change := [3]openai.Edit{{Key: "request_type", Value: literal(`"generation_only"`)}}
	if wire(a.Decode) != wireG1 {
		change[1] = openai.Edit{Key: "schedule_style", Value: literal(style(a))}
		change[2] = openai.Edit{Key: "ctx_usage", Value: h.Usage} // an edit without a value changes nothing
	}
	changed := params.Append(make([]byte, 0, len(h.Params)+len(h.Usage)+128), change[:]...)

	edits := [editRoom]openai.Edit{{Key: "disaggregated_params", Value: changed}}
	switch {
	case len(h.Prompt) == 0:
	case a.Request.API == openai.Completions:
		edits[1] = openai.Edit{Key: "prompt", Value: h.Prompt}
	default:
		edits[1] = openai.Edit{Key: "prompt_token_ids", Value: h.Prompt}
	}
	edits[2] = modelNamed(a)
	edits[3] = conversationNamed(a, a.Decode)
	return finished(a, signed(a, spliced(a, dst, edits[:4]), changed)), nil
}

// Reclaims: only a time-out frees the KV that prefill has computed. So the proxy stops an
// unneeded prefill leg at once.
func (trtllm) Reclaims() bool { return false }

// Cleanup sends no call: workers have no route that frees a context without a generation.
// The worker frees the context after its kv_transfer_timeout_ms. A prefill leg without an
// answer may hold such a context. A prefill leg whose generation has begun holds none.
func (trtllm) Cleanup(_ *Attempt, o Orphan) []Cleanup {
	pinned := o.PrefillSent && !o.Refused
	if o.Handoff != nil {
		pinned = o.Handoff.Pinned
	}
	if o.KVRead || !pinned {
		return nil
	}
	return []Cleanup{{Phase: abi.Prefill, How: "engine_timeout"}}
}
