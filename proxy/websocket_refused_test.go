package proxy_test

import (
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestWebSocketRefused: Codex falls back to POST at once only after 426.
func TestWebSocketRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
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
			a := world.Ask(t.Context(), w.Client, tt.method, "http://proxy"+tt.path, "", header...)
			if a.Status != tt.status || !strings.Contains(a.Body, tt.code) || a.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s %s, upgrade %q: got status %d, %v: %s", tt.method, tt.path, tt.upgrade, a.Status, a.Err, a.Body)
			}
		}
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
			t.Errorf("the next request: %+v", a)
		}
	})
}

// TestWebSocketOtherVersions: a stream of HTTP/2 or HTTP/3 cannot become a WebSocket.
func TestWebSocketOtherVersions(t *testing.T) {
	w := newWorld(t, world.Setup{Sockets: true, Engines: []*world.Engine{{}}})
	for _, major := range []int{2, 3} {
		r := httptest.NewRequest("GET", "/v1/responses", nil)
		r.Header.Set("Upgrade", "websocket")
		r.ProtoMajor, r.ProtoMinor = major, 0
		a := httptest.NewRecorder()
		w.Handler().ServeHTTP(a, r)
		if a.Code != 426 || !strings.Contains(a.Body.String(), `"code":"upgrade_required"`) || a.Header().Get("Upgrade") != "" {
			t.Errorf("HTTP/%d: got %d, %s", major, a.Code, a.Body)
		}
	}
}
