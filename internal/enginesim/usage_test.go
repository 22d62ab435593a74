package enginesim

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
)

// TestReportedCachedTokens: if prefill has computed a prompt before, its
// prefill leg and its decode leg report the prompt as cached, streamed or not,
// on every route with a usage.
func TestReportedCachedTokens(t *testing.T) {
	prompt := words(1, 40) // 32 of them in whole blocks
	cachedOf := func(t *testing.T, a answer) {
		t.Helper()
		if got := a.field(t, "usage", "prompt_tokens_details", "cached_tokens"); got != json.Number("32") {
			t.Errorf("cached_tokens %v in %s", got, a.body)
		}
	}
	streamed := func(t *testing.T, e *Engine, body string) {
		t.Helper()
		events := stream(t, e.URL()+core.RouteCompletions, withFields(body, `"stream":true,"stream_options":{"include_usage":true}`))
		if last := events[len(events)-2]; !strings.Contains(last, `"prompt_tokens_details":{"cached_tokens":32}`) {
			t.Errorf("last event %s", last)
		}
	}
	t.Run("vllm", func(t *testing.T) {
		pd := startPair(t)
		pd.decode(t, prompt, pd.prefill(t, prompt))
		for range 2 {
			a := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams))
			cachedOf(t, a)
			body := completion(prompt, `"max_tokens":4,"kv_transfer_params":`+a.params(t))
			cachedOf(t, post(t, pd.d.URL()+core.RouteCompletions, body))
			a = post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams))
			streamed(t, pd.d, completion(prompt, `"max_tokens":4,"kv_transfer_params":`+a.params(t)))
		}
		alone := pd.p
		streamed(t, alone, completion(prompt, `"max_tokens":4`))
		chat := `{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"` + strings.Repeat("abc ", 40) + `"}]}`
		post(t, alone.URL()+core.RouteChat, chat)
		n := post(t, alone.URL()+core.RouteChat, chat).field(t, "usage", "prompt_tokens_details", "cached_tokens")
		if n == json.Number("0") {
			t.Fatalf("chat: %v", n)
		}
		if a := post(t, alone.URL()+core.RouteMessages, chat); a.field(t, "usage", "cache_read_input_tokens") != n {
			t.Errorf("messages: %s", a.body)
		}
		input := `{"model":"sim","max_output_tokens":1,"input":"` + strings.Repeat("abc ", 40) + `"}`
		if a := post(t, alone.URL()+core.RouteResponses, input); a.field(t, "usage", "input_tokens_details", "cached_tokens") != n {
			t.Errorf("responses: %s", a.body)
		}
		var tokens []string
		for _, id := range core.Tokenize(prompt) {
			tokens = append(tokens, fmt.Sprint(id))
		}
		cachedOf(t, post(t, alone.URL()+core.RouteTokens, `{"token_ids":[`+strings.Join(tokens, ",")+`],"sampling_params":{"max_tokens":1}}`))
	})
	t.Run("sglang", func(t *testing.T) {
		p, d := sglangPair(t, Config{}, Config{})
		for room := range int64(3) {
			body := completion(prompt, `"max_tokens":4,`+bootstrap(p, room, fmt.Sprint("r", room)))
			pa, da := both(t, core.RouteCompletions, p, d, body)
			if pa.text(t); room > 0 {
				cachedOf(t, pa)
				cachedOf(t, da)
			}
		}
		native := func(room int64) string {
			text, _ := json.Marshal(prompt)
			return fmt.Sprintf(`{"text":%s,"sampling_params":{"max_new_tokens":2},%s}`, text, bootstrap(p, room, fmt.Sprint("n", room)))
		}
		pa, da := both(t, sglang.RouteGenerate, p, d, native(9))
		for _, a := range []answer{pa, da} {
			if a.field(t, "meta_info", "cached_tokens") != json.Number("32") {
				t.Errorf("meta_info %s", a.body)
			}
		}
	})
	t.Run("trtllm", func(t *testing.T) {
		ctx, gen := trtPair(t, TRTLLMConfig{})
		body := completion(prompt, `"max_tokens":4`)
		post(t, ctx.URL()+core.RouteCompletions, body)
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		cachedOf(t, ca)
		cachedOf(t, post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, nil)))
		streamed(t, ctx, body)
	})
}
