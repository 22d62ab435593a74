package enginesim

import "net/http"

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
