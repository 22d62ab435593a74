package enginesim

import (
	"encoding/json"
	"net/http"
)

// tokenWrong is prefixed to the ids of a wrong tokenize endpoint. As with
// another chat template, every block differs.
const tokenWrong token = 1

// SetWrongTokens makes the tokenize endpoints return ids that differ from those
// that the engine computes for the same request, or ends that.
func (e *Engine) SetWrongTokens(wrong bool) { e.wrongTokens.Store(wrong) }

// answered returns ids as a tokenize endpoint returns them.
func (e *Engine) answered(ids []token) []token {
	if e.wrongTokens.Load() {
		return append([]token{tokenWrong}, ids...)
	}
	return ids
}

// smallBody reads a body that is an object. For an invalid body it returns pydantic's
// error.
func smallBody(w http.ResponseWriter, r *http.Request) (fields, *fieldError) {
	body, err := readBody(w, r)
	if err != nil {
		return nil, &fieldError{"body", "missing", "Field required"}
	}
	return decodeFields(body)
}

// tokenize answers POST /tokenize for a prompt or messages, as the request
// models of vllm/entrypoints/serve/tokenize/protocol.py accept them. Unknown
// fields are ignored.
func (v *vllm) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := smallBody(w, r)
	var ids []token
	if ferr == nil {
		ids, ferr = tokenizeVLLM(f)
	}
	refusal := v.checkModel(fieldText(f, "model"))
	if ferr != nil {
		refusal = pydanticError(ferr, f)
	}
	if refusal != nil {
		writeJSON(w, refusal.Status, v.errorBody(refusal))
		return
	}
	ids = v.e.answered(ids)
	var texts any
	if want, _ := f.boolean("return_token_strs", false); want {
		list := []any{}
		for _, t := range ids {
			list = append(list, validText(t.text()))
		}
		texts = list
	}
	writeJSON(w, http.StatusOK, obj("count", len(ids), "max_model_len", v.e.maxModelLen(), "tokens", ids, "token_strs", texts))
}

// tokenizeVLLM returns the ids of a /tokenize body.
func tokenizeVLLM(f fields) ([]token, *fieldError) {
	p := fieldReader{f: f}
	p.str("model", "")
	p.boolean("add_special_tokens") // the simulator's model has none
	p.boolean("return_token_strs")
	if !f.has("messages") {
		text := p.str("prompt", "")
		if p.err == nil && !f.has("prompt") {
			p.keep(&fieldError{"prompt", "missing", "Field required"})
		}
		return tokenize(text), p.err
	}
	if p.boolean("continue_final_message") && p.boolean("add_generation_prompt") {
		p.keep(&fieldError{"body", "value_error", "Cannot set both `continue_final_message` and `add_generation_prompt` to True."})
	}
	text, err := chatText(f)
	p.keep(err)
	return tokenize(text), p.err
}

// fieldText returns the string of a field, "" without one.
func fieldText(f fields, name string) string {
	text, _ := f.str(name, "")
	return text
}

// detokenize answers POST /detokenize.
func (v *vllm) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := smallBody(w, r)
	var ids []token
	if ferr == nil && !f.has("tokens") {
		ferr = &fieldError{"tokens", "missing", "Field required"}
	}
	if ferr == nil {
		ids, ferr = parseTokenIDs(f, "tokens")
	}
	if ferr != nil {
		refusal := pydanticError(ferr, f)
		writeJSON(w, refusal.Status, v.errorBody(refusal))
		return
	}
	writeJSON(w, http.StatusOK, obj("prompt", validText(detokenize(ids))))
}

// render answers POST /v1/chat/completions/render with the body that
// /inference/v1/generate takes for the same request, and
// POST /v1/completions/render with a list of them
// (vllm/entrypoints/scale_out/render).
func (v *vllm) render(route string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := readBody(w, r)
		if err != nil {
			return
		}
		f, ferr := decodeFields(body)
		var req *request
		if ferr == nil {
			req, ferr = parseOpenAI(route, r.Header, f)
		}
		var refusal *apiError
		if ferr != nil {
			refusal = pydanticError(ferr, f)
		} else {
			refusal = v.check(req)
		}
		if refusal != nil {
			writeJSON(w, refusal.Status, v.errorBody(refusal))
			return
		}
		list := make([]any, 0, len(req.Prompts))
		for _, ids := range req.Prompts {
			list = append(list, v.rendered(req, ids))
		}
		if req.Chat {
			writeJSON(w, http.StatusOK, list[0])
			return
		}
		writeJSON(w, http.StatusOK, list)
	}
}

// rendered is a GenerateRequest.
func (v *vllm) rendered(req *request, ids []token) object {
	var limit, options, salt, transfer any
	if req.Limited {
		limit = req.MaxTokens
	}
	if raw := req.Fields["stream_options"]; req.Fields.has("stream_options") {
		options = raw
	}
	if req.CacheSalt != "" {
		salt = req.CacheSalt
	}
	if raw := req.Fields["kv_transfer_params"]; req.Fields.has("kv_transfer_params") {
		transfer = raw
	}
	return obj("request_id", randomID()+randomID(), "token_ids", v.e.answered(ids), "assistant_tokens_mask", nil, "token_offsets", nil,
		"features", nil, "content_parts", nil,
		"sampling_params", obj("n", req.N, "temperature", req.Temperature, "top_p", req.TopP, "seed", req.Seed,
			"stop", append([]string{}, req.Stop...), "stop_token_ids", append([]token{}, req.StopTokenIDs...),
			"ignore_eos", req.IgnoreEOS, "max_tokens", limit, "min_tokens", req.MinTokens),
		"model", v.e.cfg.Model, "stream", req.Stream, "stream_options", options, "cache_salt", salt, "priority", 0,
		"kv_transfer_params", transfer, "ec_transfer_params", nil)
}

// tokenize answers POST /v1/tokenize and /tokenize for a prompt, a list of
// prompts or messages (srt/entrypoints/openai/serving_tokenize.py). Unknown
// fields belong to the chat request.
func (g *sglang) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := smallBody(w, r)
	if ferr == nil && f.has("prompt") == f.has("messages") {
		ferr = &fieldError{"body", "value_error", "Value error, Exactly one of 'prompt' or 'messages' must be provided."}
	}
	var lists [][]token
	if ferr == nil {
		lists, ferr = tokenizeSGLang(r.Header, f)
	}
	if ferr != nil {
		refusal := sglangFieldError(routeCompletions, ferr)
		writeJSON(w, refusal.Status, g.errorBody(refusal))
		return
	}
	for i := range lists {
		lists[i] = g.e.answered(lists[i])
	}
	tokens, count := any(lists), any(nil)
	if batchPrompt(f["prompt"]) {
		counts := []int{}
		for _, ids := range lists {
			counts = append(counts, len(ids))
		}
		count = counts
	} else {
		tokens, count = lists[0], len(lists[0])
	}
	writeJSON(w, http.StatusOK, obj("tokens", tokens, "count", count, "max_model_len", g.e.maxModelLen()))
}

// tokenizeSGLang returns the ids of each prompt of a tokenize body.
func tokenizeSGLang(h http.Header, f fields) ([][]token, *fieldError) {
	p := fieldReader{f: f}
	p.str("model", "")
	p.boolean("add_special_tokens") // the simulator's model has none
	if p.err != nil {
		return nil, p.err
	}
	if f.has("messages") {
		req, err := parseOpenAI(routeChat, h, f)
		if err != nil {
			return nil, err
		}
		return req.Prompts, nil
	}
	var text string
	if json.Unmarshal(f["prompt"], &text) == nil {
		return [][]token{tokenize(text)}, nil
	}
	var texts []string
	if json.Unmarshal(f["prompt"], &texts) != nil {
		return nil, &fieldError{"prompt", "string_type", "Input should be a valid string"}
	}
	lists := [][]token{}
	for _, text := range texts {
		lists = append(lists, tokenize(text))
	}
	return lists, nil
}

// detokenize answers POST /v1/detokenize and /detokenize.
func (g *sglang) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := smallBody(w, r)
	if ferr == nil && !f.has("tokens") {
		ferr = &fieldError{"tokens", "missing", "Field required"}
	}
	var lists [][]token
	if ferr == nil && json.Unmarshal(f["tokens"], &lists) == nil && len(lists) > 0 {
		texts := []any{}
		for _, ids := range lists {
			texts = append(texts, validText(detokenize(ids)))
		}
		writeJSON(w, http.StatusOK, obj("text", texts))
		return
	}
	var ids []token
	if ferr == nil {
		ids, ferr = parseTokenIDs(f, "tokens")
	}
	if ferr != nil {
		refusal := sglangFieldError(routeCompletions, ferr)
		writeJSON(w, refusal.Status, g.errorBody(refusal))
		return
	}
	writeJSON(w, http.StatusOK, obj("text", validText(detokenize(ids))))
}

// tokenize answers POST /_internal/tokenize. Its request model knows only a
// prompt and the model's name (TokenizeRequest in
// tensorrt_llm/serve/openai_protocol.py).
func (t *trtllm) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := smallBody(w, r)
	if ferr == nil {
		if name := f.unknown([]string{"model", "prompt"}); name != "" {
			ferr = forbidden(name)
		}
	}
	p := fieldReader{f: f, err: ferr}
	p.str("model", "")
	text := p.str("prompt", "")
	if p.err == nil && !f.has("prompt") {
		p.keep(&fieldError{"prompt", "missing", "Field required"})
	}
	if p.err != nil {
		refusal := trtFieldError(p.err)
		writeJSON(w, refusal.Status, t.errorBody(refusal))
		return
	}
	ids := t.e.answered(tokenize(text))
	writeJSON(w, http.StatusOK, obj("count", len(ids), "tokens", ids))
}
