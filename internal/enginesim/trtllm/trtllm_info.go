package trtllm

import (
	"context"
	"net/http"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// trtVersions are the versions that workers report, by wire generation.
var trtVersions = map[int]string{core.TRTLLMWireG1: "1.1.0", core.TRTLLMWireG2: "1.3.0rc24", core.TRTLLMWireG3: "1.4.0"}

func (t *TRTLLM) Routes(mux *http.ServeMux) {
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, core.Obj("version", trtVersions[t.cfg.Wire]))
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, core.Obj("object", "list", "data", []any{core.Obj(
			"id", t.e.Cfg.Model, "object", "model", "created", 1700000000, "owned_by", "tensorrt_llm",
		)}))
	})
	mux.HandleFunc("GET /server_info", t.serverInfo)
	mux.HandleFunc("POST "+core.RouteResponses, t.e.Generating(core.RouteResponses))
	mux.HandleFunc("GET /metrics", t.iterationStats)
	mux.HandleFunc("GET /health_generate", t.healthGenerate)
	mux.HandleFunc("GET /perf_metrics", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, []any{}) // it is empty without return_perf_metrics
	})
	mux.HandleFunc("POST /kv_cache_events", t.Events.drain)
	if t.cfg.Wire >= core.TRTLLMWireG2 {
		mux.HandleFunc("POST /_internal/tokenize", t.tokenize)
	}
	t.clockRoutes(mux)
}

// serverInfo answers GET /server_info. The params are those that a
// generation_first orchestrator adds to its generation leg, in the form of the
// Python transceiver (_torch/disaggregation/transceiver.py,
// get_disaggregated_params): the endpoint is a list here and a string there,
// and with several ranks none of them is named.
func (t *TRTLLM) serverInfo(w http.ResponseWriter, _ *http.Request) {
	if t.cfg.Wire == core.TRTLLMWireG1 {
		core.WriteJSON(w, http.StatusOK, core.Obj("disaggregated_params", nil))
		return
	}
	var rank any
	if len(t.e.Ranks) == 1 {
		rank = 0
	}
	core.WriteJSON(w, http.StatusOK, core.Obj(
		"disaggregated_params", core.Obj(
			"ctx_dp_rank", rank,
			"ctx_info_endpoint", []string{endpointScheme + t.e.Ranks[0].Side.Listener.Addr().String()},
		),
		"kv_cache_hash_algo", trtHashAlgo, "tokens_per_block", t.e.Cfg.BlockSize, "max_batch_size", t.e.Cfg.MaxRunning,
	))
}

// iterationStats answers GET /metrics: a list of iterations, here only the
// present one, with a row for each rank. All ranks share the queue, which is in
// rank 0's row (_torch/pyexecutor/adp_iter_stats.py).
func (t *TRTLLM) iterationStats(w http.ResponseWriter, _ *http.Request) {
	var loads []core.RankLoad
	active, queued, queuedTokens := 0, 0, 0
	for _, r := range t.e.Ranks {
		l := r.Load()
		loads = append(loads, l)
		active += l.Running + l.Loading
		queued += l.Waiting
		queuedTokens += l.UncachedTokens
	}
	rows := make([]any, 0, len(loads))
	for i, l := range loads {
		used, blocks := l.UsedTokens/t.e.Cfg.BlockSize, t.e.Cfg.KVBlocks
		rows = append(rows, core.Obj(
			"iter", t.e.Stats.OutputTokens.Load(), "iterLatencyMS", 0.0, "maxNumActiveRequests", t.e.Cfg.MaxRunning*len(loads),
			"numActiveRequests", active, "numQueuedRequests", queued,
			"kvCacheStats", core.Obj("maxNumBlocks", blocks, "freeNumBlocks", blocks-used, "usedNumBlocks", used,
				"tokensPerBlock", t.e.Cfg.BlockSize, "cacheHitRate", t.e.HitRate()),
			"inflightBatchingStats", core.Obj("numScheduledRequests", l.Running, "numPausedRequests", 0,
				"numQueuedContextRequests", queued, "numQueuedCtxTokens", queuedTokens),
			"attentionDpRank", i,
		))
		queued, queuedTokens = 0, 0
	}
	core.WriteJSON(w, http.StatusOK, rows)
}

// healthGenerate answers GET /health_generate with a generation of one token.
func (t *TRTLLM) healthGenerate(w http.ResponseWriter, r *http.Request) {
	req := &core.Request{Route: core.RouteChat, Chat: true, N: 1, Limited: true, MaxTokens: 1, Rank: -1, Prompts: [][]core.Token{core.Tokenize("<|user|>hi\n<|assistant|>")}, Ext: &TRTRequest{}}
	t.e.Stats.Requests.Add(1)
	if err := t.Generate(context.WithoutCancel(r.Context()), t.e.NewSequences(req)[0], func(core.Token) {}); err != nil {
		core.PlainText(w, http.StatusInternalServerError, "Generation health check failed")
		return
	}
	core.PlainText(w, http.StatusOK, "Generation health check OK")
}

// tokenize answers POST /_internal/tokenize. Its request model knows only a
// prompt and the model's name (TokenizeRequest in
// tensorrt_llm/serve/openai_protocol.py).
func (t *TRTLLM) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ferr := core.SmallBody(w, r)
	if ferr == nil {
		if name := f.Unknown([]string{"model", "prompt"}); name != "" {
			ferr = forbidden(name)
		}
	}
	p := core.FieldReader{F: f, Err: ferr}
	p.Str("model", "")
	text := p.Str("prompt", "")
	if p.Err == nil && !f.Has("prompt") {
		p.Keep(&core.FieldError{Field: "prompt", Kind: "missing", Message: "Field required"})
	}
	if p.Err != nil {
		refusal := trtFieldError(p.Err)
		core.WriteJSON(w, refusal.Status, t.ErrorBody(refusal))
		return
	}
	ids := t.e.Answered(core.Tokenize(text))
	core.WriteJSON(w, http.StatusOK, core.Obj("count", len(ids), "tokens", ids))
}
