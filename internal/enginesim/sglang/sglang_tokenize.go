package enginesim

import (
	"encoding/json"
	"net/http"
)

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

// poolingRoutes adds SGLang's routes.
func (g *sglang) poolingRoutes(mux *http.ServeMux) {
	for path, run := range map[string]func(*pooled) any{
		"/v1/embeddings": (*pooled).embeddings, "/v1/classify": (*pooled).classes, "/classify": (*pooled).classSGLang,
		"/v1/rerank": (*pooled).rerankSGLang, "/v1/score": (*pooled).scoresSGLang, "/v1/messages/count_tokens": (*pooled).countTokens,
	} {
		answer := func(err *fieldError, _ fields) *apiError { return sglangFieldError(path, err) }
		mux.HandleFunc("POST "+path, g.e.pooling(func(string) *apiError { return nil }, answer, run))
	}
}
