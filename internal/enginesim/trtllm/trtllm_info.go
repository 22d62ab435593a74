package enginesim

import (
	"context"
	"net/http"
)

// trtVersions are the versions that workers report, by wire generation.
var trtVersions = map[int]string{TRTLLMWireG1: "1.1.0", TRTLLMWireG2: "1.3.0rc24", TRTLLMWireG3: "1.4.0"}

func (t *trtllm) routes(mux *http.ServeMux) {
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, obj("version", trtVersions[t.cfg.Wire]))
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, obj("object", "list", "data", []any{obj(
			"id", t.e.cfg.Model, "object", "model", "created", 1700000000, "owned_by", "tensorrt_llm",
		)}))
	})
	mux.HandleFunc("GET /server_info", t.serverInfo)
	mux.HandleFunc("POST "+routeResponses, t.e.generating(routeResponses))
	mux.HandleFunc("GET /metrics", t.iterationStats)
	mux.HandleFunc("GET /health_generate", t.healthGenerate)
	mux.HandleFunc("GET /perf_metrics", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []any{}) // it is empty without return_perf_metrics
	})
	mux.HandleFunc("POST /kv_cache_events", t.events.drain)
	if t.cfg.Wire >= TRTLLMWireG2 {
		mux.HandleFunc("POST /_internal/tokenize", t.tokenize)
	}
	t.clockRoutes(mux)
}

// serverInfo answers GET /server_info. The params are those that a
// generation_first orchestrator adds to its generation leg, in the form of the
// Python transceiver (_torch/disaggregation/transceiver.py,
// get_disaggregated_params): the endpoint is a list here and a string there,
// and with several ranks none of them is named.
func (t *trtllm) serverInfo(w http.ResponseWriter, _ *http.Request) {
	if t.cfg.Wire == TRTLLMWireG1 {
		writeJSON(w, http.StatusOK, obj("disaggregated_params", nil))
		return
	}
	var rank any
	if len(t.e.ranks) == 1 {
		rank = 0
	}
	writeJSON(w, http.StatusOK, obj(
		"disaggregated_params", obj(
			"ctx_dp_rank", rank,
			"ctx_info_endpoint", []string{endpointScheme + t.e.ranks[0].side.listener.Addr().String()},
		),
		"kv_cache_hash_algo", trtHashAlgo, "tokens_per_block", t.e.cfg.BlockSize, "max_batch_size", t.e.cfg.MaxRunning,
	))
}

// iterationStats answers GET /metrics: a list of iterations, here only the
// present one, with a row for each rank. All ranks share the queue, which is in
// rank 0's row (_torch/pyexecutor/adp_iter_stats.py).
func (t *trtllm) iterationStats(w http.ResponseWriter, _ *http.Request) {
	var loads []rankLoad
	active, queued, queuedTokens := 0, 0, 0
	for _, r := range t.e.ranks {
		l := r.load()
		loads = append(loads, l)
		active += l.running + l.loading
		queued += l.waiting
		queuedTokens += l.uncachedTokens
	}
	rows := make([]any, 0, len(loads))
	for i, l := range loads {
		used, blocks := l.usedTokens/t.e.cfg.BlockSize, t.e.cfg.KVBlocks
		rows = append(rows, obj(
			"iter", t.e.stats.outputTokens.Load(), "iterLatencyMS", 0.0, "maxNumActiveRequests", t.e.cfg.MaxRunning*len(loads),
			"numActiveRequests", active, "numQueuedRequests", queued,
			"kvCacheStats", obj("maxNumBlocks", blocks, "freeNumBlocks", blocks-used, "usedNumBlocks", used,
				"tokensPerBlock", t.e.cfg.BlockSize, "cacheHitRate", t.e.hitRate()),
			"inflightBatchingStats", obj("numScheduledRequests", l.running, "numPausedRequests", 0,
				"numQueuedContextRequests", queued, "numQueuedCtxTokens", queuedTokens),
			"attentionDpRank", i,
		))
		queued, queuedTokens = 0, 0
	}
	writeJSON(w, http.StatusOK, rows)
}

// healthGenerate answers GET /health_generate with a generation of one token.
func (t *trtllm) healthGenerate(w http.ResponseWriter, r *http.Request) {
	req := &request{Route: routeChat, Chat: true, N: 1, Limited: true, MaxTokens: 1, Rank: -1, Prompts: [][]token{tokenize("<|user|>hi\n<|assistant|>")}, Ext: &trtRequest{}}
	t.e.stats.requests.Add(1)
	if err := t.generate(context.WithoutCancel(r.Context()), t.e.newSequences(req)[0], func(token) {}); err != nil {
		plainText(w, http.StatusInternalServerError, "Generation health check failed")
		return
	}
	plainText(w, http.StatusOK, "Generation health check OK")
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
