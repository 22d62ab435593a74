package enginesim

import "net/http"

// poolingRoutes adds vLLM's routes.
func (v *vllm) poolingRoutes(mux *http.ServeMux) {
	for path, run := range map[string]func(*pooled) any{
		"/v1/embeddings": (*pooled).embeddings, "/pooling": (*pooled).pooledOutputs, "/classify": (*pooled).classes,
		"/rerank": (*pooled).rerank, "/v1/rerank": (*pooled).rerank, "/v2/rerank": (*pooled).rerank,
		"/generative_scoring": (*pooled).scoresSGLang, "/score": (*pooled).scores, "/v1/score": (*pooled).scores, "/v1/messages/count_tokens": (*pooled).countTokens,
	} {
		mux.HandleFunc("POST "+path, v.e.pooling(v.checkModel, pydanticError, run))
	}
}
