package proxy

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
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
	engines := []string{"Access-Control-Allow-Credentials: true", "Access-Control-Allow-Origin: *"}
	listed := []string{"Access-Control-Allow-Origin: " + page, "Access-Control-Expose-Headers: *", "Vary: Origin"}
	anyPage := []string{"Access-Control-Allow-Origin: *", "Access-Control-Expose-Headers: *"}
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		s := wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/filter":
				w.Header().Set("Access-Control-Allow-Methods", "PUT")
				http.NewResponseController(w).Flush()
			case "/empty":
			default:
				h.ServeHTTP(w, r)
			}
		})
		s.keys = keyLine("n", "k")
		s.engines = []*fakeEngine{{serve: func(c *engineConn, _ int) {
			if strings.Contains(c.leg.body, `"stream":true`) {
				c.send(strings.Replace(streamHead, "\r\n\r\n", "\r\n"+engineCORS+"\r\n", 1))
				c.chunks(eventA, done)
				c.send("0\r\n\r\n")
				return
			}
			c.send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" + engineCORS + "\r\n{}")
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
			{"off", page, key, "POST", completionsPath, nil, completions(false), 200, engines},
			{"no page", "", key, "POST", completionsPath, []string{"*"}, completions(false), 200, engines},
			{"listed, whole answer", page, key, "POST", completionsPath, []string{"https://a.example", page}, completions(false), 200, listed},
			{"listed, stream", page, key, "POST", completionsPath, []string{page}, completions(true), 200, listed},
			{"any", page, key, "POST", completionsPath, []string{"*"}, completions(false), 200, anyPage},
			{"not listed", "https://evil.example", key, "POST", completionsPath, []string{page}, completions(false), 200, []string{"Vary: Origin"}},
			{"an error of the proxy", page, key, "POST", completionsPath, []string{page}, "{", 400, listed},
			{"no key", page, "", "GET", "/v1/models", []string{page}, "", 401, listed},
			{"models", page, key, "GET", "/v1/models", []string{page}, "", 200, listed},
			{"health", page, "", "GET", "/health", []string{page}, "", 200, listed},
			{"the answer of a filter", page, "", "GET", "/filter", []string{page}, "", 200, listed},
			{"an empty answer", page, "", "GET", "/empty", []string{page}, "", 200, listed},
			{"OPTIONS without a question", page, key, "OPTIONS", completionsPath, []string{page}, "", 405, listed},
		} {
			cfg := *w.cfg.Load()
			cfg.Server.CORSOrigins = tt.allowed
			w.Reload(&cfg, w.keys.Load())
			header := []string{}
			if tt.origin != "" {
				header = append(header, "Origin", tt.origin)
			}
			if tt.key != "" {
				header = append(header, "Authorization", tt.key)
			}
			a := ask(t.Context(), client, tt.method, "http://proxy"+tt.path, tt.body, header...)
			if got := corsLines(a.header); a.status != tt.status || a.err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("%s: got status %d, error %v, lines %q, want %q", tt.name, a.status, a.err, got, tt.want)
			}
			if strings.Contains(tt.body, `"stream":true`) && a.body != eventA+done {
				t.Errorf("%s: got the stream %q", tt.name, a.body)
			}
		}
	})
}

// TestPreflight: the proxy answers preflight requests itself, without a key and before
// filters, on each path.
func TestPreflight(t *testing.T) {
	const page = "https://chat.example"
	synctest.Test(t, func(t *testing.T) {
		s := wrapped(func(_ http.Handler, _ http.ResponseWriter, r *http.Request) {
			t.Errorf("a filter sees %s %s", r.Method, r.URL.Path)
		})
		s.keys = keyLine("n", "k")
		s.config = func(c *config.Config) { c.Server.CORSOrigins = []string{page} }
		w := newWorld(t, s)
		preflight := func(path, origin string) *http.Response {
			r := httptest.NewRequestWithContext(t.Context(), "OPTIONS", path, nil)
			r.Header.Set("Origin", origin)
			r.Header.Set("Access-Control-Request-Method", "POST")
			r.Header.Set("Access-Control-Request-Headers", "authorization,x-stainless-os")
			answer := httptest.NewRecorder()
			w.handler().ServeHTTP(answer, r)
			return answer.Result()
		}
		for _, path := range []string{completionsPath, "/v1/models", "/health", "/nowhere"} {
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
			resp := preflight(completionsPath, origin)
			if resp.StatusCode != 403 || resp.Header.Get("Access-Control-Allow-Origin") != "" || resp.Header.Get("Content-Type") != "application/json" {
				t.Errorf("origin %q: got status %d, header %v", origin, resp.StatusCode, resp.Header)
			}
		}
	})
}
