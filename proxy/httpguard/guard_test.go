package httpguard

import (
	"bytes"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var (
	loopback = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9090}
	anywhere = &net.TCPAddr{IP: net.IPv6zero, Port: 9090}
	unixSock = &net.UnixAddr{Name: "/run/x", Net: "unix"}
)

// served wraps a handler that answers 204. The int counts the requests that reach the
// handler.
func served(g Guard) (http.Handler, *int) {
	calls := 0
	g.Refuse = func(w http.ResponseWriter, _ *http.Request, status int, text string) { http.Error(w, text, status) }
	return g.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls++
		w.WriteHeader(http.StatusNoContent)
	})), &calls
}

func TestGuard(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	open := Guard{Address: loopback, Types: []string{"application/json"}}
	shut := open
	shut.Token = "secret"
	reads := shut
	reads.Open = func(r *http.Request) bool { return r.Method == "GET" }
	wide := open
	wide.Address, wide.Hosts = anywhere, []string{"Proxy.Example."}
	local := open
	local.Address = unixSock
	pages := open
	pages.Page = func(*http.Request) bool { return true }
	const navigate, document = "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"
	const right, wrong = "Authorization: Bearer secret", "Authorization: Bearer Secret"
	const json = "Content-Type: application/json"
	for _, tt := range []struct {
		name    string
		guard   Guard
		request string // method, host, and "body" or nothing
		lines   []string
		want    int
	}{
		{"plain read", open, "GET 127.0.0.1:9090", nil, 204},
		{"by name", open, "GET LocalHost:9090", nil, 204},
		{"name of the root", open, "GET localhost.:9090", nil, 204},
		{"another loopback address", open, "GET 127.8.0.1", nil, 204},
		{"IPv6", open, "GET [::1]:9090", nil, 204},
		{"mapped", open, "GET [::ffff:127.0.0.1]:9090", nil, 204},
		{"HTTP/1.0 without a Host", open, "GET ", nil, 204},
		{"another port, as through a tunnel", open, "GET localhost:12345", nil, 204},

		{"rebound", open, "GET evil.example:9090", nil, 403},
		{"rebound, without a port", open, "GET evil.example", nil, 403},
		{"rebound below localhost", open, "GET localhost.evil.example:9090", nil, 403},
		{"rebound name that looks like an address", open, "GET 127.0.0.1.evil.example:9090", nil, 403},
		{"rebound by a service of such names", open, "GET 127.0.0.1.nip.io:9090", nil, 403},
		{"user information", open, "GET 127.0.0.1:9090@evil.example", nil, 403},
		{"address of another kind of number", open, "GET 0x7f000001:9090", nil, 403},
		{"every address", open, "GET 0.0.0.0:9090", nil, 403},
		{"address beyond loopback on loopback", open, "GET 10.0.0.1:9090", nil, 403},
		{"address beyond loopback", wide, "GET 10.0.0.1:9090", nil, 204},
		{"configured name", wide, "GET proxy.example:9090", nil, 204},
		{"name of the machine", wide, "GET " + name + ":9090", nil, 204},
		{"other name beyond loopback", wide, "GET evil.example:9090", nil, 403},
		{"any name with the token", shut, "GET proxy.svc.cluster.local:9090", []string{right}, 204},
		{"any name with a wrong token", shut, "GET proxy.svc.cluster.local:9090", []string{wrong}, 403},
		{"any name at a Unix socket", local, "GET whatever", nil, 204},

		{"page of another site", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site"}, 403},
		{"page of another port", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: same-site"}, 403},
		{"own page", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: same-origin"}, 204},
		{"typed by the user", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: none"}, 204},
		{"two marks", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: none", "Sec-Fetch-Site: cross-site"}, 403},
		{"unknown mark", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: Same-Origin"}, 403},
		{"own page changes", shut, "POST 127.0.0.1:9090 body", []string{"Origin: http://127.0.0.1:9090", "Sec-Fetch-Site: same-origin", right, json}, 204},
		{"own page behind TLS", shut, "POST dash.example body", []string{"Origin: https://dash.example", right, json}, 204},
		{"own page at the default port", open, "POST localhost body", []string{"Origin: http://localhost:80", json}, 204},
		{"foreign Origin", open, "POST 127.0.0.1:9090 body", []string{"Origin: http://evil.example", json}, 403},
		{"foreign Origin and the token", shut, "POST 127.0.0.1:9090 body", []string{"Origin: http://evil.example", right, json}, 403},
		{"Origin of another port", open, "POST 127.0.0.1:9090 body", []string{"Origin: http://127.0.0.1:3000", json}, 403},
		{"Origin of another name", open, "POST 127.0.0.1:9090 body", []string{"Origin: http://localhost:9090", json}, 403},
		{"Origin of a sandbox or a file", open, "POST 127.0.0.1:9090 body", []string{"Origin: null", json}, 403},
		{"Origin of an extension", open, "POST 127.0.0.1:9090 body", []string{"Origin: chrome-extension://127.0.0.1:9090", json}, 403},
		{"empty Origin", open, "POST 127.0.0.1:9090 body", []string{"Origin: ", json}, 403},
		{"two Origins", open, "POST 127.0.0.1:9090 body", []string{"Origin: http://127.0.0.1:9090", "Origin: http://evil.example", json}, 403},
		{"Origin with a path", open, "POST 127.0.0.1:9090 body", []string{"Origin: http://127.0.0.1:9090/x", json}, 403},
		{"foreign Origin of a read", open, "GET 127.0.0.1:9090", []string{"Origin: http://evil.example"}, 403},
		{"rebound page that is its own origin", open, "POST evil.example:9090 body", []string{"Origin: http://evil.example:9090", "Sec-Fetch-Site: same-origin", json}, 403},
		{"preflight", open, "OPTIONS 127.0.0.1:9090", []string{"Origin: http://evil.example", "Access-Control-Request-Method: POST", "Access-Control-Request-Private-Network: true"}, 403},

		{"link to a page", pages, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site", navigate, document}, 204},
		{"link to no page", open, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site", navigate, document}, 403},
		{"frame with a page", pages, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site", navigate, "Sec-Fetch-Dest: iframe"}, 403},
		{"script that reads a page", pages, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: empty"}, 403},
		{"part of a page as a script", pages, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: script"}, 403},
		{"page with an unknown value of Sec-Fetch-Site", pages, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site"}, 403},
		{"link with a foreign Origin", pages, "GET 127.0.0.1:9090", []string{"Origin: http://evil.example", "Sec-Fetch-Site: cross-site", navigate, document}, 403},
		{"form to a page", pages, "POST 127.0.0.1:9090 body", []string{"Sec-Fetch-Site: cross-site", navigate, document, json}, 403},
		{"link by a rebound name", pages, "GET evil.example:9090", []string{"Sec-Fetch-Site: cross-site", navigate, document}, 403},
		{"two marks of a link", pages, "GET 127.0.0.1:9090", []string{"Sec-Fetch-Site: cross-site", navigate, document, "Sec-Fetch-Dest: empty"}, 403},

		{"no token", shut, "GET 127.0.0.1:9090", nil, 401},
		{"wrong token", shut, "GET 127.0.0.1:9090", []string{wrong}, 401},
		{"beginning of the token", shut, "GET 127.0.0.1:9090", []string{"Authorization: Bearer secre"}, 401},
		{"empty token", shut, "GET 127.0.0.1:9090", []string{"Authorization: Bearer "}, 401},
		{"another scheme", shut, "GET 127.0.0.1:9090", []string{"Authorization: Basic secret"}, 401},
		{"two tokens", shut, "GET 127.0.0.1:9090", []string{right, wrong}, 401},
		{"token", shut, "GET 127.0.0.1:9090", []string{"Authorization: bearer secret"}, 204},
		{"open read", reads, "GET 127.0.0.1:9090", nil, 204},
		{"open read of a wrong token", reads, "GET 127.0.0.1:9090", []string{wrong}, 204},
		{"rebound open read", reads, "GET evil.example:9090", nil, 403},
		{"change without the token", reads, "DELETE 127.0.0.1:9090", nil, 401},
		{"change without the token, with a body", reads, "POST 127.0.0.1:9090 body", []string{json}, 401},
		{"token in another case of method", reads, "get 127.0.0.1:9090", nil, 401},

		{"JSON", open, "POST 127.0.0.1:9090 body", []string{json}, 204},
		{"JSON with a parameter", open, "POST 127.0.0.1:9090 body", []string{"Content-Type: Application/JSON ; charset=utf-8"}, 204},
		{"plain text", open, "POST 127.0.0.1:9090 body", []string{"Content-Type: text/plain"}, 415},
		{"plain text that names JSON", open, "POST 127.0.0.1:9090 body", []string{"Content-Type: text/plain; application/json"}, 415},
		{"form", open, "POST 127.0.0.1:9090 body", []string{"Content-Type: application/x-www-form-urlencoded"}, 415},
		{"multipart form", open, "PUT 127.0.0.1:9090 body", []string{"Content-Type: multipart/form-data; boundary=application/json"}, 415},
		{"no type", open, "POST 127.0.0.1:9090 body", nil, 415},
		{"two types", open, "POST 127.0.0.1:9090 body", []string{"Content-Type: text/plain", json}, 415},
		{"list of types", open, "POST 127.0.0.1:9090 body", []string{"Content-Type: application/json, text/plain"}, 415},
		{"no body and no type", open, "POST 127.0.0.1:9090", nil, 204},
		{"no body and a form's type", open, "POST 127.0.0.1:9090", []string{"Content-Type: text/plain"}, 204},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, calls := served(tt.guard)
			method, host, _ := strings.Cut(tt.request, " ")
			host, body, _ := strings.Cut(host, " ")
			r := httptest.NewRequest("GET", "/", strings.NewReader(body))
			r.Method, r.Host = method, host
			for _, line := range tt.lines {
				key, value, _ := strings.Cut(line, ": ")
				r.Header.Add(key, value)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != tt.want || (*calls == 1) != (tt.want == 204) {
				t.Errorf("got %d %s, %d calls; want %d", w.Code, strings.TrimSpace(w.Body.String()), *calls, tt.want)
			}
			head := w.Header()
			for key := range head {
				if strings.HasPrefix(key, "Access-Control-") {
					t.Errorf("the answer has %s", key)
				}
			}
			if (head.Get("WWW-Authenticate") == "Bearer") != (tt.want == 401) {
				t.Errorf("WWW-Authenticate is %q", head.Get("WWW-Authenticate"))
			}
			if head.Get("Cross-Origin-Resource-Policy") != "same-origin" || head.Get("X-Content-Type-Options") != "nosniff" || head.Get("Cache-Control") != "no-store" {
				t.Errorf("answered with %v", head)
			}
		})
	}
}

// A body of unknown length is a body.
func TestChunkedBody(t *testing.T) {
	h, calls := served(Guard{Address: loopback, Types: []string{"application/json"}})
	r := httptest.NewRequest("POST", "/", strings.NewReader("{}"))
	r.Host, r.ContentLength = "localhost", -1
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != 415 || *calls != 0 {
		t.Errorf("%d, %d calls", w.Code, *calls)
	}
}

// Repeated refusals of one client cause one log line per minute. The line contains no
// text of the client.
func TestLogIsQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		h, _ := served(Guard{Name: "admin.listen", Address: loopback, Log: slog.New(slog.NewTextHandler(&log, nil))})
		from := func(address string) {
			r := httptest.NewRequest("POST", "/stranger-path", nil)
			r.Host, r.RemoteAddr = "stranger.example", address
			r.Header.Set("Origin", "http://stranger.example")
			h.ServeHTTP(httptest.NewRecorder(), r)
		}
		for port := range 50 {
			from(net.JoinHostPort("10.0.0.1", string(rune('1'+port%9))))
			from("10.0.0.2:1")
		}
		if n := strings.Count(log.String(), "\n"); n != 2 {
			t.Errorf("%d lines for two clients:\n%s", n, log.String())
		}
		time.Sleep(refusalEvery)
		from("10.0.0.1:7")
		if n := strings.Count(log.String(), "\n"); n != 3 {
			t.Errorf("%d lines after a minute:\n%s", n, log.String())
		}
		if strings.Contains(log.String(), "stranger") {
			t.Errorf("the log repeats the request: %s", log.String())
		}
	})
}

// FuzzHost: a name of more than one label is never accepted as a loopback name.
func FuzzHost(f *testing.F) {
	for _, host := range []string{"localhost", "127.0.0.1:80", "[::1]:80", "evil.example", "127.0.0.1.evil.example", "[::1%25lo]", "a:b:c", "::1", "[", "127.1"} {
		f.Add(host, "http://"+host)
	}
	g := Guard{Address: loopback}
	f.Fuzz(func(t *testing.T, host, origin string) {
		r := &http.Request{Host: host, Header: http.Header{"Origin": {origin}}}
		status, _ := g.check(r)
		if status != 0 {
			return
		}
		for _, text := range []string{host, origin} {
			if strings.Contains(strings.ToLower(text), ".example") {
				t.Errorf("Host %q with Origin %q is let through", host, origin)
			}
		}
	})
}
