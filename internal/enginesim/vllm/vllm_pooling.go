package vllm

import (
	"net/http"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// poolingRoutes adds vLLM's routes.
func (v *VLLM) poolingRoutes(mux *http.ServeMux) {
	for path, run := range map[string]func(*core.Pooled) any{
		"/v1/embeddings": (*core.Pooled).Embeddings, "/pooling": (*core.Pooled).PooledOutputs, "/classify": (*core.Pooled).Classes,
		"/rerank": (*core.Pooled).Rerank, "/v1/rerank": (*core.Pooled).Rerank, "/v2/rerank": (*core.Pooled).Rerank,
		"/generative_scoring": (*core.Pooled).ScoresSGLang, "/score": (*core.Pooled).Scores, "/v1/score": (*core.Pooled).Scores, "/v1/messages/count_tokens": (*core.Pooled).CountTokens,
	} {
		mux.HandleFunc("POST "+path, v.e.Pooling(v.checkModel, pydanticError, run))
	}
}
