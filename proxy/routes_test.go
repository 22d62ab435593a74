package proxy_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// The endpoints without generation.
func TestPlainEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now().Unix() // simulated time
		w := newWorld(t, world.Setup{Keys: world.KeyLine("n", "k"), Engines: []*world.Engine{
			{Models: "a,b/c,d/", Cards: `"root":"/weights/a","parent":"base","max_model_len":4096`},
			{Name: "f", Models: "a", Cards: `"root":"/weights/other","max_model_len":1024`},
		}})
		get := func(path string) string {
			a := world.Ask(t.Context(), w.Client, "GET", "http://proxy"+path, "", "Authorization", "Bearer k")
			return fmt.Sprintf("%d %s", a.Status, strings.TrimSpace(a.Body))
		}
		row := func(id string) string {
			return fmt.Sprintf(`{"id":%q,"object":"model","created":%d,"owned_by":"pdproxy"}`, id, started)
		}
		cards := strings.Replace(row("a"), "}", `,"root":"/weights/a","parent":"base","max_model_len":1024}`, 1)
		list := `200 {"object":"list","data":[` + cards + "," + row("b/c") + "," + row("d/") + `]}`
		for path, want := range map[string]string{
			"/v1/models":       list,
			"/v1/models/":      list,
			"/v1/models/a":     "200 " + cards,
			"/v1/models/b/c":   "200 " + row("b/c"),
			"/v1/models/b/c/":  "200 " + row("b/c"),
			"/v1/models/b%2Fc": "200 " + row("b/c"),
			"/v1/models/d/":    "200 " + row("d/"),
			"/v1/models/x":     `404 {"error":{"message":"the model \"x\" does not exist; the engines serve a, b/c, d/","type":"invalid_request_error","param":"model","code":"model_not_found"}}`,
			"/health":          `200 {"status":"ok"}`,
			"/health/":         `200 {"status":"ok"}`,
			"/version":         `200 {"version":"1.2.3"}`,
			"/version/":        `200 {"version":"1.2.3"}`,
		} {
			if got := get(path); got != want {
				t.Errorf("%s: %s, want %s", path, got, want)
			}
		}
		if a := w.Get("/v1/models"); a.Status != 401 {
			t.Errorf("without a key: got status %d", a.Status)
		}
		if a := world.Ask(t.Context(), w.Client, "HEAD", "http://proxy/health", ""); a.Status != 200 || a.Body != "" {
			t.Errorf("HEAD: %+v", a)
		}
	})
}

// TestOtherRoutes: a compressed body, a slash at the end of the path, and a web page work on each
// route as they do for chats.
func TestOtherRoutes(t *testing.T) {
	const page = "https://chat.example"
	const form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\x00\xff\r\n--b--\r\n"
	listed := []string{"Access-Control-Allow-Origin: " + page, "Access-Control-Expose-Headers: *", "Vary: Origin"}
	synctest.Test(t, func(t *testing.T) {
		stored := world.Holding("resp_a")
		e := &world.Engine{Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
			if c.Leg.Method == "POST" {
				c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" + engineCORS + "\r\n{}")
				return
			}
			stored(c, nth)
		}}
		w := newWorld(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
			c.Server.EngineRoutes, c.Server.CORSOrigins = []string{"/generative_scoring"}, []string{page}
		}})
		for _, tt := range []struct{ method, path, kind, body string }{
			{"POST", "/generative_scoring", "application/json", `{"model":"m"}`},
			{"POST", "/generative_scoring", "multipart/form-data; boundary=b", form},
			{"POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=b", form},
			{"POST", "/v1/audio/translations", "multipart/form-data; boundary=b", form},
			{"POST", "/v1/audio/speech", "application/json", `{"model":"m","input":"x"}`},
			{"POST", "/v1/images/generations", "application/json", `{"model":"m","prompt":"x"}`},
			{"POST", "/v1/images/edits", "multipart/form-data; boundary=b", form},
			{"POST", "/rerank", "application/json", `{"model":"m","query":"x","documents":["y"]}`},
			{"POST", "/score", "application/json", `{"model":"m","text_1":"x","text_2":"y"}`},
			{"POST", "/pooling", "application/json", `{"model":"m","input":"x"}`},
			{"GET", "/v1/responses/resp_a", "", ""},
			{"DELETE", "/v1/responses/resp_a", "", ""},
		} {
			for _, coding := range []struct{ name, body string }{{"", tt.body}, {"gzip", proxytest.Gzipped(tt.body)}, {"zstd", proxytest.Zstd(t, tt.body)}} {
				if coding.name != "" && tt.body == "" {
					continue
				}
				for _, slash := range []string{"", "/"} {
					name := tt.method + " " + tt.path + slash + " " + coding.name
					header := []string{"Origin", page}
					if tt.kind != "" {
						header = append(header, "Content-Type", tt.kind)
					}
					if coding.name != "" {
						header = append(header, "Content-Encoding", coding.name)
					}
					a := world.Ask(t.Context(), w.Client, tt.method, "http://proxy"+tt.path+slash, coding.body, header...)
					if got := corsLines(a.Header); a.Status != 200 || !slices.Equal(got, listed) {
						t.Errorf("%s: got status %d, %v, lines %q: %s", name, a.Status, a.Err, got, a.Body)
						continue
					}
					legs := e.Seen()
					leg := legs[len(legs)-1]
					if leg.Method != tt.method || leg.Path != tt.path || leg.Body != tt.body || leg.Header.Get("Content-Encoding") != "" {
						t.Errorf("%s: the engine received %s %s, coding %q, %d bytes", name, leg.Method, leg.Path, leg.Header.Get("Content-Encoding"), len(leg.Body))
					}
				}
			}
			preflight := world.Ask(t.Context(), w.Client, "OPTIONS", "http://proxy"+tt.path+"/", "", "Origin", page, "Access-Control-Request-Method", tt.method)
			if preflight.Status != 204 || preflight.Header.Get("Access-Control-Allow-Origin") != page {
				t.Errorf("preflight for %s: got %+v", tt.path, preflight)
			}
		}
		for _, tt := range []struct {
			name, path, coding, body string
			status                   int
		}{
			{"a broken coding", "/rerank", "gzip", "no", 400},
			{"an unknown coding", "/v1/images/generations", "br", "no", 415},
			{"a broken coding of a form", "/v1/audio/transcriptions", "zstd", form, 400},
		} {
			contentType := "application/json"
			if tt.body == form {
				contentType = "multipart/form-data; boundary=b"
			}
			a := world.Ask(t.Context(), w.Client, "POST", "http://proxy"+tt.path, tt.body, "Content-Type", contentType, "Content-Encoding", tt.coding)
			if a.Status != tt.status {
				t.Errorf("%s: got %+v", tt.name, a)
			}
		}
	})
}

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

// TestHealthAwaitsFirstProbes: the proxy is not ready before every engine has been looked at, also
// if requests may wait for engines.
func TestHealthAwaitsFirstProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := world.Answering("e", "m")
		late := engine.New(engine.Options{
			Health: config.Default().Health, Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
			NewClient: func(config.Engine) (upstream.Client, error) { return upstream.New(upstream.Options{}), nil },
			NewProbe:  func(config.Engine) (http.RoundTripper, error) { return world.Probes{e.Host(): e}, nil },
			Log:       slog.New(slog.DiscardHandler),
		})
		defer late.Close()
		late.Know([]engine.Known{{Model: "m"}})
		if err := late.Apply(engine.SourceStatic, []config.Engine{e.Spec()}, 0); err != nil {
			t.Fatal(err)
		}
		w := newWorld(t, world.Setup{
			Config: func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(time.Minute) },
			Options: func(o *proxy.Options) {
				o.Registry, o.Coordinator = late, coordinator.NewLocal(late, &world.Decider{}, &world.Decider{}, coordinator.State{}, nil, nil)
			},
		})
		proceed := e.Stop()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { late.Run(ctx); close(done) }()
		defer func() { cancel(); <-done }()
		if got := w.Get("/health"); got.Status != 503 {
			t.Errorf("before the first probe: got %d %s", got.Status, got.Body)
		}
		proceed()
		synctest.Wait()
		if got := w.Get("/health"); got.Status != 200 {
			t.Errorf("after the first probe: got %d %s", got.Status, got.Body)
		}
	})
}

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
