package vllm

import (
	"net/http"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// tokenize answers POST /tokenize for a prompt or messages, as the request
// models of vllm/entrypoints/serve/tokenize/protocol.py accept them. Unknown
// fields are ignored.
func (v *VLLM) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := core.SmallBody(w, r)
	var ids []core.Token
	if ferr == nil {
		ids, ferr = tokenizeVLLM(f)
	}
	refusal := v.checkModel(core.FieldText(f, "model"))
	if ferr != nil {
		refusal = pydanticError(ferr, f)
	}
	if refusal != nil {
		core.WriteJSON(w, refusal.Status, v.ErrorBody(refusal))
		return
	}
	v.e.Stats.Tokenized.Add(1)
	ids = v.e.Answered(ids)
	var texts any
	if want, _ := f.Boolean("return_token_strs", false); want {
		list := []any{}
		for _, t := range ids {
			list = append(list, core.ValidText(t.Text()))
		}
		texts = list
	}
	core.WriteJSON(w, http.StatusOK, core.Obj("count", len(ids), "max_model_len", v.e.MaxModelLen(), "tokens", ids, "token_strs", texts))
}

// tokenizeVLLM returns the ids of a /tokenize body.
func tokenizeVLLM(f core.Fields) ([]core.Token, *core.FieldError) {
	p := core.FieldReader{F: f}
	p.Str("model", "")
	p.Boolean("add_special_tokens") // the simulator's model has none
	p.Boolean("return_token_strs")
	if !f.Has("messages") {
		text := p.Str("prompt", "")
		if p.Err == nil && !f.Has("prompt") {
			p.Keep(&core.FieldError{Field: "prompt", Kind: "missing", Message: "Field required"})
		}
		return core.Tokenize(text), p.Err
	}
	if p.Boolean("continue_final_message") && p.Boolean("add_generation_prompt") {
		p.Keep(&core.FieldError{Field: "body", Kind: "value_error", Message: "Cannot set both `continue_final_message` and `add_generation_prompt` to True."})
	}
	text, err := core.ChatText(f)
	p.Keep(err)
	return core.Tokenize(text), p.Err
}

// detokenize answers POST /detokenize.
func (v *VLLM) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := core.SmallBody(w, r)
	var ids []core.Token
	if ferr == nil && !f.Has("tokens") {
		ferr = &core.FieldError{Field: "tokens", Kind: "missing", Message: "Field required"}
	}
	if ferr == nil {
		ids, ferr = core.ParseTokenIDs(f, "tokens")
	}
	if ferr != nil {
		refusal := pydanticError(ferr, f)
		core.WriteJSON(w, refusal.Status, v.ErrorBody(refusal))
		return
	}
	core.WriteJSON(w, http.StatusOK, core.Obj("prompt", core.ValidText(core.Detokenize(ids))))
}

// renderedRoutes are the routes with a route that renders.
var renderedRoutes = [...]string{core.RouteChat, core.RouteCompletions, core.RouteMessages, core.RouteResponses}

// scaleOutRoutes adds the routes of --enable-scale-out.
func (v *VLLM) scaleOutRoutes(mux *http.ServeMux) {
	generate := v.e.Generating(core.RouteTokens)
	if v.e.Cfg.NoScaleOut {
		generate = v.scaleOutDisabled
	}
	mux.HandleFunc("POST "+core.RouteTokens, generate)
	for _, route := range renderedRoutes {
		answer := v.render(route)
		if v.e.Cfg.NoScaleOut {
			answer = v.scaleOutDisabled
		}
		mux.HandleFunc("POST "+route+"/render", answer)
	}
}

// scaleOutDisabled answers for the routes of --enable-scale-out in an engine without the flag
// (vllm/entrypoints/scale_out/factories.py).
func (v *VLLM) scaleOutDisabled(w http.ResponseWriter, _ *http.Request) {
	refusal := &core.APIError{Status: http.StatusForbidden, Type: "PermissionDeniedError",
		Message: "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."}
	core.WriteJSON(w, refusal.Status, v.ErrorBody(refusal))
}

// render answers POST ROUTE/render with the body that /inference/v1/generate takes for the
// same request, for completions with a list of them (vllm/entrypoints/scale_out/render).
// Its errors have the OpenAI form on every route.
func (v *VLLM) render(route string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := core.ReadBody(w, r)
		if err != nil {
			return
		}
		req, refusal := v.renderable(route, r.Header, body)
		if refusal != nil {
			core.WriteJSON(w, refusal.Status, v.ErrorBody(refusal))
			return
		}
		list := make([]any, 0, len(req.Prompts))
		for _, ids := range req.Prompts {
			list = append(list, v.rendered(req, ids))
		}
		if route != core.RouteCompletions {
			core.WriteJSON(w, http.StatusOK, list[0])
			return
		}
		core.WriteJSON(w, http.StatusOK, list)
	}
}

// renderable parses a body to render, and refuses what render/serving.py does.
func (v *VLLM) renderable(route string, h http.Header, body []byte) (*core.Request, *core.APIError) {
	f, ferr := core.DecodeFields(body)
	if ferr != nil {
		return nil, pydanticError(ferr, nil)
	}
	req, refusal := parseAPI(route, h, f)
	if refusal != nil {
		return nil, refusal
	}
	if beam, _ := f.Boolean("use_beam_search", false); beam {
		return nil, core.BadRequest("", "Beam search is not supported by the render endpoint")
	}
	if route == core.RouteResponses && f.Has("previous_response_id") {
		refusal := core.BadRequest("previous_response_id", "previous_response_id is not supported by the stateless render endpoint.")
		refusal.Type = "invalid_request_error"
		return nil, refusal
	}
	return req, v.check(req)
}

// rendered is a GenerateRequest.
func (v *VLLM) rendered(req *core.Request, ids []core.Token) core.Object {
	var limit, options, salt, transfer any
	if req.Limited {
		limit = req.MaxTokens
	}
	if raw := req.Fields["stream_options"]; req.Fields.Has("stream_options") {
		options = raw
	}
	if req.CacheSalt != "" {
		salt = req.CacheSalt
	}
	if raw := req.Fields["kv_transfer_params"]; req.Fields.Has("kv_transfer_params") {
		transfer = raw
	}
	return core.Obj("request_id", core.RandomID()+core.RandomID(), "token_ids", v.e.Answered(ids), "assistant_tokens_mask", nil, "token_offsets", nil,
		"features", nil, "content_parts", nil,
		"sampling_params", core.Obj("n", req.N, "temperature", req.Temperature, "top_p", req.TopP, "seed", req.Seed,
			"stop", append([]string{}, req.Stop...), "stop_token_ids", append([]core.Token{}, req.StopTokenIDs...),
			"ignore_eos", req.IgnoreEOS, "max_tokens", limit, "min_tokens", req.MinTokens),
		"model", v.e.Cfg.Model, "stream", req.Stream, "stream_options", options, "cache_salt", salt, "priority", 0,
		"kv_transfer_params", transfer, "ec_transfer_params", nil)
}
