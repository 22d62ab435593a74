package proxy

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// answering is an engine of models that answers with the name of the requested model.
func answering(name, models string) *fakeEngine {
	return &fakeEngine{name: name, models: models, serve: func(c *engineConn, _ int) {
		if strings.Contains(c.leg.body, `"stream":true`) {
			c.stream(fmt.Sprintf("data: {\"model\":%q}\n\n", name), "data: [DONE]\n\n")
			return
		}
		c.json(200, fmt.Sprintf(`{"id":"x","model":%q,"choices":[{"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`, name))
	}}
}

// TestAlias: an engine receives its own name of the model in a body that is otherwise
// unchanged, and the records have both names.
func TestAlias(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answering("e", "served")
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) {
			c.Models = []config.Model{{Name: `chat"1`, AliasOf: "b"}, {Name: "b", AliasOf: "served"}}
		}})
		body := `{ "prompt" : "hi", "x":{"model":"chat"},  "model" :"chat\"1" ,"stream":true}`
		a := w.post(completionsPath, body)
		if a.status != 200 || !strings.Contains(a.body, `"model":"e"`) {
			t.Errorf("got %d %s", a.status, a.body)
		}
		want := strings.Replace(body, `"chat\"1"`, `"served"`, 1)
		if legs := e.seen(); len(legs) != 1 || legs[0].body != want {
			t.Errorf("got %+v, want the body %s", legs, want)
		}
		if x := w.explained(); x.Model != "served" || x.RequestedModel != `chat"1` {
			t.Errorf("got model %q, requested %q", x.Model, x.RequestedModel)
		}
		if n := w.metric("pdproxy_exchanges_total", "served"); n != 1 {
			t.Errorf("got %v exchanges of the served model", n)
		}
		if n := w.metric("pdproxy_model_choices_total", `chat"1`, "served"); n != 1 {
			t.Errorf("got %v choices", n)
		}
		if a := w.post(completionsPath, asking("other")); a.status != 404 || !strings.Contains(a.body, `\"other\" does not exist; the engines serve b, chat`) {
			t.Errorf("unknown model: got %d %s", a.status, a.body)
		}
	})
}

// TestAliasOnBothLegs: both engines of a pair receive their own name of the model, and the
// name of an adapter works as that of any model.
func TestAliasOnBothLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeEngine{name: "p", role: "prefill", connector: "vllm-nixl", models: "served,adapter", serve: prefillAnswers}
		d := answering("d", "served,adapter")
		d.role, d.connector = "decode", "vllm-nixl"
		w := newWorld(t, setup{engines: []*fakeEngine{p, d}, config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "short", AliasOf: "adapter"}}
		}})
		if a := w.post(completionsPath, asking("short")); a.status != 200 {
			t.Fatalf("got %d %s", a.status, a.body)
		}
		for _, e := range []*fakeEngine{p, d} {
			if legs := e.seen(); len(legs) != 1 || !strings.Contains(legs[0].body, `"model":"adapter"`) || strings.Contains(legs[0].body, "short") {
				t.Errorf("%s got %+v", e.name, legs)
			}
		}
	})
}

// TestSplitStays: each conversation stays with its model, by its id or by its first
// message, and both models get conversations.
func TestSplitStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := answering("a", "a"), answering("b", "b")
		w := newWorld(t, setup{engines: []*fakeEngine{a, b}, needs: abi.NeedConversation, config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "a", Split: map[string]float64{"a": 50, "b": 50}}}
		}})
		const conversations = 40
		for i := range conversations {
			id := []string{"X-Session-ID", fmt.Sprint("s", i)}
			prompt := "the same"
			if i%2 == 1 {
				id, prompt = nil, fmt.Sprint("prompt ", i)
			}
			messages, model := fmt.Sprintf(`{"role":"system","content":"now %d"},{"role":"user","content":%q}`, i, prompt), ""
			for turn := range 3 {
				body := fmt.Sprintf(`{"model":"a","messages":[%s],"max_tokens":5}`, messages)
				got := w.post("/v1/chat/completions", body, id...)
				_, rest, _ := strings.Cut(got.body, `"model":"`)
				if got.status != 200 || turn > 0 && rest[:1] != model {
					t.Fatalf("conversation %d, turn %d: got %d %s, want model %q", i, turn, got.status, got.body, model)
				}
				model = rest[:1]
				messages += fmt.Sprintf(`,{"role":"assistant","content":"yes"},{"role":"user","content":"turn %d"}`, turn)
			}
		}
		na, nb := len(a.seen()), len(b.seen())
		if na+nb != 3*conversations || na < conversations/2 || nb < conversations/2 { // the keys are fixed: the counts are, too
			t.Errorf("got %d and %d requests", na, nb)
		}
		if n := w.metric("pdproxy_model_choices_total", "a", "b"); n != float64(nb) {
			t.Errorf("got %v choices of b, want %d", n, nb)
		}
	})
}

// TestModelNames: the list of models has the names of [[model]] that lead to a served
// model, and a reload replaces them.
func TestModelNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := answering("e", "m"), answering("f", "n")
		e.cards, f.cards = `"max_model_len":100,"root":"/models/m"`, `"max_model_len":50`
		w := newWorld(t, setup{engines: []*fakeEngine{e, f}, config: func(c *config.Config) {
			c.Models = []config.Model{
				{Name: "alias", AliasOf: "m"}, {Name: "both", Split: map[string]float64{"m": 1, "n": 1}}, {Name: "gone", AliasOf: "nowhere"},
			}
		}})
		for _, tt := range []struct{ path, want, not string }{
			{"/v1/models/alias", `"id":"alias","object":"model"`, "parent"},
			{"/v1/models/alias", `"root":"m","max_model_len":100`, "parent"},
			{"/v1/models/both", `"max_model_len":50`, "root"},
			{"/v1/models/m", `"root":"/models/m","max_model_len":100`, "alias"},
			{"/v1/models", `"id":"both"`, "gone"},
		} {
			if a := w.get(tt.path); a.status != 200 || !strings.Contains(a.body, tt.want) || strings.Contains(a.body, tt.not) {
				t.Errorf("%s: got %d %s, want %s", tt.path, a.status, a.body, tt.want)
			}
		}
		for _, name := range []string{"gone", "nowhere"} {
			if a := w.post(completionsPath, asking(name)); a.status != 404 || !strings.Contains(a.body, name) {
				t.Errorf("%s: got %d %s", name, a.status, a.body)
			}
		}
		next := *w.cfg.Load()
		next.Models = []config.Model{{Name: "alias", AliasOf: "n"}}
		w.Reload(&next, nil)
		if a := w.post(completionsPath, asking("alias")); a.status != 200 || len(f.seen()) != 1 {
			t.Errorf("after the reload: got %d %s, and %d requests", a.status, a.body, len(f.seen()))
		}
		next.Models = nil
		w.Reload(&next, nil)
		if a := w.post(completionsPath, asking("alias")); a.status != 404 {
			t.Errorf("after the name was removed: got %d %s", a.status, a.body)
		}
	})
}

// TestAliasOutsideOfJSON: the name is replaced in a form and in the query of an engine's own
// route, and all other bytes are kept.
func TestAliasOutsideOfJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answering("e", "served")
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) {
			c.Server.EngineRoutes = []string{"/own"}
			c.Models = []config.Model{{Name: "chat", AliasOf: "served"}}
		}})
		form := "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n%s\r\n--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\nchat\x00\r\n--b--\r\n"
		for _, tt := range []struct{ contentType, path, body, query, want string }{
			{"multipart/form-data; boundary=b", "/own", fmt.Sprintf(form, "chat"), "", fmt.Sprintf(form, "served")},
			{"application/json", "/own?a=1&model=chat", `{"x":"chat"}`, "a=1&model=served", `{"x":"chat"}`},
			{"application/json", "/own?model=chat", `{"model":"chat"}`, "model=served", `{"model":"served"}`},
			{"application/json", "/own?model=", `{"model":"chat"}`, "model=served", `{"model":"served"}`}, // the body counts
		} {
			before := len(e.seen())
			if a := w.post(tt.path, tt.body, "Content-Type", tt.contentType); a.status != 200 {
				t.Errorf("%s: got %d %s", tt.path, a.status, a.body)
				continue
			}
			if leg := e.seen()[before]; leg.body != tt.want || leg.query != tt.query {
				t.Errorf("%s: the engine got %q with %q, want %q with %q", tt.path, leg.query, leg.body, tt.query, tt.want)
			}
		}
	})
}

// TestSplitFollowsStoredResponses: a response that continues a stored one goes to the model
// of the engine that holds it, whatever the split chooses.
func TestSplitFollowsStoredResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := &fakeEngine{name: "a", connector: "vllm-nixl", models: "a", serve: holding("resp_a")}, &fakeEngine{name: "b", connector: "vllm-nixl", models: "b", serve: holding("resp_b")}
		w := newWorld(t, setup{engines: []*fakeEngine{a, b}, config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "a", Split: map[string]float64{"a": 1, "b": 1}}}
		}})
		posted := func(e *fakeEngine) (bodies []string) {
			for _, leg := range e.seen() {
				if leg.method == "POST" {
					bodies = append(bodies, leg.body)
				}
			}
			return bodies
		}
		for i := range 8 {
			if got := w.post("/v1/responses", fmt.Sprintf(`{"model":"a","input":"turn %d","previous_response_id":"resp_b"}`, i)); got.status != 200 {
				t.Fatalf("got %d %s", got.status, got.body)
			}
		}
		if got := posted(b); len(got) != 8 || len(posted(a)) != 0 || !strings.Contains(got[0], `"model":"b"`) {
			t.Errorf("a got %q, b got %q", posted(a), got)
		}
		for _, model := range []string{"a", "b"} {
			if n := w.metric("pdproxy_requests_running", model); n != 0 {
				t.Errorf("%v requests of %s run", n, model)
			}
		}
	})
}
