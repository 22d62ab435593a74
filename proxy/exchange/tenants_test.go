package exchange_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// asTenant posts a completion with the key of a tenant.
func asTenant(w *world.World, name, body string) world.Answer {
	return w.Post(world.CompletionsPath, body, "Authorization", "Bearer "+name+"-key")
}

// getAs gets a path with the key of a tenant.
func getAs(w *world.World, name, path string) world.Answer {
	return world.Ask(context.Background(), w.Client, "GET", "http://proxy"+path, "", "Authorization", "Bearer "+name+"-key")
}

const usage = `{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}`

// A tenant gets its requests of a minute, with OpenAI's header lines, and then 429.
func TestTenantRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, fmt.Sprintf(usage, 1, 2)) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "rpm=2") + world.TenantLine("b", "tenant=a") + world.TenantLine("free", "")})
		for n, key := range []string{"a", "b"} {
			r := asTenant(w, key, world.Completions(false))
			if h := r.Header; r.Status != 200 || h.Get("x-ratelimit-limit-requests") != "2" || h.Get("x-ratelimit-remaining-requests") != fmt.Sprint(1-n) ||
				h.Get("x-ratelimit-reset-requests") != []string{"30s", "1m0s"}[n] || h.Get("x-ratelimit-limit-tokens") != "" {
				t.Fatalf("request %d: status %d, %v", n, r.Status, h)
			}
		}
		r := asTenant(w, "a", world.Completions(false))
		if r.Status != 429 || r.Header.Get("Retry-After") != "30" || r.Header.Get("x-ratelimit-remaining-requests") != "0" ||
			!strings.Contains(r.Body, `"type":"requests","param":null,"code":"rate_limit_exceeded"`) || !strings.Contains(r.Body, "Please try again in 30s.") {
			t.Errorf("above the limit: %d %v %s", r.Status, r.Header, r.Body)
		}
		if r := w.Post("/v1/messages", `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}`, "X-Api-Key", "a-key"); r.Status != 429 || !strings.Contains(r.Body, `"type":"rate_limit_error"`) {
			t.Errorf("in Anthropic's form: %d %s", r.Status, r.Body)
		}
		if r := asTenant(w, "free", world.Completions(false)); r.Status != 200 || r.Header.Get("x-ratelimit-limit-requests") != "" {
			t.Errorf("without limits: %d %v", r.Status, r.Header)
		}
		time.Sleep(30 * time.Second)
		if a, b := asTenant(w, "a", world.Completions(false)).Status, asTenant(w, "b", world.Completions(false)).Status; a != 200 || b != 429 {
			t.Errorf("after 30 s: %d, %d", a, b)
		}
		if n := w.Metric("pdproxy_tenant_refused_total", "a", "tenant_requests"); n != 3 {
			t.Errorf("%v requests are counted as refused, want 3", n)
		}
		if n := w.Metric("pdproxy_shed_total", "tenant_requests"); n != 3 {
			t.Errorf("%v requests are counted as shed, want 3", n)
		}
		if n := w.Metric("pdproxy_tenant_tokens_total", "a"); n != 9 {
			t.Errorf("%v tokens, want 9", n)
		}
	})
}

// stream is a stream of completions of n events, with usage unless it is "".
func tokenStream(n int, usage string) string {
	text := strings.Repeat("data: {\"choices\":[{\"text\":\"x\"}]}\n\n", n)
	if usage != "" {
		text += "data: {\"choices\":[],\"usage\":" + usage + "}\n\n"
	}
	return text + "data: [DONE]\n\n"
}

// Tokens are reserved when a request begins, and its answer corrects them.
func TestTenantTokens(t *testing.T) {
	const limit = 1000
	prompt := strings.Repeat("w", 398) // 100 tokens
	for name, tt := range map[string]struct {
		serve  func(c *world.Conn)
		stream bool
		status int
		max    int   // max_tokens; 0: none
		during int64 // remaining while the request runs
		after  int64 // remaining afterwards
	}{
		"whole answer":               {func(c *world.Conn) { c.JSON(200, fmt.Sprintf(usage, 90, 7)) }, false, 200, 300, 600, 903},
		"longer than its maximum":    {func(c *world.Conn) { c.JSON(200, fmt.Sprintf(usage, 90, 400)) }, false, 200, 300, 600, 510},
		"no max_tokens":              {func(c *world.Conn) { c.JSON(200, fmt.Sprintf(usage, 90, 7)) }, false, 200, 0, limit - 100 - 512, 903},
		"more than the whole budget": {func(c *world.Conn) { c.JSON(200, fmt.Sprintf(usage, 90, 7)) }, false, 200, 5000, 0, 903},
		"no usage":                   {func(c *world.Conn) { c.JSON(200, `{"choices":[{"text":"0123456"}]}`) }, false, 200, 300, 600, limit - 100 - 8},
		"no usage of the prompt":     {func(c *world.Conn) { c.JSON(200, `{"usage":{"completion_tokens":7}}`) }, false, 200, 300, 600, 893},
		"stream with usage":          {func(c *world.Conn) { c.Stream(tokenStream(3, `{"prompt_tokens":90,"completion_tokens":7}`)) }, true, 200, 300, 600, 903},
		"stream without usage":       {func(c *world.Conn) { c.Stream(tokenStream(9, "")) }, true, 200, 300, 600, limit - 100 - 9},
		"rejected by the engine":     {func(c *world.Conn) { c.JSON(400, `{"error":{}}`) }, false, 400, 300, 600, limit},
		"failed engine":              {func(c *world.Conn) { c.JSON(500, `{"error":{}}`) }, false, 502, 300, 600, limit - 100},
	} {
		world.Run(t, name, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { tt.serve(c) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "tpm=1000 max=1")})
			body := fmt.Sprintf(`{"model":"m","prompt":%q,"stream":%t,"max_tokens":%d}`, prompt, tt.stream, tt.max)
			body = strings.Replace(body, `,"max_tokens":0`, "", 1)
			r := asTenant(w, "a", body)
			if r.Status != tt.status || r.Header.Get("x-ratelimit-remaining-tokens") != fmt.Sprint(tt.during) || r.Header.Get("x-ratelimit-limit-tokens") != "1000" {
				t.Fatalf("status %d, %v, body %s", r.Status, r.Header, r.Body)
			}
			// This request takes no tokens: no model runs.
			r = w.Post("/tokenize", `{"model":"m","prompt":"x"}`, "Authorization", "Bearer a-key")
			if got := r.Header.Get("x-ratelimit-remaining-tokens"); got != fmt.Sprint(tt.after) {
				t.Errorf("remaining %s, want %d", got, tt.after)
			}
		})
	}
}

// A client that leaves pays for what the engine may have computed: the reservation for an answer of
// which the client has seen nothing, otherwise the events that the proxy has relayed. A response in
// the background costs its reservation too, unless its first answer reports the usage.
func TestTenantLeaves(t *testing.T) {
	const limit = 1000
	events := func(c *world.Conn) {
		c.Send(world.StreamHead)
		c.Chunks(strings.TrimSuffix(tokenStream(3, ""), "data: [DONE]\n\n"))
	}
	for name, tt := range map[string]struct {
		path, members string
		engine        func(c *world.Conn) // begins the answer; the client leaves 5 s later
		after         int64               // remaining afterwards; the prompt has 25 tokens
	}{
		"whole":                     {world.CompletionsPath, `"max_tokens":300`, func(*world.Conn) {}, limit - 325},
		"whole, head":               {world.CompletionsPath, `"max_tokens":300`, func(c *world.Conn) { c.Send("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{") }, limit - 325},
		"without max_tokens":        {world.CompletionsPath, `"n":1`, func(*world.Conn) {}, limit - 25 - 512},
		"two sequences":             {world.CompletionsPath, `"max_tokens":300,"n":2`, func(*world.Conn) {}, limit - 625},
		"more than the budget":      {world.CompletionsPath, `"max_tokens":3000`, func(*world.Conn) {}, 0},
		"stream before its head":    {world.CompletionsPath, `"max_tokens":300,"stream":true`, func(*world.Conn) {}, limit - 325},
		"stream before its events":  {world.CompletionsPath, `"max_tokens":300,"stream":true`, func(c *world.Conn) { c.Send(world.StreamHead) }, limit - 325},
		"stream after three events": {world.CompletionsPath, `"max_tokens":300,"stream":true`, events, limit - 25 - 3},
		"stream with usage": {world.CompletionsPath, `"max_tokens":300,"stream":true`, func(c *world.Conn) {
			events(c)
			c.Chunks("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":30,\"completion_tokens\":40}}\n\n")
		}, limit - 70},
		"embeddings":                 {"/v1/embeddings", `"n":1`, func(*world.Conn) {}, limit - 25},
		"background":                 {"/v1/responses", `"background":true,"max_output_tokens":300`, func(c *world.Conn) { c.JSON(200, `{"status":"queued","usage":null}`) }, limit - 325},
		"background with its usage":  {"/v1/responses", `"background":true,"max_output_tokens":300`, func(c *world.Conn) { c.JSON(200, `{"usage":{"input_tokens":30,"output_tokens":40}}`) }, limit - 70},
		"background that is refused": {"/v1/responses", `"background":true,"max_output_tokens":300`, func(c *world.Conn) { c.JSON(400, `{"error":{}}`) }, limit},
	} {
		world.Run(t, name, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) {
				tt.engine(c)
				if !strings.HasPrefix(name, "background") {
					c.Hold()
				}
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "tpm=1000")})
			ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
			defer leave()
			body := fmt.Sprintf(`{"model":"m","prompt":%q,"input":%[1]q,%s}`, strings.Repeat("w", 98), tt.members)
			if strings.HasPrefix(tt.path, "/v1/completions") {
				body = strings.Replace(body, `"input"`, `"unused"`, 1)
			}
			world.Ask(ctx, w.Client, "POST", "http://proxy"+tt.path, body, "Authorization", "Bearer a-key", "Content-Type", "application/json")
			synctest.Wait()
			if used, want := w.Metric("pdproxy_tenant_tokens_total", "a"), limit-tt.after; int64(used) != want {
				t.Errorf("%v tokens are counted, want %d", used, want)
			}
			r := w.Post("/tokenize", `{"model":"m","prompt":"x"}`, "Authorization", "Bearer a-key")
			refilled := int64(0)
			if !strings.HasPrefix(name, "background") {
				refilled = 5 * limit / 60 // in 5 s
			}
			if got := r.Header.Get("x-ratelimit-remaining-tokens"); got != fmt.Sprint(min(tt.after+refilled, limit)) {
				t.Errorf("remaining %s, want %d", got, tt.after+refilled)
			}
		})
	}
}

// The lines of both budgets have OpenAI's form in whole answers, in streams and in refusals: the
// limit, what remains, and the time until the budget is whole again. Lines of the engine give way.
func TestRateLimitLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			if strings.Contains(c.Leg.Body, `"stream":true`) {
				c.Stream(tokenStream(3, `{"prompt_tokens":100,"completion_tokens":200}`))
				return
			}
			c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Ratelimit-Limit-Requests: 9\r\nContent-Length: 55\r\n\r\n" + fmt.Sprintf(usage, 100, 300))
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "rpm=10 tpm=1000")})
		body := func(stream bool, most int) string {
			return fmt.Sprintf(`{"model":"m","prompt":%q,"stream":%t,"max_tokens":%d}`, strings.Repeat("w", 398), stream, most)
		}
		for n, tt := range []struct {
			body             string
			status           int
			requests, resets string
			tokens, whole    string
			retry            string
		}{
			{body(false, 300), 200, "9", "6s", "600", "24s", ""},
			{body(true, 400), 200, "8", "12s", "100", "54s", ""},     // 200 of these come back
			{body(false, 600), 429, "8", "12s", "300", "42s", "24"},  // 700 are needed
			{body(false, 5000), 429, "8", "12s", "300", "42s", "42"}, // all are needed
			{body(false, 100), 200, "7", "18s", "100", "54s", ""},    // 200 of 300; the answer is longer
			{body(false, 1), 429, "7", "18s", "0", "1m6s", "13"},     // 101 are needed, after a debt of 100
			{`{"model":"m","prompt":`, 400, "", "", "", "", ""},      // refused before the budgets
		} {
			r := asTenant(w, "a", tt.body)
			want := map[string]string{
				"x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": tt.requests, "x-ratelimit-reset-requests": tt.resets,
				"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": tt.tokens, "x-ratelimit-reset-tokens": tt.whole, "Retry-After": tt.retry,
			}
			if tt.status == 400 {
				want["x-ratelimit-limit-requests"], want["x-ratelimit-limit-tokens"] = "", ""
			}
			for name, value := range want {
				if got := strings.Join(r.Header.Values(name), ", "); r.Status != tt.status || got != value {
					t.Errorf("request %d: status %d, %s: %q, want %d, %q", n, r.Status, name, got, tt.status, value)
				}
			}
		}
	})
}

// A request that no engine gets gives all of its budgets back.
func TestTenantUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Keys: world.TenantLine("a", "rpm=1 tpm=1000 max=1")})
		for range 3 {
			if r := asTenant(w, "a", world.Completions(false)); r.Status != 404 && r.Status != 503 || r.Header.Get("x-ratelimit-remaining-requests") != "0" {
				t.Fatalf("status %d, %v", r.Status, r.Header)
			}
		}
	})
}

// Above max requests of a tenant get 429 at once, and other tenants are served.
func TestTenantExchanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { <-release; c.JSON(200, `{}`) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "max=2") + world.TenantLine("b", "max=1")})
		statuses := make(chan int)
		for _, key := range []string{"a", "a", "b"} {
			go func() { statuses <- asTenant(w, key, world.Completions(false)).Status }()
		}
		synctest.Wait()
		for _, key := range []string{"a", "b"} {
			if r := asTenant(w, key, world.Completions(false)); r.Status != 429 || !strings.Contains(r.Body, `"code":"tenant_limit"`) || r.Header.Get("Retry-After") != "1" {
				t.Errorf("tenant %s: %d %v %s", key, r.Status, r.Header, r.Body)
			}
		}
		close(release)
		for range 3 {
			if s := <-statuses; s != 200 {
				t.Errorf("status %d", s)
			}
		}
		if r := asTenant(w, "b", world.Completions(false)); r.Status != 200 {
			t.Errorf("after the end: %d %s", r.Status, r.Body)
		}
	})
}

// A tenant sees and uses only its models, by the names that it may use.
func TestTenantModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{}`) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("all", "") + world.TenantLine("alias", "models=chat,away") + world.TenantLine("own", "models=m"),
			Config: func(c *config.Config) {
				c.Models = []config.Model{{Name: "chat", AliasOf: "m"}, {Name: "talk", AliasOf: "m"}}
			}})
		for key, models := range map[string]string{"all": "chat m talk", "alias": "chat", "own": "m"} {
			var list struct{ Data []struct{ ID string } }
			r := getAs(w, key, "/v1/models")
			if err := json.Unmarshal([]byte(r.Body), &list); err != nil {
				t.Fatalf("%v: %s", err, r.Body)
			}
			var ids []string
			for _, m := range list.Data {
				ids = append(ids, m.ID)
			}
			if strings.Join(ids, " ") != models {
				t.Errorf("%s sees %v, want %s", key, ids, models)
			}
			for _, model := range []string{"m", "chat", "talk", "none"} {
				want := 404
				if strings.Contains(models, model) {
					want = 200
				}
				r := asTenant(w, key, strings.Replace(world.Completions(false), `"m"`, `"`+model+`"`, 1))
				if r.Status != want || want == 404 && (!strings.Contains(r.Body, `"param":"model","code":"model_not_found"`) || key == "own" && strings.Contains(r.Body, "chat") && model != "chat") {
					t.Errorf("%s uses %s: %d %s", key, model, r.Status, r.Body)
				}
				if one := getAs(w, key, "/v1/models/"+model); one.Status != want {
					t.Errorf("%s sees %s: %d %s", key, model, one.Status, one.Body)
				}
			}
			nameless := asTenant(w, key, strings.Replace(world.Completions(false), `"model":"m",`, "", 1))
			if want := map[string]int{"all": 200, "own": 200, "alias": 404}[key]; nameless.Status != want {
				t.Errorf("%s without a model: %d %s", key, nameless.Status, nameless.Body)
			}
		}
	})
}

// oneToken accepts the token a.b.c.
type oneToken struct{}

func (oneToken) Tenant(_ context.Context, token string) (*tenant.Tenant, error) {
	if token == "a.b.c" {
		return tenant.New(tenant.Tenant{Name: "org", Models: []string{"m"}, Limits: tenant.Limits{Requests: 1}}), nil
	}
	return nil, openai.NewError(openai.CodeInvalidAPIKey, "the token has expired")
}

// Tokens and keys work side by side. The limits of the token's tenant hold, and engines do not
// get the token.
func TestTenantOfToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{}`) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "")})
		w.Reload(w.Config, w.Keys.WithTokens(oneToken{}))
		for n, tt := range []struct {
			token string
			want  int
		}{{"a.b.c", 200}, {"a.b.c", 429}, {"a-key", 200}, {"x.y.z", 401}, {"a.b.c", 429}} {
			r := w.Post(world.CompletionsPath, world.Completions(false), "Authorization", "Bearer "+tt.token)
			if r.Status != tt.want || tt.want == 401 && !strings.Contains(r.Body, "the token has expired") {
				t.Errorf("request %d: %d %s, want %d", n, r.Status, r.Body, tt.want)
			}
		}
		for _, leg := range e.Seen() {
			if leg.Header.Get("Authorization") != "" {
				t.Errorf("an engine got %q", leg.Header.Get("Authorization"))
			}
		}
		if n := w.Metric("pdproxy_client_exchanges_total", "org", "ok"); n != 1 {
			t.Errorf("%v exchanges of the tenant", n)
		}
		if strings.Contains(w.Logged.String(), "a.b.c") || strings.Contains(w.Logged.String(), "x.y.z") {
			t.Error("the log contains a token")
		}
	})
}
