package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// page is a text that is long enough to be tokenized once for both legs.
var page = strings.Repeat(long, 6)

// tokenized returns how many prompts in text the prefill and the decode engines have tokenized.
// It fails if an engine got the ids of another prompt.
func (f *fleet) tokenized() (prefill, decode int64) {
	f.t.Helper()
	count := func(engines []*enginesim.Engine) (n int64) {
		for _, e := range engines {
			s := e.State()
			if n += s.Tokenized; s.StrayIDs > 0 {
				f.t.Errorf("an engine got %d prompts with the ids of others", s.StrayIDs)
			}
		}
		return n
	}
	return count(f.prefill), count(f.decode)
}

// explanation returns the proxy's explanation of an ended request.
func (f *fleet) explanation(id string) (e journal.Explanation) {
	f.t.Helper()
	f.eventually("the request is explained", func() bool {
		e = journal.Explanation{}
		f.admin("/v1/explain/"+id, &e)
		return e.RequestID == id
	})
	return e
}

// TestAPromptIsTokenizedOnce: decode gets the token ids that prefill has answered. The client sees
// them only if it asked for them. Short prompts, echoes, and engines that do not take ids are
// unchanged.
func TestAPromptIsTokenizedOnce(t *testing.T) {
	text, _ := json.Marshal(page)
	completion := `{"model":"sim","prompt":` + string(text) + `,"max_tokens":5,"ignore_eos":true}`
	with := func(body, members string) string { return strings.Replace(body, "{", "{"+members+",", 1) }
	for _, connector := range []string{
		enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMStore, enginesim.ConnectorVLLMP2PTier, enginesim.ConnectorVLLMMoRIIORead,
	} {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{})
			for i, tt := range []struct {
				path, body string
				once, sees bool
			}{
				{chatPath, chat(page, 5, true), true, false},
				{chatPath, chat(page, 5, false), true, false},
				{chatPath, chat(page, 1, false), true, false},
				{chatPath, with(chat(page, 5, false), `"return_token_ids":true`), true, true},
				{chatPath, with(chat(page, 5, true), `"return_token_ids":true`), true, true},
				{completionsPath, completion, true, false},
				{completionsPath, with(completion, `"stream":true`), true, false},
				{completionsPath, with(completion, `"return_token_ids":true`), true, true},
				{completionsPath, with(completion, `"echo":true`), false, false},
				{chatPath, with(chat(page, 5, true), `"return_prompt_text":true`), false, false},
				{chatPath, chat(long, 5, true), false, false},
				{"/v1/messages", strings.Replace(chat(page, 5, true), `"ignore_eos":true,`, "", 1), false, false},
				{"/v1/responses", `{"model":"sim","input":` + string(text) + `,"max_output_tokens":5,"ignore_eos":true}`, false, false},
			} {
				p, d := f.tokenized()
				id := fmt.Sprint("once-", i)
				a := f.post(context.Background(), f.url, tt.path, tt.body, "X-Request-Id", id)
				p2, d2 := f.tokenized()
				f.right(a, tt.path, tt.body)
				if want := map[bool]int64{true: 0, false: 1}[tt.once]; p2-p != 1 || d2-d != want {
					t.Errorf("%s %.80s…: prefill tokenized %d times and decode %d times, want 1 and %d", tt.path, tt.body, p2-p, d2-d, want)
				}
				if got := strings.Contains(a.body, `token_ids":[`); got != tt.sees {
					t.Errorf("%s %.80s…: token ids in the answer: %v", tt.path, tt.body, got)
				}
				if told := slices.Contains(f.explanation(id).Notes, "decode has the prompt as token ids of prefill"); told != tt.once {
					t.Errorf("%s %.80s…: explained: %v", tt.path, tt.body, told)
				}
			}
			if n := f.metric("pdproxy_fallbacks_total", `what="prompt_ids"`); n != 0 {
				t.Errorf("%v prompts fell back", n)
			}
		})
	}
}

// TestOldEnginesTokenizeTwice: an engine of a release that is not known to take ids gets none.
func TestOldEnginesTokenizeTwice(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{engine: func(_ string, _ int, c *enginesim.Config) { c.Version = "0.31.0" }})
	body := chat(page, 5, true)
	f.right(f.try(chatPath, body), chatPath, body)
	if p, d := f.tokenized(); p != 1 || d != 1 {
		t.Errorf("prefill tokenized %d times and decode %d times, want 1 and 1", p, d)
	}
}

// TestKnownTokenIDsGoIntoEachLeg: the proxy renders the prompt to find its blocks. No leg tokenizes
// it again, with any connector of vLLM and in each API. The second turn of a conversation hits the
// blocks of the first one exactly.
func TestKnownTokenIDsGoIntoEachLeg(t *testing.T) {
	for _, connector := range []string{
		enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush, enginesim.ConnectorVLLMStore, enginesim.ConnectorVLLMMoRIIO,
		enginesim.ConnectorVLLMMoRIIORead, enginesim.ConnectorVLLMMooncake, enginesim.ConnectorVLLMP2PTier,
	} {
		t.Run(connector, func(t *testing.T) {
			f := startKnowing(t, connector, "kv_aware")
			if connector == enginesim.ConnectorVLLMNixlPush { // it cannot pair responses
				f.knownTurns("/v1/messages")
				return
			}
			f.knownTurns("/v1/messages")
			f.knownTurns("/v1/responses")
			f.knownTurns(chatPath)
		})
	}
}

// knownTurns sends two turns of a conversation to an API, and checks that the prompts are rendered, not
// tokenized by the legs, and found in the index.
func (f *fleet) knownTurns(path string) {
	f.t.Helper()
	turn := func(more ...string) string {
		list := []map[string]string{{"role": "user", "content": path + " " + page}}
		for i, text := range more {
			list = append(list, map[string]string{"role": []string{"assistant", "user"}[i%2], "content": text})
		}
		name, limit := "messages", "max_tokens"
		if path == "/v1/responses" {
			name, limit = "input", "max_output_tokens"
		}
		raw, _ := json.Marshal(list)
		return fmt.Sprintf(`{"model":"sim","%s":%s,"%s":5}`, name, raw, limit)
	}
	var home string
	first := 0 // tokens of the first turn
	for i, body := range []string{turn(), turn("an answer", "and another question")} {
		p, d := f.tokenized()
		known := f.byEvents()
		id := fmt.Sprint("turn-", i, strings.ReplaceAll(path, "/", "-"))
		a := f.post(context.Background(), f.url, path, body, "X-Request-Id", id)
		p2, d2 := f.tokenized()
		f.right(a, path, body)
		if n := p2 + d2 - p - d; n != 1 {
			f.t.Errorf("%s, turn %d: the engines tokenized %d times, want once", path, i, n)
		}
		e := f.explanation(id)
		if !slices.Contains(e.Notes, "the legs have the prompt as token ids") {
			f.t.Errorf("%s, turn %d: the notes are %q", path, i, e.Notes)
		}
		if i == 0 {
			home, first = prefilledBy(e), f.promptTokens(path, body)
			f.eventually("the blocks' events are in", func() bool { return f.byEvents() >= known+float64(first/16) })
			continue
		}
		// The last block of the first turn may have the mark that opens the answer.
		if tokens := held(e); tokens[home] < first/16*16-16 || prefilledBy(e) != home {
			f.t.Errorf("%s: %v tokens are known at %s, want those of %d, and %s got the prompt", path, tokens, home, first, prefilledBy(e))
		}
	}
	if n := f.metric("pdproxy_kv_distrust"); n != 0 {
		f.t.Errorf("%s: the check of the index reports an engine", path)
	}
}

// promptTokens returns the number of tokens of a prompt.
func (f *fleet) promptTokens(path, body string) int {
	f.t.Helper()
	var rendered struct {
		IDs []int `json:"token_ids"`
	}
	f.decodeFrom(f.alone.URL()+path+"/render", body, &rendered)
	return len(rendered.IDs)
}

// TestOnePromptInThreeAPIs: the same prompt has the same blocks, whichever API it comes by.
func TestOnePromptInThreeAPIs(t *testing.T) {
	f := startKnowing(t, enginesim.ConnectorVLLMNixl, "kv_aware")
	text, _ := json.Marshal(page)
	bodies := map[string]string{
		"/v1/messages":  `{"model":"sim","messages":[{"role":"user","content":` + string(text) + `}],"max_tokens":5}`,
		chatPath:        chat(page, 5, false),
		"/v1/responses": `{"model":"sim","input":` + string(text) + `,"max_output_tokens":5}`,
	}
	whole := f.promptTokens(chatPath, bodies[chatPath]) / 16 * 16
	var home string
	for i, path := range []string{"/v1/messages", chatPath, "/v1/responses", "/v1/messages"} {
		id := fmt.Sprint("api-", i)
		a := f.post(context.Background(), f.url, path, bodies[path], "X-Request-Id", id)
		f.right(a, path, bodies[path])
		e := f.explanation(id)
		if i == 0 {
			home = prefilledBy(e)
			f.eventually("the blocks' events are in", func() bool { return f.byEvents() >= float64(whole/16) })
			continue
		}
		if tokens := held(e); tokens[home] != whole || prefilledBy(e) != home {
			t.Errorf("%s: the proxy knows %v tokens, want %d at %s", path, tokens, whole, home)
		}
	}
}

// decodeFrom posts a body and decodes the answer.
func (f *fleet) decodeFrom(url, body string, into any) {
	f.t.Helper()
	a := f.post(context.Background(), url, "", body)
	if err := json.Unmarshal([]byte(a.body), into); err != nil {
		f.t.Fatalf("%v in %s", err, a.body)
	}
}

// TestRenderingWithoutTheFlag: engines without --enable-scale-out render nothing. The proxy then
// tokenizes a chat by /tokenize, and knows no ids of messages.
func TestRenderingWithoutTheFlag(t *testing.T) {
	o := knowing(t, enginesim.ConnectorVLLMNixl, "kv_aware")
	engine := o.engine
	o.engine = func(role string, n int, c *enginesim.Config) {
		engine(role, n, c)
		c.NoScaleOut = true
	}
	f := startFleet(t, enginesim.ConnectorVLLMNixl, o)
	body := chat(page, 5, true)
	f.right(f.try(chatPath, body), chatPath, body)
	if n := f.metric("pdproxy_prompt_token_ids_total", `source="engine"`); n != 1 {
		t.Errorf("got ids of %v prompts", n)
	}
	message := strings.Replace(body, `"ignore_eos":true,`, "", 1)
	f.right(f.try("/v1/messages", message), "/v1/messages", message)
	if n := f.metric("pdproxy_prompt_token_ids_total", `source="none"`); n != 1 {
		t.Errorf("got no ids of %v prompts", n)
	}
}
