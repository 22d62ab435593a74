package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestTokenizeIsWhatIsComputed: each endpoint returns the ids under which the
// same request's blocks are cached.
func TestTokenizeIsWhatIsComputed(t *testing.T) {
	const chat = `"messages":[{"role":"system","content":"You are terse. Answer in one word, and never in two."},{"role":"user","content":[{"type":"text","text":"What is the capital of France?"}]}]`
	tools := `,"tools":[{"type":"function", "function":{"name":"look_up","parameters":{"type":"object"}}}]`
	prompt := completion(words(4, 50)+" straße", "")
	tests := []struct {
		name, connector, ask, body, route string
		path                              []any
	}{
		{"vllm prompt", ConnectorVLLMNixl, "/tokenize", prompt, core.RouteCompletions, []any{"tokens"}},
		{"vllm messages", ConnectorVLLMNixl, "/tokenize", `{"model":"sim",` + chat + `}`, core.RouteChat, []any{"tokens"}},
		{"vllm tools", ConnectorVLLMNixl, "/tokenize", `{"model":"sim",` + chat + tools + `}`, core.RouteChat, []any{"tokens"}},
		{"vllm continued", ConnectorVLLMNixl, "/tokenize", `{"model":"sim",` + chat + `,"add_generation_prompt":false,"continue_final_message":true}`, core.RouteChat, []any{"tokens"}},
		{"vllm render chat", ConnectorVLLMNixl, core.RouteChat + "/render", `{"model":"sim",` + chat + tools + `}`, core.RouteChat, []any{"token_ids"}},
		{"vllm render prompt", ConnectorVLLMNixl, core.RouteCompletions + "/render", prompt, core.RouteCompletions, []any{0, "token_ids"}},
		{"sglang prompt", ConnectorSGLang, "/v1/tokenize", prompt, core.RouteCompletions, []any{"tokens"}},
		{"sglang messages", ConnectorSGLang, "/tokenize", `{"model":"sim",` + chat + tools + `}`, core.RouteChat, []any{"tokens"}},
		{"trtllm prompt", ConnectorTRTLLM, "/_internal/tokenize", prompt, core.RouteCompletions, []any{"tokens"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := startEngine(t, Config{Connector: tt.connector, BlockSize: 4})
			a := post(t, e.URL()+tt.ask, tt.body)
			if a.status != http.StatusOK {
				t.Fatalf("post(e.URL()+tt.ask, tt.body) = %d, %s", a.status, a.body)
			}
			got := ids(t, a.field(t, tt.path...))
			if tt.path[0] == "tokens" && a.field(t, "count") != json.Number(fmt.Sprint(len(got))) {
				t.Errorf("count %v of %d", a.field(t, "count"), len(got))
			}
			body := tt.body[:len(tt.body)-1] + `,"max_tokens":1}`
			answer := post(t, e.URL()+tt.route, body)
			if n := answer.field(t, "usage", "prompt_tokens"); n != json.Number(fmt.Sprint(len(got))) {
				t.Fatalf("%d ids, prompt_tokens %v: %s", len(got), n, answer.body)
			}
			r := e.Ranks[0]
			r.Mu.Lock()
			hit := len(r.Cache.Match("", append(slices.Clone(got), 0)))
			r.Mu.Unlock()
			if hit != len(got)/4 {
				t.Errorf("of %d ids %d blocks are cached", len(got), hit)
			}
			e.SetWrongTokens(true)
			if wrong := ids(t, post(t, e.URL()+tt.ask, tt.body).field(t, tt.path...)); slices.Equal(wrong, got) ||
				len(r.Cache.Match("", wrong)) != 0 {
				t.Errorf("wrong ids %d", wrong)
			}
			if same := post(t, e.URL()+tt.route, body); same.text(t) != answer.text(t) {
				t.Error("the fault also changed the computed tokens")
			}
		})
	}
}

// TestTokenizeIsStrict checks which bodies the engines' request models reject
// and accept.
func TestTokenizeIsStrict(t *testing.T) {
	tests := []struct {
		connector, path, body string
		status                int
		want                  string // the answer; empty: not checked
	}{
		{ConnectorVLLMNixl, "/tokenize", `{"prompt":"ab","unknown":1,"return_token_strs":true}`, 200, `{"count":1,"max_model_len":65536,"tokens":[90466],"token_strs":["ab"]}`},
		{ConnectorVLLMNixl, "/tokenize", `{"model":"other","prompt":"ab"}`, 404, ""},
		{ConnectorVLLMNixl, "/tokenize", `{"prompt":["ab"]}`, 400, ""},
		{ConnectorVLLMNixl, "/tokenize", `{"prompt":"ab","add_special_tokens":"maybe"}`, 400, ""},
		{ConnectorVLLMNixl, "/tokenize", `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true,"continue_final_message":true}`, 400, ""},
		{ConnectorVLLMNixl, "/tokenize", `{"messages":"x"}`, 400, ""},
		{ConnectorVLLMNixl, "/tokenize", `{`, 400, ""},
		{ConnectorVLLMNixl, "/detokenize", `{"tokens":[90466]}`, 200, `{"prompt":"ab"}`},
		{ConnectorVLLMNixl, "/detokenize", `{}`, 400, ""},
		{ConnectorVLLMNixl, core.RouteChat + "/render", `{"messages":[]}`, 200, ""},
		{ConnectorVLLMNixl, core.RouteChat + "/render", `{"model":"other","messages":[]}`, 404, ""},
		{ConnectorVLLMNixl, core.RouteChat + "/render", `{}`, 400, ""},
		{ConnectorVLLMNixl, core.RouteChat + "/render", `[`, 400, ""},
		{ConnectorSGLang, "/v1/tokenize", `{"prompt":"ab","unknown":1}`, 200, `{"tokens":[90466],"count":1,"max_model_len":65536}`},
		{ConnectorSGLang, "/tokenize", `{"prompt":["ab","c"]}`, 200, `{"tokens":[[90466],[99]],"count":[1,1],"max_model_len":65536}`},
		{ConnectorSGLang, "/tokenize", `{"prompt":[1,2]}`, 400, ""},
		{ConnectorSGLang, "/tokenize", `{"prompt":"ab","messages":[{"role":"user","content":"x"}]}`, 400, ""},
		{ConnectorSGLang, "/tokenize", `{}`, 400, ""},
		{ConnectorSGLang, "/tokenize", `{"messages":[{"role":"user","content":"x"}],"n":"x"}`, 400, ""},
		{ConnectorSGLang, "/v1/detokenize", `{"tokens":[90466]}`, 200, `{"text":"ab"}`},
		{ConnectorSGLang, "/detokenize", `{"tokens":[[90466],[99]]}`, 200, `{"text":["ab","c"]}`},
		{ConnectorSGLang, "/detokenize", `{}`, 400, ""},
		{ConnectorTRTLLM, "/_internal/tokenize", `{"model":"other","prompt":"ab"}`, 200, `{"count":1,"tokens":[90466]}`},
		{ConnectorTRTLLM, "/_internal/tokenize", `{"prompt":"ab","add_special_tokens":true}`, 400, `{"error":"[{'type': 'extra_forbidden', 'loc': ('body', 'add_special_tokens'), 'msg': 'Extra inputs are not permitted'}]"}`},
		{ConnectorTRTLLM, "/_internal/tokenize", `{"messages":[]}`, 400, ""},
		{ConnectorTRTLLM, "/_internal/tokenize", `{"prompt":["ab"]}`, 400, ""},
		{ConnectorTRTLLM, "/_internal/tokenize", `{}`, 400, ""},
	}
	engines := map[string]*Engine{}
	for _, tt := range tests {
		e := engines[tt.connector]
		if e == nil {
			e = startEngine(t, Config{Connector: tt.connector})
			engines[tt.connector] = e
		}
		a := post(t, e.URL()+tt.path, tt.body)
		if a.status != tt.status || tt.want != "" && string(a.body) != tt.want {
			t.Errorf("%s, %s, %s: post(e.URL()+tt.path, tt.body) = %d, %s", tt.connector, tt.path, tt.body, a.status, a.body)
		}
	}
}
