package exchange_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// adapters is an engine with two adapters that stores one response of each, and one that names no
// model.
func adapters(c *world.Conn, _ int) {
	id, _ := strings.CutPrefix(strings.TrimSuffix(c.Leg.Path, "/cancel"), "/v1/responses/")
	switch model, known := map[string]string{"resp_1": `"model":"one",`, "resp_2": `"model":"two",`, "resp_base": `"model":"base",`, "resp_none": "", "resp_odd": `"model":7,`}[id]; {
	case !strings.HasPrefix(c.Leg.Path, "/v1/responses/"):
		c.JSON(200, `{"id":"new","object":"response","output":[],"choices":[{"text":"x"}]}`)
	case !known:
		c.JSON(404, `{"error":{"message":"not found"}}`)
	default:
		c.JSON(200, fmt.Sprintf(`{"id":%q,%s"output":[]}`, id, model))
	}
}

// TestTenantStoredResponses: a stored response exists only for tenants that may use its model. For
// other tenants nothing of DELETE, of cancel and of a continuation reaches the engine.
func TestTenantStoredResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Models: "base,one,two", Serve: adapters}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e},
			Keys:   world.TenantLine("one", "models=one") + world.TenantLine("two", "models=two") + world.TenantLine("alias", "models=chat") + world.TenantLine("all", "") + world.TenantLine("both", "models=one,two"),
			Config: func(c *config.Config) { c.Models = []config.Model{{Name: "chat", AliasOf: "two"}} }})
		for key, visible := range map[string]string{"one": "resp_1", "two": "resp_2", "alias": "resp_2", "both": "resp_1 resp_2", "all": "resp_1 resp_2 resp_base resp_none resp_odd"} {
			model := map[string]string{"one": "one", "alias": "chat"}[key]
			if model == "" {
				model = "two"
			}
			for _, id := range strings.Fields("resp_1 resp_2 resp_base resp_none resp_odd") {
				sees := strings.Contains(visible, id)
				for _, method := range strings.Fields("GET DELETE POST continue stream") {
					before := len(e.Seen())
					path, body := "/v1/responses/"+id, ""
					switch method {
					case "POST":
						path += "/cancel"
					case "continue":
						method, path, body = "POST", "/v1/responses", fmt.Sprintf(`{"model":%q,"input":"x","previous_response_id":%q}`, model, id)
					case "stream":
						method, path = "GET", path+"?stream=true"
					}
					a := world.Ask(t.Context(), w.Client, method, "http://proxy"+path, body, "Authorization", "Bearer "+key+"-key", "Content-Type", "application/json")
					if sees && a.Status != 200 || !sees && (a.Status != 404 || !strings.Contains(a.Body, "response_not_found")) {
						t.Errorf("%s: %s %s %s: got %d %s", key, method, path, body, a.Status, a.Body)
					}
					for _, leg := range e.Seen()[before:] {
						if !sees && (leg.Method != "GET" || leg.Query != "") {
							t.Errorf("%s: %s %s reached the engine: %+v", key, method, path, leg)
						}
					}
				}
			}
		}
		for _, id := range []string{`"resp unknown"`, `"resp_unknown"`, `""`, `5`, `["resp_1"]`} {
			for key, want := range map[string]int{"one": 404, "all": 200} {
				a := w.Post("/v1/responses", `{"model":"one","input":"x","previous_response_id":`+id+`}`, "Authorization", "Bearer "+key+"-key")
				if a.Status != want || want == 404 && !strings.Contains(a.Body, `"param":"previous_response_id"`) {
					t.Errorf("%s continues %s: got %d %s", key, id, a.Status, a.Body)
				}
			}
		}
	})
}

// TestTenantAdapters: no field of a body, form or query selects an adapter or model that the tenant
// may not use.
func TestTenantAdapters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Models: "base,one,two", Serve: adapters}
		trust := false
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("one", "models=base,one") + world.TenantLine("colon", "models=base,base:one") + world.TenantLine("all", ""),
			Config: func(c *config.Config) { c.Server.EngineRoutes = []string{"/generative_scoring"} }})
		const lora = `"lora_request":{"lora_name":%q,"lora_int_id":1,"lora_path":"/w"}`
		bodies := map[string]string{
			"/v1/completions":      `{"model":"base","prompt":"x",%s}`,
			"/v1/chat/completions": `{"model":"base","messages":[{"role":"user","content":"x"}],%s}`,
			"/v1/embeddings":       `{"model":"base","input":"x",%s}`,
			"/generate":            `{"model":"base","text":["x","y"],%s}`,
			"/generative_scoring":  `{"model":"base",%s}`,
			"/v1/score":            `{"model":"base",%s}`,
			"/rerank":              `{"model":"base",%s}`,
			"/pooling":             `{"model":"base",%s}`,
		}
		check := func(key, path, body string, want int) {
			t.Helper()
			before := len(e.Seen())
			a := w.Post(path, body, "Authorization", "Bearer "+key+"-key")
			if a.Status != want {
				t.Errorf("trust %t: %s: %s %s: got %d %s, want %d", trust, key, path, body, a.Status, a.Body, want)
			}
			if n := len(e.Seen()) - before; n != 0 && want != 200 {
				t.Errorf("%s: %s %s reached the engine", key, path, body)
			}
		}
		for _, set := range []bool{false, true} {
			trust = set
			cfg := *w.Config
			cfg.Server.TrustEngineFields = trust
			w.Reload(&cfg, w.Keys)
			refused := map[bool]int{false: 400, true: 200}[trust]
			for path, form := range bodies {
				for member, want := range map[string]int{
					`"lora_path":"one"`: 200, `"lora_path":"two"`: 404, `"lora_path":["one",null]`: 200, `"lora_path":["one","two"]`: 404,
					fmt.Sprintf(lora, "one"): refused, fmt.Sprintf(lora, "two"): 404, `"lora_id":"u"`: 404, `"lora_path":{}`: refused,
					`"custom_logit_processor":"x"`: refused, `"session_params":{"id":"s"}`: refused, `"logits_processors":["a"]`: refused,
				} {
					check("one", path, fmt.Sprintf(form, member), want)
				}
				check("colon", path, fmt.Sprintf(form, `"lora_path":"one"`), 200)
				for member, want := range map[string]int{`"lora_path":["one","two"]`: 200, fmt.Sprintf(lora, "two"): 200, `"custom_logit_processor":"x"`: refused} {
					check("all", path, fmt.Sprintf(form, member), want)
				}
			}
		}
		for query, want := range map[string]int{"model=base": 200, "model=two": 400, "Model=two": 400, "model[]=two": 400, "lora_path=two": 404, "lora_path=one": 200} {
			check("one", "/generative_scoring?"+query, `{"model":"base"}`, want)
		}
		check("one", "/generative_scoring?model=two", `{}`, 404)
		check("one", "/generative_scoring?model=one", `{}`, 200)
	})
}
