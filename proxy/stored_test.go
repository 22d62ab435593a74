package proxy

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// holding answers for an engine that stores the response of one id.
func holding(id string) func(c *engineConn, nth int) {
	return func(c *engineConn, _ int) {
		switch path := c.leg.path; {
		case path == "/v1/responses":
			c.json(200, `{"id":"new","object":"response","output":[]}`)
		case !strings.HasPrefix(path, "/v1/responses/"+id):
			c.json(404, `{"error":{"message":"not found"}}`)
		case strings.HasSuffix(path, "/cancel"):
			c.json(404, `{"detail":"Not Found"}`) // as TensorRT-LLM, which has no such route
		case c.leg.method == "DELETE":
			c.json(200, `{"id":"`+id+`","object":"response","deleted":true}`)
		case c.leg.query != "":
			c.stream("event: response.created\ndata: {}\n\n", "event: response.completed\ndata: {\"q\":\""+c.leg.query+"\"}\n\n")
		default:
			c.json(200, `{"id":"`+id+`","output":[],"kv_transfer_params":{"remote_host":"p"}}`)
		}
	}
}

// TestStoredResponses: the engine that holds a response answers; a response that no engine
// holds is unknown; the key of each engine, and not that of the client, is sent.
func TestStoredResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engines := []*fakeEngine{
			{name: "p", role: "prefill", connector: "vllm-nixl", serve: holding("resp_p")},
			{name: "a", role: "decode", connector: "vllm-nixl", serve: holding("resp_a"), key: "ka"},
			{name: "b", role: "decode", connector: "vllm-nixl", serve: holding("resp_b")},
			{name: "s", connector: "sglang", models: "other", serve: holding("resp_s")},
		}
		w := newWorld(t, setup{engines: engines, keys: keyLine("n", "k")})
		call := func(method, path string) string {
			t.Helper()
			a := ask(t.Context(), w.client, method, "http://proxy/v1/responses/"+path, "", "Authorization", "Bearer k")
			if a.header.Get("X-Request-Id") == "" {
				t.Errorf("%s: no request id", path)
			}
			return fmt.Sprint(a.status, " ", a.body)
		}
		for range 2 {
			for _, tt := range []struct{ method, path, want string }{
				{"GET", "resp_a", `200 {"id":"resp_a","output":[],"kv_transfer_params":null}`},
				{"GET", "resp_b/", `200 {"id":"resp_b","output":[],"kv_transfer_params":null}`},
				{"GET", "resp_b?stream=true&starting_after=3&rid=7", "200 event: response.created\ndata: {}\n\nevent: response.completed\ndata: {\"q\":\"starting_after=3&stream=true\"}\n\n"},
				{"DELETE", "resp_b", `200 {"id":"resp_b","object":"response","deleted":true}`},
				{"POST", "resp_b/cancel", `501 {"error":{"message":"the engine that holds the response cannot cancel it"`},
				{"GET", "resp_p", `404 {"error":{"message":"no engine holds a response of this id","type":"invalid_request_error","param":"response_id","code":"response_not_found"}}`},
				{"GET", "resp_s", `404 {"error":{"message":"no engine`}, // its connector serves no responses
			} {
				if got := call(tt.method, tt.path); !strings.HasPrefix(got, tt.want) {
					t.Errorf("%s %s: got %s, want %s", tt.method, tt.path, got, tt.want)
				}
			}
		}
		if n := len(engines[0].seen()) + len(engines[3].seen()); n != 0 {
			t.Errorf("engines that hold no responses received %d requests", n)
		}
		for _, e := range engines[1:3] {
			for _, leg := range e.seen() {
				if got, want := leg.header.Get("Authorization"), map[string]string{"a": "Bearer ka"}[e.name]; got != want || leg.header.Get("Content-Type") != "" {
					t.Errorf("engine %s received the header %v", e.name, leg.header)
				}
			}
		}
		if a := w.get("/v1/responses/resp_a"); a.status != 401 {
			t.Errorf("without a key: got status %d", a.status)
		}
		if got := ask(t.Context(), w.client, "POST", "http://proxy/v1/responses", `{"model":"m","input":"x","previous_response_id":"resp_b"}`, "Authorization", "Bearer k"); got.status != 200 {
			t.Errorf("a later turn: got status %d: %s", got.status, got.body)
		}
		legs := engines[2].seen()
		if last := legs[len(legs)-1]; last.path != "/v1/responses" {
			t.Errorf("the engine that holds the response received %s last", last.path)
		}
	})
}

// TestStoredResponseOfASilentEngine: while an engine that may hold the response does not
// answer, the response is not reported as unknown.
func TestStoredResponseOfASilentEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var works atomic.Bool
		broken := &fakeEngine{name: "a", serve: func(c *engineConn, nth int) {
			switch {
			case works.Load():
				holding("resp_a")(c, nth)
			case nth%2 == 0:
				c.json(500, `{}`)
			default:
				c.hold()
			}
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{broken, {name: "b", serve: holding("resp_b")}}, config: func(c *config.Config) { c.Limits.MaxExchanges = 1 }})
		get := func(id string) int { return w.get("/v1/responses/" + id).status }
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

// TestWebSocketRefused: Codex falls back to POST at once only after 426.
func TestWebSocketRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}})
		for _, tt := range []struct {
			method, path, upgrade string
			status                int
			code                  string
		}{
			{"GET", "/v1/responses", "websocket", 426, "upgrade_required"},
			{"GET", "/v1/responses/", "WebSocket", 426, "upgrade_required"},
			{"GET", "/v1/responses", "h2c", 405, "method_not_allowed"},
			{"GET", "/v1/responses", "", 405, "method_not_allowed"},
			{"PUT", "/v1/responses", "websocket", 405, "method_not_allowed"},
			{"GET", "/v1/nothing", "websocket", 404, "not_found"},
		} {
			header := []string{"OpenAI-Beta", "responses_websockets=2026-02-06"}
			if tt.upgrade != "" {
				header = append(header, "Connection", "Upgrade", "Upgrade", tt.upgrade, "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version", "13")
			}
			a := ask(t.Context(), w.client, tt.method, "http://proxy"+tt.path, "", header...)
			if a.status != tt.status || !strings.Contains(a.body, tt.code) || a.header.Get("X-Request-Id") == "" {
				t.Errorf("%s %s, upgrade %q: got status %d, %v: %s", tt.method, tt.path, tt.upgrade, a.status, a.err, a.body)
			}
		}
		if a := w.post(completionsPath, completions(false)); a.status != 200 {
			t.Errorf("the next request: %+v", a)
		}
	})
}

// TestStoredResponsesOfATenant: a request about a stored response counts against the limits of the
// tenant, and costs no tokens.
func TestStoredResponsesOfATenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := make(chan struct{})
		e := &fakeEngine{serve: func(c *engineConn, nth int) {
			if c.leg.query != "" {
				<-held
			}
			holding("resp_a")(c, nth)
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "rpm=3 tpm=100") + tenantLine("b", "max=1")})
		for n, want := range []struct {
			path   string
			status int
		}{{"resp_a", 200}, {"resp_a", 200}, {"resp_unknown", 404}, {"resp_a", 429}, {"resp_unknown", 429}} {
			r := w.getAs("a", "/v1/responses/"+want.path)
			if r.status != want.status || r.header.Get("X-Ratelimit-Remaining-Requests") != fmt.Sprint(max(0, 2-n)) || r.header.Get("X-Ratelimit-Remaining-Tokens") != "100" {
				t.Errorf("request %d: status %d, %v", n, r.status, r.header)
			}
		}
		first := make(chan int)
		go func() { first <- w.getAs("b", "/v1/responses/resp_a?stream=true").status }()
		synctest.Wait()
		if r := w.getAs("b", "/v1/responses/resp_a"); r.status != 429 || !strings.Contains(r.body, "tenant_limit") {
			t.Errorf("beside a stream: got %d %s", r.status, r.body)
		}
		close(held)
		if got := <-first; got != 200 {
			t.Errorf("the stream: got status %d", got)
		}
		if r := w.getAs("b", "/v1/responses/resp_a"); r.status != 200 {
			t.Errorf("after the stream: got %d %s", r.status, r.body)
		}
	})
}

// TestStoredResponsesOfAnotherModel: a tenant reaches no response of an engine whose models it may
// not use, also if another tenant has read the response before.
func TestStoredResponsesOfAnotherModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engines := []*fakeEngine{{name: "a", serve: holding("resp_a")}, {name: "b", models: "other", serve: holding("resp_b")}}
		w := newWorld(t, setup{engines: engines, keys: tenantLine("all", "") + tenantLine("limited", "models=alias,away"), config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "alias", AliasOf: "other"}, {Name: "away", AliasOf: "missing", Fallback: []string{"remote:r"}}}
			c.Remotes = []config.Remote{{Name: "r", URL: "https://r", Model: "m"}}
		}})
		for range 2 {
			for _, tt := range []struct {
				name, id string
				status   int
			}{{"limited", "resp_a", 404}, {"limited", "resp_b", 200}, {"all", "resp_a", 200}, {"all", "resp_b", 200}} {
				if r := w.getAs(tt.name, "/v1/responses/"+tt.id); r.status != tt.status {
					t.Errorf("tenant %s: %s: got %d %s", tt.name, tt.id, r.status, r.body)
				}
			}
			if r := ask(t.Context(), w.client, "DELETE", "http://proxy/v1/responses/resp_a", "", "Authorization", "Bearer limited-key"); r.status != 404 {
				t.Errorf("DELETE: got %d %s", r.status, r.body)
			}
		}
	})
}
