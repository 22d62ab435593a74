package openai

import "testing"

func TestAPI(t *testing.T) {
	for path, want := range map[string]struct {
		api       API
		name      string
		generates bool
	}{
		"/v1/completions":           {Completions, "completions", true},
		"/v1/chat/completions":      {Chat, "chat", true},
		"/v1/responses":             {Responses, "responses", true},
		"/v1/messages":              {Messages, "messages", true},
		"/generate":                 {Generate, "generate", true},
		"/inference/v1/generate":    {VLLMGenerate, "vllm_generate", true},
		"/v1/embeddings":            {Embeddings, "embeddings", false},
		"/tokenize":                 {Tokenize, "tokenize", false},
		"/detokenize":               {Detokenize, "detokenize", false},
		"/rerank":                   {Rerank, "rerank", false},
		"/v1/rerank":                {RerankV1, "rerank", false},
		"/v2/rerank":                {RerankV2, "rerank", false},
		"/score":                    {Score, "score", false},
		"/v1/score":                 {ScoreV1, "score", false},
		"/classify":                 {Classify, "classify", false},
		"/v1/classify":              {ClassifyV1, "classify", false},
		"/pooling":                  {Pooling, "pooling", false},
		"/v1/messages/count_tokens": {CountTokens, "count_tokens", false},
		"/v1/audio/transcriptions":  {Transcriptions, "transcriptions", false},
		"/v1/audio/translations":    {Translations, "translations", false},
		"/v1/audio/speech":          {Speech, "speech", false},
		"/v1/images/generations":    {ImageGenerations, "image_generations", false},
		"/v1/images/edits":          {ImageEdits, "image_edits", false},
	} {
		api, ok := APIFor(path)
		if !ok || api != want.api || api.Path() != path || api.String() != want.name || api.Generates() != want.generates {
			t.Errorf("%s: APIFor(path) = %v, %v, %s, %v", path, api, ok, api.Path(), api.Generates())
		}
	}
	for _, path := range []string{"", "/", "/v1/completions/", "/V1/completions", "/v1/models", "/v1/completions?x"} {
		if api, ok := APIFor(path); ok || api != 0 {
			t.Errorf("path %q is accepted as API %v", path, api)
		}
	}
	for _, api := range []API{0, 100} {
		if api.String() != "unknown" || api.Path() != "" {
			t.Errorf("API %d is %s at %s", uint8(api), api, api.Path())
		}
	}
}
