package proxy_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// corsLines returns the lines of a header that are for browsers, sorted.
func corsLines(h http.Header) (lines []string) {
	for name, values := range h {
		if strings.HasPrefix(name, "Access-Control-") || name == "Vary" {
			lines = append(lines, name+": "+strings.Join(values, ", "))
		}
	}
	slices.Sort(lines)
	return lines
}

// engineCORS are the lines that vLLM and SGLang add to each answer to a web page.
const engineCORS = "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"

// TestCORS: the configuration alone decides which pages may read answers, whether the proxy,
// an engine or a filter answers.
func TestCORS(t *testing.T) {
	const page, key = "https://chat.example", "Bearer k"
	other := []string{"Vary: Origin"}
	listed := []string{"Access-Control-Allow-Origin: " + page, "Access-Control-Expose-Headers: *", "Vary: Origin"}
	anyPage := []string{"Access-Control-Allow-Origin: *", "Access-Control-Expose-Headers: *"}
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		s := world.Wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/filter":
				w.Header().Set("Access-Control-Allow-Methods", "PUT")
				http.NewResponseController(w).Flush()
			case "/empty":
			default:
				h.ServeHTTP(w, r)
			}
		})
		s.Keys = world.KeyLine("n", "k")
		s.Engines = []*world.Engine{{Serve: func(c *world.Conn, _ int) {
			if strings.Contains(c.Leg.Body, `"stream":true`) {
				c.Send(strings.Replace(world.StreamHead, "\r\n\r\n", "\r\n"+engineCORS+"\r\n", 1))
				c.Chunks(world.EventA, world.Done)
				c.Send("0\r\n\r\n")
				return
			}
			c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" + engineCORS + "\r\n{}")
		}}}
		w, client := start(s)
		for _, tt := range []struct {
			name, origin, key string
			method, path      string
			allowed           []string // server.cors_origins
			body              string
			status            int
			want              []string
		}{
			{"off", page, key, "POST", world.CompletionsPath, nil, world.Completions(false), 200, other},
			{"off, stream", page, key, "POST", world.CompletionsPath, nil, world.Completions(true), 200, other},
			{"no page", "", key, "POST", world.CompletionsPath, []string{"*"}, world.Completions(false), 200, nil},
			{"no page, stream", "", key, "POST", world.CompletionsPath, nil, world.Completions(true), 200, nil},
			{"listed, whole answer", page, key, "POST", world.CompletionsPath, []string{"https://a.example", page}, world.Completions(false), 200, listed},
			{"listed, stream", page, key, "POST", world.CompletionsPath, []string{page}, world.Completions(true), 200, listed},
			{"any", page, key, "POST", world.CompletionsPath, []string{"*"}, world.Completions(false), 200, anyPage},
			{"not listed", "https://evil.example", key, "POST", world.CompletionsPath, []string{page}, world.Completions(false), 200, other},
			{"an error of the proxy", page, key, "POST", world.CompletionsPath, []string{page}, "{", 400, listed},
			{"no key", page, "", "GET", "/v1/models", []string{page}, "", 401, listed},
			{"models", page, key, "GET", "/v1/models", []string{page}, "", 200, listed},
			{"health", page, "", "GET", "/health", []string{page}, "", 200, listed},
			{"the answer of a filter", page, "", "GET", "/filter", []string{page}, "", 200, listed},
			{"an empty answer", page, "", "GET", "/empty", []string{page}, "", 200, listed},
			{"OPTIONS without a question", page, key, "OPTIONS", world.CompletionsPath, []string{page}, "", 405, listed},
		} {
			cfg := *w.Config
			cfg.Server.CORSOrigins = tt.allowed
			w.Reload(&cfg, w.Keys)
			header := []string{"Content-Type", "application/json"}
			if tt.origin != "" {
				header = append(header, "Origin", tt.origin)
			}
			if tt.key != "" {
				header = append(header, "Authorization", tt.key)
			}
			a := world.Ask(t.Context(), client, tt.method, "http://proxy"+tt.path, tt.body, header...)
			if got := corsLines(a.Header); a.Status != tt.status || a.Err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("%s: got status %d, error %v, lines %q, want %q", tt.name, a.Status, a.Err, got, tt.want)
			}
			if strings.Contains(tt.body, `"stream":true`) && a.Body != world.EventA+world.Done {
				t.Errorf("%s: got the stream %q", tt.name, a.Body)
			}
		}
	})
}

// TestPreflight: the proxy answers preflight requests itself, without a key and before
// filters, on each path.
func TestPreflight(t *testing.T) {
	const page = "https://chat.example"
	synctest.Test(t, func(t *testing.T) {
		s := world.Wrapped(func(_ http.Handler, _ http.ResponseWriter, r *http.Request) {
			t.Errorf("a filter sees %s %s", r.Method, r.URL.Path)
		})
		s.Keys = world.KeyLine("n", "k")
		s.Config = func(c *config.Config) { c.Server.CORSOrigins = []string{page} }
		w := newWorld(t, s)
		preflight := func(path, origin string) *http.Response {
			r := httptest.NewRequestWithContext(t.Context(), "OPTIONS", path, nil)
			r.Header.Set("Origin", origin)
			r.Header.Set("Access-Control-Request-Method", "POST")
			r.Header.Set("Access-Control-Request-Headers", "authorization,x-stainless-os")
			answer := httptest.NewRecorder()
			w.Handler().ServeHTTP(answer, r)
			return answer.Result()
		}
		for _, path := range []string{world.CompletionsPath, "/v1/models", "/health", "/nowhere"} {
			resp := preflight(path, page)
			want := []string{
				"Access-Control-Allow-Headers: authorization,x-stainless-os", "Access-Control-Allow-Methods: GET, HEAD, POST, DELETE",
				"Access-Control-Allow-Origin: " + page, "Access-Control-Max-Age: 600", "Vary: Origin, Access-Control-Request-Headers",
			}
			if got := corsLines(resp.Header); resp.StatusCode != 204 || !slices.Equal(got, want) || resp.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s: got status %d, header %v", path, resp.StatusCode, resp.Header)
			}
		}
		for _, origin := range []string{"https://evil.example", "null", page + ".evil.example", "http://chat.example", ""} {
			resp := preflight(world.CompletionsPath, origin)
			if resp.StatusCode != 403 || resp.Header.Get("Access-Control-Allow-Origin") != "" || resp.Header.Get("Content-Type") != "application/json" {
				t.Errorf("origin %q: got status %d, header %v", origin, resp.StatusCode, resp.Header)
			}
		}
	})
}

// TestForeignPage: without API keys, a page of another origin cannot make the proxy send anything
// to an engine, whatever the body's type. Pages with the address of the proxy, listed pages, and
// programs go on working.
func TestForeignPage(t *testing.T) {
	const form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--"
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w, client := start(world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
			c.Server.EngineRoutes, c.Server.CORSOrigins = []string{"/own"}, []string{"https://listed.example"}
		}})
		const page, multipart, audio = "https://chat.example", "multipart/form-data; boundary=b", "/v1/audio/transcriptions"
		check := func(name, origin, contentType, method, path string, status int) {
			t.Helper()
			header, body := []string{"Authorization", "Bearer k"}, world.Completions(false)
			for line, value := range map[string]string{"Origin": origin, "Content-Type": contentType} {
				if value != "" {
					header = append(header, line, value)
				}
			}
			if contentType == multipart {
				body = form
			}
			before := len(e.Seen())
			a := world.Ask(t.Context(), client, method, "http://proxy"+path, body, header...)
			if a.Status != status || a.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s: got %d %s, want %d", name, a.Status, a.Body, status)
			}
			if n := len(e.Seen()) - before; status >= 400 && n != 0 {
				t.Errorf("%s: the engine received %d requests", name, n)
			}
		}
		for _, tt := range []struct {
			name, origin, contentType, method, path string
			status                                  int
		}{
			{"a program", "", "application/json", "POST", world.CompletionsPath, 200},
			{"a program without a type", "", "", "POST", world.CompletionsPath, 200},
			{"a type with a parameter", "", "Application/JSON ; charset=utf-8", "POST", world.CompletionsPath, 200},
			{"a type of JSON", "", "application/vnd.own+json", "POST", world.CompletionsPath, 200},
			{"a type of curl", "", "application/x-www-form-urlencoded", "POST", world.CompletionsPath, 415},
			{"text", "", "text/plain;charset=UTF-8", "POST", world.CompletionsPath, 415},
			{"text that names JSON", "", "text/plain; application/json", "POST", world.CompletionsPath, 415},
			{"a form in place of JSON", "", multipart, "POST", world.CompletionsPath, 415},
			{"a form", "", multipart, "POST", audio, 200},
			{"a form on a listed route", "", multipart, "POST", "/own", 200},
			{"text in place of a form", "", "text/plain", "POST", audio, 415},
			{"another page", page, "application/json", "POST", world.CompletionsPath, 403},
			{"another page, text", page, "text/plain", "POST", world.CompletionsPath, 403},
			{"another page, form", page, multipart, "POST", audio, 403},
			{"another page, no type", page, "", "POST", world.CompletionsPath, 403},
			{"another page, cancel", page, "", "POST", "/v1/responses/resp_a/cancel", 403},
			{"another page, delete", page, "", "DELETE", "/v1/responses/resp_a", 403},
			{"another page reads", page, "", "GET", "/v1/models", 200},
			{"a page without an origin", "null", "application/json", "POST", world.CompletionsPath, 403},
			{"another port", "http://proxy:81", "application/json", "POST", world.CompletionsPath, 403},
			{"a longer name", "http://proxy.evil.example", "application/json", "POST", world.CompletionsPath, 403},
			{"the same address", "http://proxy", "application/json", "POST", world.CompletionsPath, 200},
			{"the same address with its port", "http://PROXY:80", "application/json", "POST", world.CompletionsPath, 200},
			{"the same address, text", "http://proxy", "text/plain", "POST", world.CompletionsPath, 415},
			{"the same address, no type", "http://proxy", "", "POST", world.CompletionsPath, 415},
			{"the listed page", "https://listed.example", "application/json", "POST", world.CompletionsPath, 200},
		} {
			check(tt.name, tt.origin, tt.contentType, tt.method, tt.path, tt.status)
		}
		keys, err := admission.ParseKeys([]byte(world.KeyLine("n", "k")))
		if err != nil {
			t.Fatal(err)
		}
		w.Reload(w.Config, keys)
		check("another page with the key of its user", page, "application/json", "POST", world.CompletionsPath, 200)
		check("another page with a key, text", page, "text/plain", "POST", world.CompletionsPath, 415)
		check("another page with a key, no type", page, "", "POST", world.CompletionsPath, 415)
	})
}

// TestOwnPage: a page has the address of the proxy if the whole origin is that of the request, and
// no owner of a public name can have made the name lead to the proxy.
func TestOwnPage(t *testing.T) {
	for _, tt := range []struct {
		origin, host string
		want         bool
	}{
		{"http://127.0.0.1:8080", "127.0.0.1:8080", true},
		{"http://[::1]:8080", "[::1]:8080", true},
		{"http://localhost:8080", "localhost:8080", true},
		{"http://gpu-box", "gpu-box", true},
		{"https://chat.example.org", "chat.example.org", true},
		{"https://chat.example.org", "chat.example.org:443", true},
		{"https://chat.example.org:8443", "chat.example.org:8443", true},
		{"http://rebound.example", "rebound.example", false},
		{"http://rebound.example:8080", "rebound.example:8080", false},
		{"http://127.0.0.1:3000", "127.0.0.1:8080", false},
		{"http://localhost:8080", "127.0.0.1:8080", false},
		{"https://chat.example.org", "example.org", false},
		{"https://chat.example.org", "chat.example.org:80", false},
		{"https://x@chat.example.org", "chat.example.org", false},
		{"ftp://gpu-box", "gpu-box", false},
		{"http://", "", false},
		{"gpu-box", "gpu-box", false},
		{"null", "null", false},
		{"", "", false},
	} {
		r := &http.Request{Host: tt.host, Header: http.Header{"Origin": {tt.origin}}}
		if got := proxy.OwnPage(r); got != tt.want {
			t.Errorf("%s at %s: got %t", tt.origin, tt.host, got)
		}
	}
}
