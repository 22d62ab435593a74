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
				{"GET", "resp_s", `404 {"error":{"message":"no engine`}, // its connector serves no responses
			} {
				if got := call(tt.method, tt.path); !strings.HasPrefix(got, tt.want) {
					t.Errorf("%s %s: got %s, want %s", tt.method, tt.path, got, tt.want)
				}
			}
		}
		if n := len(engines[0].Seen()) + len(engines[3].Seen()); n != 0 {
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
