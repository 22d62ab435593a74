package exchange_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestAlias: an engine receives its own name of the model in a body that is otherwise
// unchanged, and the records have both names.
func TestAlias(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := world.Answering("e", "served")
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
			c.Models = []config.Model{{Name: `chat"1`, AliasOf: "b"}, {Name: "b", AliasOf: "served"}}
		}})
		body := `{ "prompt" : "hi", "x":{"model":"chat"},  "model" :"chat\"1" ,"stream":true}`
		a := w.Post(world.CompletionsPath, body)
		if a.Status != 200 || !strings.Contains(a.Body, `"model":"e"`) {
			t.Errorf("got %d %s", a.Status, a.Body)
		}
		want := strings.Replace(body, `"chat\"1"`, `"served"`, 1)
		if legs := e.Seen(); len(legs) != 1 || legs[0].Body != want {
			t.Errorf("got %+v, want the body %s", legs, want)
		}
		if x := w.Explained(); x.Model != "served" || x.RequestedModel != `chat"1` {
			t.Errorf("got model %q, requested %q", x.Model, x.RequestedModel)
		}
		if n := w.Metric("pdproxy_exchanges_total", "served"); n != 1 {
			t.Errorf("got %v exchanges of the served model", n)
		}
		if n := w.Metric("pdproxy_model_choices_total", `chat"1`, "served"); n != 1 {
			t.Errorf("got %v choices", n)
		}
		if a := w.Post(world.CompletionsPath, world.Asking("other")); a.Status != 404 || !strings.Contains(a.Body, `\"other\" does not exist; the engines serve b, chat`) {
			t.Errorf("unknown model: got %d %s", a.Status, a.Body)
		}
	})
}

// TestAliasOnBothLegs: both engines of a pair receive their own name of the model, and the
// name of an adapter works as that of any model.
func TestAliasOnBothLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Models: "served,adapter", Serve: world.PrefillAnswers}
		d := world.Answering("d", "served,adapter")
		d.Role, d.Connector = "decode", "vllm-nixl"
		w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "short", AliasOf: "adapter"}}
		}})
		if a := w.Post(world.CompletionsPath, world.Asking("short")); a.Status != 200 {
			t.Fatalf("got %d %s", a.Status, a.Body)
		}
		for _, e := range []*world.Engine{p, d} {
			if legs := e.Seen(); len(legs) != 1 || !strings.Contains(legs[0].Body, `"model":"adapter"`) || strings.Contains(legs[0].Body, "short") {
				t.Errorf("%s got %+v", e.Name, legs)
			}
		}
	})
}

// TestSplitStays: each conversation stays with its model, by its id or by its first
// message, and both models get conversations.
func TestSplitStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := world.Answering("a", "a"), world.Answering("b", "b")
		w := world.New(t, world.Setup{Engines: []*world.Engine{a, b}, Needs: abi.NeedConversation, Config: func(c *config.Config) {
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
				got := w.Post("/v1/chat/completions", body, id...)
				_, rest, _ := strings.Cut(got.Body, `"model":"`)
				if got.Status != 200 || turn > 0 && rest[:1] != model {
					t.Fatalf("conversation %d, turn %d: got %d %s, want model %q", i, turn, got.Status, got.Body, model)
				}
				model = rest[:1]
				messages += fmt.Sprintf(`,{"role":"assistant","content":"yes"},{"role":"user","content":"turn %d"}`, turn)
			}
		}
		na, nb := len(a.Seen()), len(b.Seen())
		if na+nb != 3*conversations || na < conversations/2 || nb < conversations/2 { // the keys are fixed: the counts are, too
			t.Errorf("got %d and %d requests", na, nb)
		}
		if n := w.Metric("pdproxy_model_choices_total", "a", "b"); n != float64(nb) {
			t.Errorf("got %v choices of b, want %d", n, nb)
		}
	})
}

// TestModelNames: the list of models has the names of [[model]] that lead to a served
// model, and a reload replaces them.
func TestModelNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := world.Answering("e", "m"), world.Answering("f", "n")
		e.Cards, f.Cards = `"max_model_len":100,"root":"/models/m"`, `"max_model_len":50`
		w := world.New(t, world.Setup{Engines: []*world.Engine{e, f}, Config: func(c *config.Config) {
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
			if a := w.Get(tt.path); a.Status != 200 || !strings.Contains(a.Body, tt.want) || strings.Contains(a.Body, tt.not) {
				t.Errorf("%s: got %d %s, want %s", tt.path, a.Status, a.Body, tt.want)
			}
		}
		for _, name := range []string{"gone", "nowhere"} {
			if a := w.Post(world.CompletionsPath, world.Asking(name)); a.Status != 404 || !strings.Contains(a.Body, name) {
				t.Errorf("%s: got %d %s", name, a.Status, a.Body)
			}
		}
		next := *w.Config
		next.Models = []config.Model{{Name: "alias", AliasOf: "n"}}
		w.Reload(&next, nil)
		if a := w.Post(world.CompletionsPath, world.Asking("alias")); a.Status != 200 || len(f.Seen()) != 1 {
			t.Errorf("after the reload: got %d %s, and %d requests", a.Status, a.Body, len(f.Seen()))
		}
		next.Models = nil
		w.Reload(&next, nil)
		if a := w.Post(world.CompletionsPath, world.Asking("alias")); a.Status != 404 {
			t.Errorf("after the name was removed: got %d %s", a.Status, a.Body)
		}
	})
}

// TestAliasOutsideOfJSON: the name is replaced in a form and in the query of an engine's own
// route, and all other bytes are kept.
func TestAliasOutsideOfJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := world.Answering("e", "served")
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
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
			before := len(e.Seen())
			if a := w.Post(tt.path, tt.body, "Content-Type", tt.contentType); a.Status != 200 {
				t.Errorf("%s: got %d %s", tt.path, a.Status, a.Body)
				continue
			}
			if leg := e.Seen()[before]; leg.Body != tt.want || leg.Query != tt.query {
				t.Errorf("%s: the engine got %q with %q, want %q with %q", tt.path, leg.Query, leg.Body, tt.query, tt.want)
			}
		}
	})
}

// TestSplitFollowsStoredResponses: a response that continues a stored one goes to the model
// of the engine that holds it, whatever the split chooses.
func TestSplitFollowsStoredResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := &world.Engine{Name: "a", Connector: "vllm-nixl", Models: "a", Serve: world.Holding("resp_a")}, &world.Engine{Name: "b", Connector: "vllm-nixl", Models: "b", Serve: world.Holding("resp_b")}
		w := world.New(t, world.Setup{Engines: []*world.Engine{a, b}, Config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "a", Split: map[string]float64{"a": 1, "b": 1}}}
		}})
		posted := func(e *world.Engine) (bodies []string) {
			for _, leg := range e.Seen() {
				if leg.Method == "POST" {
					bodies = append(bodies, leg.Body)
				}
			}
			return bodies
		}
		for i := range 8 {
			if got := w.Post("/v1/responses", fmt.Sprintf(`{"model":"a","input":"turn %d","previous_response_id":"resp_b"}`, i)); got.Status != 200 {
				t.Fatalf("got %d %s", got.Status, got.Body)
			}
		}
		if got := posted(b); len(got) != 8 || len(posted(a)) != 0 || !strings.Contains(got[0], `"model":"b"`) {
			t.Errorf("a got %q, b got %q", posted(a), got)
		}
		for _, model := range []string{"a", "b"} {
			if n := w.Metric("pdproxy_requests_running", model); n != 0 {
				t.Errorf("%v requests of %s run", n, model)
			}
		}
	})
}
