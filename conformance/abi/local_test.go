package abi

import (
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// A guest sends a local response from every allowed phase (row 12).
func TestLocalResponse(t *testing.T) {
	side := startSide(t)
	n := start(t, options{plugins: []config.Plugin{scripted(t, "local", ticking+`
[headers]
request_headers: call proxy_send_local_response 403 "why" "no entry" {x-why=because,content-type=text/plain} -1
request_headers: return 0
delete: say gone
[body]
request_body: call proxy_send_local_response 418 null "teapot" {} -1
delete: say gone
[answer]
response_headers: call proxy_send_local_response 451 null "censored" {x-why=law} -1
delete: say gone
[answer-body]
response_body: call proxy_send_local_response 500 null "late" {} -1
delete: say gone
[held-answer-body]
response_body: eos call proxy_send_local_response 452 null "instead" {} -1
response_body: return 1
delete: say gone
[call]
request_headers: call proxy_http_call "side" {:method=GET,:path=/,:authority=a} null {} 5000 out
request_headers: return 1
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_send_local_response 401 null "asked" {} -1
delete: say gone
[tick]
request_headers: park proxy_send_local_response 429 null "slow down" {} -1
request_headers: return 1
delete: say gone
[twice]
request_headers: call proxy_send_local_response 403 null "first" {} -1
request_headers: call proxy_send_local_response 404 null "second" {} -1
delete: say gone
[log]
log: call proxy_send_local_response 403 null "never" {} -1
delete: say gone
[204]
request_headers: call proxy_send_local_response 204 null "not to be seen" {x-why=empty} -1
delete: say gone
[300]
request_headers: call proxy_send_local_response 300 null null {location=/elsewhere} -1
delete: say gone
[bad]
request_headers: call proxy_send_local_response 7 null "x" {} -1
request_headers: call proxy_send_local_response 1000 null "x" {} -1
delete: say gone
[edited]
request_headers: call proxy_send_local_response 403 null "mine" {} -1
response_headers: call proxy_add_header_map_value 2 "x-own" "1"
delete: say gone
`)}, config: func(c *config.Config) { c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}} }})
	for _, tt := range []struct {
		section string
		status  int
		body    string
		header  string // a header that must exist, with any value
		engine  int    // number of requests that reach the engine
	}{
		{"headers", 403, "no entry", "X-Why", 0},
		{"body", 418, "teapot", "", 0},
		{"answer", 451, "censored", "X-Why", 1},
		{"held-answer-body", 452, "instead", "", 1},
		{"call", 401, "asked", "", 0},
		{"tick", 429, "slow down", "", 0},
		{"twice", 403, "first", "", 0},
		{"log", 200, engineAnswer, "", 1},
		{"204", 204, "", "X-Why", 0},
		{"300", 300, "", "Location", 0},
		{"edited", 403, "mine", "", 0},
	} {
		t.Run(tt.section, func(t *testing.T) {
			n := n.with(t)
			for _, client := range []*http.Client{n.client, h2Client()} {
				client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
				before := len(n.engine.Seen(nil))
				r := n.send(client, tt.section, unary)
				if r.err != nil || r.status != tt.status || r.body != tt.body || tt.header != "" && r.header.Get(tt.header) == "" {
					t.Errorf("got %d %v %q %v", r.status, r.err, r.body, r.header)
				}
				if got := len(n.engine.Seen(nil)) - before; got != tt.engine {
					t.Errorf("the engine got %d requests", got)
				}
				client.CloseIdleConnections()
			}
			n.deleted(tt.section)
		})
	}
	has(t, n.book.said("headers"), "request_headers proxy_send_local_response=0")
	if got := with(n.book.said("log"), "log proxy_send_local_response="); len(got) == 0 || got[0] == "0" {
		t.Errorf("a local response from on_log was accepted: %v", got)
	}
	t.Run("late", func(t *testing.T) {
		// The head may have been sent. Then the reply is rejected, or the
		// answer is visibly cut; the client never gets a mix of both.
		n := n.with(t)
		r := n.send(n.client, "answer-body", strings.Replace(unary, "{", `{"stream":true,`, 1))
		n.deleted("answer-body")
		switch {
		case r.err != nil:
		case r.status == 500 && r.body == "late":
		case r.status == 200 && strings.HasSuffix(r.body, "[DONE]\n\n") && !strings.Contains(r.body, "late"):
		default:
			t.Errorf("got %d %v %q", r.status, r.err, r.body)
		}
	})
	t.Run("bad codes", func(t *testing.T) {
		n := n.with(t)
		r := n.post("bad")
		n.deleted("bad")
		if r.err != nil || r.status != 200 && r.status < 500 {
			t.Errorf("got %d %v %q", r.status, r.err, r.body)
		}
		n.fine(n.post("main"))
	})
}
