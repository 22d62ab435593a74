package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// lengths are lengths of prompts around those of blocks.
var lengths = []int{1, 2, 15, 16, 17, 31, 32, 33, 200}

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

// An engine finds the blocks that another has computed, and its own when its
// cache is empty. It finds nothing in a store with other weights.
func TestStoreIsShared(t *testing.T) {
	dir := t.TempDir()
	start := func(model string) *Engine {
		return startEngine(t, Config{Connector: ConnectorVLLMStore, Store: dir, Model: model})
	}
	a, b, other := start("sim"), start("sim"), start("sim2")
	alone := startEngine(t, Config{Connector: ConnectorVLLMStore})
	for _, n := range lengths {
		body := completion(words(n, n), `"max_tokens":12`)
		want := post(t, alone.URL()+core.RouteCompletions, body).text(t)
		for _, e := range []*Engine{a, b} {
			if got := post(t, e.URL()+core.RouteCompletions, body); got.text(t) != want {
				t.Errorf("%d tokens: text %q, alone %q", n, got.text(t), want)
			}
		}
	}
	if s := a.State(); s.CachedTokens != 0 {
		t.Errorf("the first engine: %+v", s)
	}
	if s := b.State(); s.CachedTokens == 0 || s.PromptTokens-s.CachedTokens > int64(16*len(lengths)) {
		t.Errorf("the second engine: %+v", s)
	}
	a.ResetCache()
	body := completion(words(200, 200), `"max_tokens":12`)
	post(t, a.URL()+core.RouteCompletions, body)
	if s := a.State(); s.CachedTokens != 192 {
		t.Errorf("the first engine again: %+v", s)
	}
	checkNothing(t, other, dir, body)
}

// checkNothing asserts that the engine finds no blocks of a prompt that others
// have computed, and leaves no incomplete file.
func checkNothing(t *testing.T, e *Engine, dir, body string) {
	t.Helper()
	post(t, e.URL()+core.RouteCompletions, body)
	if s := e.State(); s.CachedTokens != 0 {
		t.Errorf("KV of another model was used: %+v", s)
	}
	if parts, _ := filepath.Glob(filepath.Join(dir, "*.part")); len(parts) > 0 {
		t.Errorf("incomplete files remain: %v", parts)
	}
	if files, _ := os.ReadDir(dir); len(files) == 0 {
		t.Error("the store is empty")
	}
}
