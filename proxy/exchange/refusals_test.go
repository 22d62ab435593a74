package exchange_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// Requests that the proxy rejects before it sends a leg.
func TestRequestsRefused(t *testing.T) {
	one := []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}
	tests := []struct {
		name         string
		engines      []*world.Engine
		method, path string
		body         string
		status       int
		text         string
	}{
		{"no JSON", one, "POST", world.CompletionsPath, "what", 400, "invalid_request_error"},
		{"no prompt", one, "POST", world.CompletionsPath, `{"model":"m"}`, 400, "prompt"},
		{"unknown model", one, "POST", world.CompletionsPath, `{"model":"other","prompt":"x"}`, 404, "model_not_found"},
		{"text for an unknown model", one, "POST", world.CompletionsPath, `{"model":"ot\"her","prompt":"x"}`, 404, `"the model \"ot\\\"her\" does not exist; the engines serve m"`},
		{"unknown model's row", one, "GET", "/v1/models/other", "", 404, `the model \"other\" does not exist; the engines serve m`},
		{"too large", one, "POST", world.CompletionsPath, `{"model":"m","prompt":"` + strings.Repeat("x", 2000) + `"}`, 413, "body_too_large"},
		{"no engine", nil, "POST", world.CompletionsPath, world.Completions(false), 503, "no_target"},
		{"GET", one, "GET", world.CompletionsPath, "", 405, "method_not_allowed"},
		{"POST of models", one, "POST", "/v1/models", "", 405, "method_not_allowed"},
		{"no such endpoint", one, "GET", "/v1/nothing", "", 404, `"there is no endpoint GET \"/v1/nothing\""`},
		{"slash at the end", one, "POST", "/v1/chat/completions/", `{}`, 400, "'messages' is missing."},
		{"two slashes at the end", one, "POST", "/v1/chat/completions//", `{}`, 404, "did you mean /v1/chat/completions?"},
		{"GET with a slash at the end", one, "GET", "/v1/chat/completions/", "", 405, "method_not_allowed"},
		{"slash alone", one, "GET", "/", "", 404, `"there is no endpoint GET \"/\""`},
		{"without v1", one, "POST", "/chat/completions", `{}`, 404, "did you mean /v1/chat/completions?"},
		{"v1 twice", one, "GET", "/v1/v1/models", "", 404, "did you mean /v1/models?"},
		{"v1 before health", one, "GET", "/v1/health/", "", 404, "did you mean /health?"},
		{"code for an unknown endpoint", one, "GET", "/" + strings.Repeat("x", 5000), "", 404, "not_found"},
		{"not carried", []*world.Engine{{Name: "p", Role: "prefill", Connector: "vllm-nixl"}, {Name: "d", Role: "decode", Connector: "vllm-nixl"}}, "POST", "/generate", `{"text":"x"}`, 501, "not_implemented"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := world.New(t, world.Setup{Engines: tt.engines, Config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
				a := world.Ask(t.Context(), w.Client, tt.method, "http://proxy"+tt.path, tt.body)
				if a.Status != tt.status || !strings.Contains(a.Body, tt.text) || !strings.Contains(a.Body, `{"error":{"message":`) || a.Header.Get("X-Request-Id") == "" {
					t.Errorf("got status %d, header %v: %s", a.Status, a.Header, a.Body)
				}
				if tt.method == "POST" && tt.path == world.CompletionsPath {
					e, ok := w.Explain(a.Header.Get("X-Request-Id"))
					if !ok || e.ErrorCode == "" || !strings.Contains(a.Body, `"code":"`+e.ErrorCode+`"`) {
						t.Errorf("explain has the code %q of %s", e.ErrorCode, a.Body)
					}
				}
			})
			for _, e := range tt.engines {
				if len(e.Seen()) != 0 {
					t.Error("an engine received a leg")
				}
			}
		})
	}
}
