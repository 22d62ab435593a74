package proxy

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
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// tenantLine is the line of the key "NAME-key" with attributes.
func tenantLine(name, attributes string) string {
	return strings.TrimSpace(keyLine(name, name+"-key")) + " " + attributes + "\n"
}

// asTenant posts a completion with the key of a tenant.
func (w *world) asTenant(name, body string) answer {
	return w.post(completionsPath, body, "Authorization", "Bearer "+name+"-key")
}

// getAs gets a path with the key of a tenant.
func (w *world) getAs(name, path string) answer {
	return ask(context.Background(), w.client, "GET", "http://proxy"+path, "", "Authorization", "Bearer "+name+"-key")
}

const usage = `{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}`

// A tenant gets its requests of a minute, with OpenAI's header lines, and then 429.
func TestTenantRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, fmt.Sprintf(usage, 1, 2)) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "rpm=2") + tenantLine("b", "tenant=a") + tenantLine("free", "")})
		for n, key := range []string{"a", "b"} {
			r := w.asTenant(key, completions(false))
			if h := r.header; r.status != 200 || h.Get("x-ratelimit-limit-requests") != "2" || h.Get("x-ratelimit-remaining-requests") != fmt.Sprint(1-n) ||
				h.Get("x-ratelimit-reset-requests") != []string{"30s", "1m0s"}[n] || h.Get("x-ratelimit-limit-tokens") != "" {
				t.Fatalf("request %d: status %d, %v", n, r.status, h)
			}
		}
		r := w.asTenant("a", completions(false))
		if r.status != 429 || r.header.Get("Retry-After") != "30" || r.header.Get("x-ratelimit-remaining-requests") != "0" ||
			!strings.Contains(r.body, `"type":"requests","param":null,"code":"rate_limit_exceeded"`) || !strings.Contains(r.body, "Please try again in 30s.") {
			t.Errorf("above the limit: %d %v %s", r.status, r.header, r.body)
		}
		if r := w.post("/v1/messages", `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}`, "X-Api-Key", "a-key"); r.status != 429 || !strings.Contains(r.body, `"type":"rate_limit_error"`) {
			t.Errorf("in Anthropic's form: %d %s", r.status, r.body)
		}
		if r := w.asTenant("free", completions(false)); r.status != 200 || r.header.Get("x-ratelimit-limit-requests") != "" {
			t.Errorf("without limits: %d %v", r.status, r.header)
		}
		time.Sleep(30 * time.Second)
		if a, b := w.asTenant("a", completions(false)).status, w.asTenant("b", completions(false)).status; a != 200 || b != 429 {
			t.Errorf("after 30 s: %d, %d", a, b)
		}
		if n := w.metric("pdproxy_tenant_refused_total", "a", "tenant_requests"); n != 3 {
			t.Errorf("%v requests are counted as refused, want 3", n)
		}
		if n := w.metric("pdproxy_shed_total", "tenant_requests"); n != 3 {
			t.Errorf("%v requests are counted as shed, want 3", n)
		}
		if n := w.metric("pdproxy_tenant_tokens_total", "a"); n != 9 {
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
		serve  func(c *engineConn)
		stream bool
		status int
		max    int   // max_tokens; 0: none
		during int64 // remaining while the request runs
		after  int64 // remaining afterwards
	}{
		"whole answer":               {func(c *engineConn) { c.json(200, fmt.Sprintf(usage, 90, 7)) }, false, 200, 300, 600, 903},
		"longer than its maximum":    {func(c *engineConn) { c.json(200, fmt.Sprintf(usage, 90, 400)) }, false, 200, 300, 600, 510},
		"no max_tokens":              {func(c *engineConn) { c.json(200, fmt.Sprintf(usage, 90, 7)) }, false, 200, 0, limit - 100 - 512, 903},
		"more than the whole budget": {func(c *engineConn) { c.json(200, fmt.Sprintf(usage, 90, 7)) }, false, 200, 5000, 0, 903},
		"no usage":                   {func(c *engineConn) { c.json(200, `{"choices":[{"text":"0123456"}]}`) }, false, 200, 300, 600, limit - 100 - 8},
		"no usage of the prompt":     {func(c *engineConn) { c.json(200, `{"usage":{"completion_tokens":7}}`) }, false, 200, 300, 600, 893},
		"stream with usage":          {func(c *engineConn) { c.stream(tokenStream(3, `{"prompt_tokens":90,"completion_tokens":7}`)) }, true, 200, 300, 600, 903},
		"stream without usage":       {func(c *engineConn) { c.stream(tokenStream(9, "")) }, true, 200, 300, 600, limit - 100 - 9},
		"rejected by the engine":     {func(c *engineConn) { c.json(400, `{"error":{}}`) }, false, 400, 300, 600, limit},
		"failed engine":              {func(c *engineConn) { c.json(500, `{"error":{}}`) }, false, 502, 300, 600, limit - 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: func(c *engineConn, _ int) { tt.serve(c) }}
				w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "tpm=1000 max=1")})
				body := fmt.Sprintf(`{"model":"m","prompt":%q,"stream":%t,"max_tokens":%d}`, prompt, tt.stream, tt.max)
				body = strings.Replace(body, `,"max_tokens":0`, "", 1)
				r := w.asTenant("a", body)
				if r.status != tt.status || r.header.Get("x-ratelimit-remaining-tokens") != fmt.Sprint(tt.during) || r.header.Get("x-ratelimit-limit-tokens") != "1000" {
					t.Fatalf("status %d, %v, body %s", r.status, r.header, r.body)
				}
				// This request takes no tokens: no model runs.
				r = w.post("/tokenize", `{"model":"m","prompt":"x"}`, "Authorization", "Bearer a-key")
				if got := r.header.Get("x-ratelimit-remaining-tokens"); got != fmt.Sprint(tt.after) {
					t.Errorf("remaining %s, want %d", got, tt.after)
				}
			})
		})
	}
}

// A client that leaves pays for what the engine may have computed: the reservation for an answer of
// which the client has seen nothing, otherwise the events that the proxy has relayed. A response in
// the background costs its reservation too, unless its first answer reports the usage.
func TestTenantLeaves(t *testing.T) {
	const limit = 1000
	events := func(c *engineConn) {
		c.send(streamHead)
		c.chunks(strings.TrimSuffix(tokenStream(3, ""), "data: [DONE]\n\n"))
	}
	for name, tt := range map[string]struct {
		path, members string
		engine        func(c *engineConn) // begins the answer; the client leaves 5 s later
		after         int64               // remaining afterwards; the prompt has 25 tokens
	}{
		"whole":                     {completionsPath, `"max_tokens":300`, func(*engineConn) {}, limit - 325},
		"whole, head":               {completionsPath, `"max_tokens":300`, func(c *engineConn) { c.send("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{") }, limit - 325},
		"without max_tokens":        {completionsPath, `"n":1`, func(*engineConn) {}, limit - 25 - 512},
		"two sequences":             {completionsPath, `"max_tokens":300,"n":2`, func(*engineConn) {}, limit - 625},
		"more than the budget":      {completionsPath, `"max_tokens":3000`, func(*engineConn) {}, 0},
		"stream before its head":    {completionsPath, `"max_tokens":300,"stream":true`, func(*engineConn) {}, limit - 325},
		"stream before its events":  {completionsPath, `"max_tokens":300,"stream":true`, func(c *engineConn) { c.send(streamHead) }, limit - 325},
		"stream after three events": {completionsPath, `"max_tokens":300,"stream":true`, events, limit - 25 - 3},
		"stream with usage": {completionsPath, `"max_tokens":300,"stream":true`, func(c *engineConn) {
			events(c)
			c.chunks("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":30,\"completion_tokens\":40}}\n\n")
		}, limit - 70},
		"embeddings":                 {"/v1/embeddings", `"n":1`, func(*engineConn) {}, limit - 25},
		"background":                 {"/v1/responses", `"background":true,"max_output_tokens":300`, func(c *engineConn) { c.json(200, `{"status":"queued","usage":null}`) }, limit - 325},
		"background with its usage":  {"/v1/responses", `"background":true,"max_output_tokens":300`, func(c *engineConn) { c.json(200, `{"usage":{"input_tokens":30,"output_tokens":40}}`) }, limit - 70},
		"background that is refused": {"/v1/responses", `"background":true,"max_output_tokens":300`, func(c *engineConn) { c.json(400, `{"error":{}}`) }, limit},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: func(c *engineConn, _ int) {
					tt.engine(c)
					if !strings.HasPrefix(name, "background") {
						c.hold()
					}
				}}
				w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "tpm=1000")})
				ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
				defer leave()
				body := fmt.Sprintf(`{"model":"m","prompt":%q,"input":%[1]q,%s}`, strings.Repeat("w", 98), tt.members)
				if strings.HasPrefix(tt.path, "/v1/completions") {
					body = strings.Replace(body, `"input"`, `"unused"`, 1)
				}
				ask(ctx, w.client, "POST", "http://proxy"+tt.path, body, "Authorization", "Bearer a-key", "Content-Type", "application/json")
				synctest.Wait()
				if used, want := w.metric("pdproxy_tenant_tokens_total", "a"), limit-tt.after; int64(used) != want {
					t.Errorf("%v tokens are counted, want %d", used, want)
				}
				r := w.post("/tokenize", `{"model":"m","prompt":"x"}`, "Authorization", "Bearer a-key")
				refilled := int64(0)
				if !strings.HasPrefix(name, "background") {
					refilled = 5 * limit / 60 // in 5 s
				}
				if got := r.header.Get("x-ratelimit-remaining-tokens"); got != fmt.Sprint(min(tt.after+refilled, limit)) {
					t.Errorf("remaining %s, want %d", got, tt.after+refilled)
				}
			})
		})
	}
}

// The lines of both budgets have OpenAI's form in whole answers, in streams and in refusals: the
// limit, what remains, and the time until the budget is whole again. Lines of the engine give way.
func TestRateLimitLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			if strings.Contains(c.leg.body, `"stream":true`) {
				c.stream(tokenStream(3, `{"prompt_tokens":100,"completion_tokens":200}`))
				return
			}
			c.send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Ratelimit-Limit-Requests: 9\r\nContent-Length: 55\r\n\r\n" + fmt.Sprintf(usage, 100, 300))
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "rpm=10 tpm=1000")})
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
			r := w.asTenant("a", tt.body)
			want := map[string]string{
				"x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": tt.requests, "x-ratelimit-reset-requests": tt.resets,
				"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": tt.tokens, "x-ratelimit-reset-tokens": tt.whole, "Retry-After": tt.retry,
			}
			if tt.status == 400 {
				want["x-ratelimit-limit-requests"], want["x-ratelimit-limit-tokens"] = "", ""
			}
			for name, value := range want {
				if got := strings.Join(r.header.Values(name), ", "); r.status != tt.status || got != value {
					t.Errorf("request %d: status %d, %s: %q, want %d, %q", n, r.status, name, got, tt.status, value)
				}
			}
		}
	})
}

// A request that no engine gets gives all of its budgets back.
func TestTenantUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{keys: tenantLine("a", "rpm=1 tpm=1000 max=1")})
		for range 3 {
			if r := w.asTenant("a", completions(false)); r.status != 404 && r.status != 503 || r.header.Get("x-ratelimit-remaining-requests") != "0" {
				t.Fatalf("status %d, %v", r.status, r.header)
			}
		}
	})
}

// Above max requests of a tenant get 429 at once, and other tenants are served.
func TestTenantExchanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		e := &fakeEngine{serve: func(c *engineConn, _ int) { <-release; c.json(200, `{}`) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "max=2") + tenantLine("b", "max=1")})
		statuses := make(chan int)
		for _, key := range []string{"a", "a", "b"} {
			go func() { statuses <- w.asTenant(key, completions(false)).status }()
		}
		synctest.Wait()
		for _, key := range []string{"a", "b"} {
			if r := w.asTenant(key, completions(false)); r.status != 429 || !strings.Contains(r.body, `"code":"tenant_limit"`) || r.header.Get("Retry-After") != "1" {
				t.Errorf("tenant %s: %d %v %s", key, r.status, r.header, r.body)
			}
		}
		close(release)
		for range 3 {
			if s := <-statuses; s != 200 {
				t.Errorf("status %d", s)
			}
		}
		if r := w.asTenant("b", completions(false)); r.status != 200 {
			t.Errorf("after the end: %d %s", r.status, r.body)
		}
	})
}

// A tenant sees and uses only its models, by the names that it may use.
func TestTenantModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, `{}`) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("all", "") + tenantLine("alias", "models=chat,away") + tenantLine("own", "models=m"),
			config: func(c *config.Config) {
				c.Models = []config.Model{{Name: "chat", AliasOf: "m"}, {Name: "talk", AliasOf: "m"}}
			}})
		for key, models := range map[string]string{"all": "chat m talk", "alias": "chat", "own": "m"} {
			var list struct{ Data []struct{ ID string } }
			r := w.getAs(key, "/v1/models")
			if err := json.Unmarshal([]byte(r.body), &list); err != nil {
				t.Fatalf("%v: %s", err, r.body)
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
				r := w.asTenant(key, strings.Replace(completions(false), `"m"`, `"`+model+`"`, 1))
				if r.status != want || want == 404 && (!strings.Contains(r.body, `"param":"model","code":"model_not_found"`) || key == "own" && strings.Contains(r.body, "chat") && model != "chat") {
					t.Errorf("%s uses %s: %d %s", key, model, r.status, r.body)
				}
				if one := w.getAs(key, "/v1/models/"+model); one.status != want {
					t.Errorf("%s sees %s: %d %s", key, model, one.status, one.body)
				}
			}
			nameless := w.asTenant(key, strings.Replace(completions(false), `"model":"m",`, "", 1))
			if want := map[string]int{"all": 200, "own": 200, "alias": 404}[key]; nameless.status != want {
				t.Errorf("%s without a model: %d %s", key, nameless.status, nameless.body)
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
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, `{}`) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: tenantLine("a", "")})
		w.Reload(w.cfg.Load(), w.keys.Load().WithTokens(oneToken{}))
		for n, tt := range []struct {
			token string
			want  int
		}{{"a.b.c", 200}, {"a.b.c", 429}, {"a-key", 200}, {"x.y.z", 401}, {"a.b.c", 429}} {
			r := w.post(completionsPath, completions(false), "Authorization", "Bearer "+tt.token)
			if r.status != tt.want || tt.want == 401 && !strings.Contains(r.body, "the token has expired") {
				t.Errorf("request %d: %d %s, want %d", n, r.status, r.body, tt.want)
			}
		}
		for _, leg := range e.seen() {
			if leg.header.Get("Authorization") != "" {
				t.Errorf("an engine got %q", leg.header.Get("Authorization"))
			}
		}
		if n := w.metric("pdproxy_client_exchanges_total", "org", "ok"); n != 1 {
			t.Errorf("%v exchanges of the tenant", n)
		}
		if strings.Contains(w.logged.String(), "a.b.c") || strings.Contains(w.logged.String(), "x.y.z") {
			t.Error("the log contains a token")
		}
	})
}
