package exchange_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestStoredResponses: the engine that holds a response answers; a response that no engine
// holds is unknown; the key of each engine, and not that of the client, is sent.
func TestStoredResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engines := []*world.Engine{
			{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: world.Holding("resp_p")},
			{Name: "a", Role: "decode", Connector: "vllm-nixl", Serve: world.Holding("resp_a"), Key: "ka"},
			{Name: "b", Role: "decode", Connector: "vllm-nixl", Serve: world.Holding("resp_b")},
			{Name: "s", Connector: "sglang", Models: "other", Serve: world.Holding("resp_s")},
		}
		w := world.New(t, world.Setup{Engines: engines, Keys: world.KeyLine("n", "k")})
		call := func(method, path string) string {
			t.Helper()
			a := world.Ask(t.Context(), w.Client, method, "http://proxy/v1/responses/"+path, "", "Authorization", "Bearer k")
			if a.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s: no request id", path)
			}
			return fmt.Sprint(a.Status, " ", a.Body)
		}
		for range 2 {
			for _, tt := range []struct{ method, path, want string }{
				{"GET", "resp_a", `200 {"id":"resp_a","output":[],"kv_transfer_params":null}`},
				{"GET", "resp_b/", `200 {"id":"resp_b","output":[],"kv_transfer_params":null}`},
				{"GET", "resp_b?stream=true&starting_after=3&rid=7", "200 event: response.created\ndata: {}\n\nevent: response.completed\ndata: {\"q\":\"starting_after=3&stream=true\"}\n\n"},
				{"DELETE", "resp_b", `200 {"id":"resp_b","object":"response","deleted":true}`},
				{"POST", "resp_b/cancel", `501 {"error":{"message":"the engine that holds the response cannot cancel it"`},
				{"GET", "resp_p", `404 {"error":{"message":"no engine holds a response of this id","type":"invalid_request_error","param":"response_id","code":"response_not_found"}}`},
				{"GET", "resp_s", `200 {"id":"resp_s","output":[],"kv_transfer_params":{"remote_host":"p"}}`}, // the field is vLLM's
			} {
				if got := call(tt.method, tt.path); !strings.HasPrefix(got, tt.want) {
					t.Errorf("%s %s: got %s, want %s", tt.method, tt.path, got, tt.want)
				}
			}
		}
		if n := len(engines[0].Seen()); n != 0 {
			t.Errorf("engines that hold no responses received %d requests", n)
		}
		for _, e := range engines[1:3] {
			for _, leg := range e.Seen() {
				if got, want := leg.Header.Get("Authorization"), map[string]string{"a": "Bearer ka"}[e.Name]; got != want || leg.Header.Get("Content-Type") != "" {
					t.Errorf("engine %s received the header %v", e.Name, leg.Header)
				}
			}
		}
		if a := w.Get("/v1/responses/resp_a"); a.Status != 401 {
			t.Errorf("without a key: got status %d", a.Status)
		}
		if got := world.Ask(t.Context(), w.Client, "POST", "http://proxy/v1/responses", `{"model":"m","input":"x","previous_response_id":"resp_b"}`, "Authorization", "Bearer k"); got.Status != 200 {
			t.Errorf("a later turn: got status %d: %s", got.Status, got.Body)
		}
		legs := engines[2].Seen()
		if last := legs[len(legs)-1]; last.Path != "/v1/responses" {
			t.Errorf("the engine that holds the response received %s last", last.Path)
		}
	})
}

// TestStoredResponseOfASilentEngine: while an engine that may hold the response does not
// answer, the response is not reported as unknown.
func TestStoredResponseOfASilentEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var works atomic.Bool
		broken := &world.Engine{Name: "a", Serve: func(c *world.Conn, nth int) {
			switch {
			case works.Load():
				world.Holding("resp_a")(c, nth)
			case nth%2 == 0:
				c.JSON(500, `{}`)
			default:
				c.Hold()
			}
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{broken, {Name: "b", Serve: world.Holding("resp_b")}}, Config: func(c *config.Config) { c.Limits.MaxExchanges = 1 }})
		get := func(id string) int { return w.Get("/v1/responses/" + id).Status }
		for range 2 {
			if got := get("resp_a"); got != 502 {
				t.Errorf("got status %d", got)
			}
		}
		if got := get("resp_b"); got != 200 {
			t.Errorf("a response of the other engine: got status %d", got)
		}
		works.Store(true)
		time.Sleep(time.Minute)
		for id, want := range map[string]int{"resp_a": 200, "resp_b": 200, "resp_c": 404} {
			if got := get(id); got != want {
				t.Errorf("%s: got status %d", id, got)
			}
		}
	})
}

// TestStoredResponsesOfATenant: a request about a stored response counts against the limits of the
// tenant, and costs no tokens.
func TestStoredResponsesOfATenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := make(chan struct{})
		e := &world.Engine{Serve: func(c *world.Conn, nth int) {
			if c.Leg.Query != "" {
				<-held
			}
			world.Holding("resp_a")(c, nth)
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "rpm=3 tpm=100") + world.TenantLine("b", "max=1")})
		for n, want := range []struct {
			path   string
			status int
		}{{"resp_a", 200}, {"resp_a", 200}, {"resp_unknown", 404}, {"resp_a", 429}, {"resp_unknown", 429}} {
			r := getAs(w, "a", "/v1/responses/"+want.path)
			if r.Status != want.status || r.Header.Get("X-Ratelimit-Remaining-Requests") != fmt.Sprint(max(0, 2-n)) || r.Header.Get("X-Ratelimit-Remaining-Tokens") != "100" {
				t.Errorf("request %d: status %d, %v", n, r.Status, r.Header)
			}
		}
		first := make(chan int)
		go func() { first <- getAs(w, "b", "/v1/responses/resp_a?stream=true").Status }()
		synctest.Wait()
		if r := getAs(w, "b", "/v1/responses/resp_a"); r.Status != 429 || !strings.Contains(r.Body, "tenant_limit") {
			t.Errorf("beside a stream: got %d %s", r.Status, r.Body)
		}
		close(held)
		if got := <-first; got != 200 {
			t.Errorf("the stream: got status %d", got)
		}
		if r := getAs(w, "b", "/v1/responses/resp_a"); r.Status != 200 {
			t.Errorf("after the stream: got %d %s", r.Status, r.Body)
		}
	})
}

// TestStoredResponsesOfAnotherModel: a tenant reaches no response of an engine whose models it may
// not use, also if another tenant has read the response before.
func TestStoredResponsesOfAnotherModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engines := []*world.Engine{{Name: "a", Serve: world.Holding("resp_a")}, {Name: "b", Models: "other", Serve: world.Holding("resp_b")}}
		w := world.New(t, world.Setup{Engines: engines, Keys: world.TenantLine("all", "") + world.TenantLine("limited", "models=alias,away"), Config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "alias", AliasOf: "other"}, {Name: "away", AliasOf: "missing", Fallback: []string{"remote:r"}}}
			c.Remotes = []config.Remote{{Name: "r", URL: "https://r", Model: "m"}}
		}})
		for range 2 {
			for _, tt := range []struct {
				name, id string
				status   int
			}{{"limited", "resp_a", 404}, {"limited", "resp_b", 200}, {"all", "resp_a", 200}, {"all", "resp_b", 200}} {
				if r := getAs(w, tt.name, "/v1/responses/"+tt.id); r.Status != tt.status {
					t.Errorf("tenant %s: %s: got %d %s", tt.name, tt.id, r.Status, r.Body)
				}
			}
			if r := world.Ask(t.Context(), w.Client, "DELETE", "http://proxy/v1/responses/resp_a", "", "Authorization", "Bearer limited-key"); r.Status != 404 {
				t.Errorf("DELETE: got %d %s", r.Status, r.Body)
			}
		}
	})
}

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
