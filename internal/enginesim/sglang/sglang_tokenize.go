package sglang

import (
	"encoding/json"
	"net/http"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// tokenize answers POST /v1/tokenize and /tokenize for a prompt, a list of
// prompts or messages (srt/entrypoints/openai/serving_tokenize.py). Unknown
// fields belong to the chat request.
func (g *SGLang) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := core.SmallBody(w, r)
	if ferr == nil && f.Has("prompt") == f.Has("messages") {
		ferr = &core.FieldError{Field: "body", Kind: "value_error", Message: "Value error, Exactly one of 'prompt' or 'messages' must be provided."}
	}
	var lists [][]core.Token
	if ferr == nil {
		lists, ferr = tokenizeSGLang(r.Header, f)
	}
	if ferr != nil {
		refusal := sglangFieldError(core.RouteCompletions, ferr)
		core.WriteJSON(w, refusal.Status, g.ErrorBody(refusal))
		return
	}
	for i := range lists {
		lists[i] = g.e.Answered(lists[i])
	}
	tokens, count := any(lists), any(nil)
	if core.BatchPrompt(f["prompt"]) {
		counts := []int{}
		for _, ids := range lists {
			counts = append(counts, len(ids))
		}
		count = counts
	} else {
		tokens, count = lists[0], len(lists[0])
	}
	core.WriteJSON(w, http.StatusOK, core.Obj("tokens", tokens, "count", count, "max_model_len", g.e.MaxModelLen()))
}

// tokenizeSGLang returns the ids of each prompt of a tokenize body.
func tokenizeSGLang(h http.Header, f core.Fields) ([][]core.Token, *core.FieldError) {
	p := core.FieldReader{F: f}
	p.Str("model", "")
	p.Boolean("add_special_tokens") // the simulator's model has none
	if p.Err != nil {
		return nil, p.Err
	}
	if f.Has("messages") {
		req, err := core.ParseOpenAI(core.RouteChat, h, f)
		if err != nil {
			return nil, err
		}
		return req.Prompts, nil
	}
	var text string
	if json.Unmarshal(f["prompt"], &text) == nil {
		return [][]core.Token{core.Tokenize(text)}, nil
	}
	var texts []string
	if json.Unmarshal(f["prompt"], &texts) != nil {
		return nil, &core.FieldError{Field: "prompt", Kind: "string_type", Message: "Input should be a valid string"}
	}
	lists := [][]core.Token{}
	for _, text := range texts {
		lists = append(lists, core.Tokenize(text))
	}
	return lists, nil
}

// detokenize answers POST /v1/detokenize and /detokenize.
func (g *SGLang) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := core.SmallBody(w, r)
	if ferr == nil && !f.Has("tokens") {
		ferr = &core.FieldError{Field: "tokens", Kind: "missing", Message: "Field required"}
	}
	var lists [][]core.Token
	if ferr == nil && json.Unmarshal(f["tokens"], &lists) == nil && len(lists) > 0 {
		texts := []any{}
		for _, ids := range lists {
			texts = append(texts, core.ValidText(core.Detokenize(ids)))
		}
		core.WriteJSON(w, http.StatusOK, core.Obj("text", texts))
		return
	}
	var ids []core.Token
	if ferr == nil {
		ids, ferr = core.ParseTokenIDs(f, "tokens")
	}
	if ferr != nil {
		refusal := sglangFieldError(core.RouteCompletions, ferr)
		core.WriteJSON(w, refusal.Status, g.ErrorBody(refusal))
		return
	}
	core.WriteJSON(w, http.StatusOK, core.Obj("text", core.ValidText(core.Detokenize(ids))))
}

// poolingRoutes adds SGLang's routes.
func (g *SGLang) poolingRoutes(mux *http.ServeMux) {
	for path, run := range map[string]func(*core.Pooled) any{
		"/v1/embeddings": (*core.Pooled).Embeddings, "/v1/classify": (*core.Pooled).Classes, "/classify": (*core.Pooled).ClassSGLang,
		"/v1/rerank": (*core.Pooled).RerankSGLang, "/v1/score": (*core.Pooled).ScoresSGLang, "/v1/messages/count_tokens": (*core.Pooled).CountTokens,
	} {
		answer := func(err *core.FieldError, _ core.Fields) *core.APIError { return sglangFieldError(path, err) }
		mux.HandleFunc("POST "+path, g.e.Pooling(func(string) *core.APIError { return nil }, answer, run))
	}
}
