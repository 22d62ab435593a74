package enginesim

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

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
