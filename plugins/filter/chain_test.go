package filter

import (
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// every is a script that logs every callback.
const every = `
[%]
create: say create
request_headers: say $size $eos
request_body: say $size $eos
request_trailers: say $size
response_headers: say $size $eos
response_body: say $size $eos
response_trailers: say $size
done: say done
log: say log
delete: say delete
`

func TestCallbacksOfAStream(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", strings.ReplaceAll(every, "%", "main")))
	srv := w.serve(echo)
	resp, body := do(t, srv, "main", "hello")
	if resp.StatusCode != 200 || body != "hello" {
		t.Fatalf("got %d %q", resp.StatusCode, body)
	}
	w.log.wait(t, 1, "|delete|")
	got := w.callbacks("f")
	want := []string{
		"create create",
		"request_headers 10 0", // 4 pseudo, x-script, x-request-id, host's own: see below
		"request_body 5 1",
		"response_headers 3 0",
		"response_body 5 0",
		"response_body 0 1",
		"done done", "log log", "delete delete",
	}
	for i := range got {
		if strings.HasPrefix(got[i], "request_headers") {
			got[i] = want[1] // the headers of Go's client do not matter here
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("got  %q\nwant %q", got, want)
	}
}

func TestHeadersReachNextAndClient(t *testing.T) {
	w := newWorld(t)
	change := func(name string) Spec {
		return spec(name, `[s]
request_headers: call proxy_replace_header_map_value 0 ":method" "PUT"
request_headers: call proxy_replace_header_map_value 0 ":path" "/changed?by=`+name+`"
request_headers: call proxy_replace_header_map_value 0 ":authority" "other.example"
request_headers: call proxy_add_header_map_value 0 "X-Trail" "`+name+`"
request_headers: call proxy_remove_header_map_value 0 "user-agent"
request_headers: call proxy_get_header_map_value 0 "x-trail" ret
response_headers: call proxy_add_header_map_value 2 "x-trail" "`+name+`"
response_headers: call proxy_replace_header_map_value 2 ":status" "201"
response_headers: call proxy_remove_header_map_value 2 "x-secret"
log: call proxy_get_header_map_value 0 ":path" ret
log: call proxy_get_header_map_value 2 ":status" ret
log: call proxy_replace_header_map_value 2 ":status" "500"
`)
	}
	w.start(change("one"))
	w.start(change("two"))
	var seen *http.Request
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		seen = r
		rw.Header().Set("X-Secret", "s")
		rw.Write([]byte("ok"))
	})
	resp, _ := do(t, srv, "s", "b")
	if seen.Method != "PUT" || seen.URL.Path != "/changed" || seen.URL.RawQuery != "by=two" || seen.RequestURI != "/changed?by=two" || seen.Host != "other.example" {
		t.Errorf("next saw %s %s %s %s", seen.Method, seen.URL, seen.RequestURI, seen.Host)
	}
	if got := seen.Header["X-Trail"]; !slices.Equal(got, []string{"one", "two"}) {
		t.Errorf("next saw X-Trail %q", got)
	}
	if _, there := seen.Header["User-Agent"]; there {
		t.Error("next saw the removed line")
	}
	if id := seen.Header.Get("X-Request-Id"); len(id) != 32 {
		t.Errorf("next saw the request id %q", id)
	}
	if got := resp.Header["X-Trail"]; resp.StatusCode != 201 || !slices.Equal(got, []string{"two", "one"}) || resp.Header.Get("X-Secret") != "" {
		t.Errorf("client saw %d %v", resp.StatusCode, resp.Header)
	}
	w.log.wait(t, 2, "|log|")
	for _, want := range []string{`proxy_get_header_map_value=0 "one"`, `proxy_get_header_map_value=0 "/changed?by=two"`, `proxy_get_header_map_value=0 "201"`} {
		w.log.wait(t, 1, want)
	}
	// The maps of an ended stream are read-only: BAD_ARGUMENT.
	if got := w.log.wait(t, 2, "|log|"); len(w.log.find("|log|")) < 6 && len(got) == 0 {
		t.Error(got)
	}
	w.log.wait(t, 2, "|proxy_replace_header_map_value=2")
}

func TestInvalidHeadersOfFilters(t *testing.T) {
	for _, tt := range []struct {
		name, line string
		status     int
	}{
		{"no path", `request_headers: call proxy_remove_header_map_value 0 ":path"`, 503},
		{"bad path", `request_headers: call proxy_replace_header_map_value 0 ":path" "no slash"`, 503},
		{"no method", `request_headers: call proxy_remove_header_map_value 0 ":method"`, 503},
		{"no status", `response_headers: call proxy_remove_header_map_value 2 ":status"`, 502},
		{"bad status", `response_headers: call proxy_replace_header_map_value 2 ":status" "abc"`, 502},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.start(spec("f", "[s]\n"+tt.line))
			srv := w.serve(echo)
			if resp, body := do(t, srv, "s", "b"); resp.StatusCode != tt.status || !strings.Contains(body, `"plugin_failed"`) {
				t.Errorf("got %d %s", resp.StatusCode, body)
			}
		})
	}
	t.Run("line end", func(t *testing.T) {
		w := newWorld(t)
		w.start(spec("f", `[s]
response_headers: call proxy_replace_header_map_value 2 "x-a" "b\r\nx-c: d"
response_headers: call proxy_replace_header_map_value 2 "x a" "b"`))
		srv := w.serve(echo)
		if resp, _ := do(t, srv, "s", "b"); resp.StatusCode != 200 || resp.Header.Get("X-A") != "" {
			t.Error(resp.Header)
		}
		w.log.wait(t, 2, "proxy_replace_header_map_value=2")
	})
}

func TestEmptyChainIsNotThere(t *testing.T) {
	var c Chain
	rw := &struct{ http.ResponseWriter }{}
	req := &http.Request{Header: http.Header{}}
	called := false
	h := c.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { called = w == rw && r == req }))
	h.ServeHTTP(rw, req)
	if !called {
		t.Fatal("next did not get the very same request")
	}
	c.Set([]*Plugin{{}}, Limits{})
	if !c.Active.Load() {
		t.Error("a chain with a filter is not active")
	}
	c.Set(nil, Limits{})
	if c.Active.Load() {
		t.Error("an empty chain is active")
	}
	if n := testing.AllocsPerRun(100, func() { h.ServeHTTP(rw, req) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}

func TestBodyPassesUntouchedWithoutBodyCallbacks(t *testing.T) {
	w := newWorld(t)
	s := spec("h", "")
	s.Wasm = guests[headersOnly]
	w.start(s)
	body := struct{ io.ReadCloser }{io.NopCloser(strings.NewReader("abc"))}
	req, _ := http.NewRequest("POST", "/x", nil)
	req.Body, req.ContentLength, req.RequestURI = body, 3, "/x"
	served := false
	w.chain.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		served = true
		if r.Body != io.ReadCloser(body) || r.ContentLength != 3 {
			t.Errorf("got body %T of %d", r.Body, r.ContentLength)
		}
	})).ServeHTTP(httptest.NewRecorder(), req)
	if !served {
		t.Fatal("not served")
	}
}
