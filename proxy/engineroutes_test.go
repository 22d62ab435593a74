package proxy_test

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestEngineRoutes: only the listed routes of engines are passed through, only with POST,
// whole to one engine of the model, and without PD fields.
func TestEngineRoutes(t *testing.T) {
	for _, connector := range []string{"none", "sglang", "trtllm"} {
		world.Run(t, connector, func(t *testing.T) {
			answer := func(c *world.Conn, nth int) {
				switch {
				case strings.Contains(c.Leg.Body, `"stream":true`):
					c.Stream("data: {\"a\":1}\n\n", "data: {\"a\":2}\n\n") // without a closing event
				case strings.Contains(c.Leg.Body, `"empty"`):
					c.Send("HTTP/1.1 204 No Content\r\n\r\n")
				default:
					c.Send("HTTP/1.1 201 Created\r\nContent-Type: x/y\r\nContent-Length: 2\r\n\r\n\x00\xff")
				}
			}
			m, n := &world.Engine{Name: "m", Connector: connector, Serve: answer, Ranks: 2}, &world.Engine{Name: "n", Connector: connector, Models: "n", Serve: answer}
			w := newWorld(t, world.Setup{Engines: []*world.Engine{m, n}, Config: func(c *config.Config) {
				c.Server.EngineRoutes = []string{"/generative_scoring", "/v1/chat/completions"}
			}})
			for _, tt := range []struct {
				name, method, path, body string
				status                   int
				answer                   string
			}{
				{"bytes", "POST", "/generative_scoring", `{"model":"m","rid":"x"}`, 201, "\x00\xff"},
				{"a slash and a query", "POST", "/generative_scoring/?a=1&rid=2&model=m", `{}`, 201, "\x00\xff"},
				{"a stream", "POST", "/generative_scoring", `{"model":"m","stream":true}`, 200, "data: {\"a\":1}\n\ndata: {\"a\":2}\n\n"},
				{"nothing", "POST", "/generative_scoring", `{"model":"m","a":"empty"}`, 204, ""},
				{"a form", "POST", "/generative_scoring", "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--", 201, "\x00\xff"},
				{"no model", "POST", "/generative_scoring", `{}`, 400, `"param":"model"`},
				{"unknown model", "POST", "/generative_scoring", `{"model":"o"}`, 404, "model_not_found"},
				{"no JSON", "POST", "/generative_scoring", `[1]`, 400, "invalid_json"},
				{"GET", "GET", "/generative_scoring", "", 405, "method_not_allowed"},
				{"not listed", "POST", "/invocations", `{"model":"m"}`, 404, "not_found"},
				{"below a listed one", "POST", "/generative_scoring/x", `{"model":"m"}`, 404, "not_found"},
				{"beside a listed one", "POST", "/generative_scoring/../sleep", `{"model":"m"}`, 404, "not_found"},
				{"an API that is also listed", "POST", "/v1/chat/completions", `{"model":"m"}`, 400, "'messages' is missing."},
			} {
				before := len(m.Seen())
				contentType := "application/json"
				if tt.name == "a form" {
					contentType = "multipart/form-data; boundary=b"
				}
				a := world.Ask(t.Context(), w.Client, tt.method, "http://proxy"+tt.path, tt.body, "Content-Type", contentType)
				if a.Status != tt.status || !strings.Contains(a.Body, tt.answer) || a.Status >= 400 && !strings.Contains(a.Body, `{"error":{"message":`) {
					t.Errorf("%s: got status %d, %v: %q", tt.name, a.Status, a.Err, a.Body)
				}
				legs := m.Seen()[before:]
				if (len(legs) == 1) != (tt.status < 300) {
					t.Errorf("%s: the engine received %+v", tt.name, legs)
					continue
				}
				if len(legs) == 1 && (legs[0].Path != "/generative_scoring" || strings.Contains(legs[0].Body, "rid") || strings.Contains(legs[0].Body, "rank") ||
					!strings.HasPrefix(contentType, strings.SplitN(legs[0].Header.Get("Content-Type"), ";", 2)[0])) {
					t.Errorf("%s: the engine received %+v", tt.name, legs[0])
				}
			}
			if got := len(n.Seen()); got != 0 {
				t.Errorf("the engine of another model received %d requests", got)
			}
		})
	}
}
