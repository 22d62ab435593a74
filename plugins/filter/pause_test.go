package filter

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// ticking is a script whose guest often resumes paused streams.
const ticking = `
[main]
configure: call proxy_set_tick_period_milliseconds 1
tick: wake
`

// TestPauseAndContinue runs each case as one section of a shared script. The cases
// that need no tick run in a guest without ticks.
func TestPauseAndContinue(t *testing.T) {
	park := func(callback, stream string) string {
		return callback + ": park proxy_continue_stream " + stream + "\n" + callback + ": say $size\n" + callback + ": return 1\n"
	}
	at := func(callback, stream string) string {
		return callback + ": return 1\n" + callback + ": call proxy_continue_stream " + stream + "\n"
	}
	type section struct{ name, script string }
	for _, tt := range []struct {
		name, main string
		sections   []section
	}{
		{"from a tick", ticking, []section{
			{"request headers", park("request_headers", "0")},
			{"request body", park("request_body", "0")},
			{"request trailers", park("request_trailers", "0")},
			{"response headers", park("response_headers", "1")},
			{"response body", park("response_body", "1")},
			{"response trailers", park("response_trailers", "1")},
		}},
		{"at once", "", []section{
			{"request headers", at("request_headers", "0")},
			{"request body", at("request_body", "0")},
			{"response headers", at("response_headers", "1")},
			{"response body", at("response_body", "1")},
			{"continue without a pause", "request_headers: call proxy_continue_stream 0\nrequest_body: call proxy_continue_stream 1\nresponse_body: call proxy_continue_stream 0\n"},
		}},
	} {
		for _, hold := range []bool{false, true} {
			w := newWorld(t)
			script := tt.main
			for i, sec := range tt.sections {
				script += fmt.Sprintf("[s%d]\n%s", i, sec.script)
			}
			s := spec("f", script)
			s.HoldHeaders = hold
			w.start(spec("before", ""))
			w.start(s)
			w.start(spec("after", ""))
			srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				rw.Header().Set("Trailer", "X-End")
				rw.Write(b[:3])
				rw.(http.Flusher).Flush()
				rw.Write(b[3:])
				rw.Header().Set("X-End", "e"+r.Trailer.Get("X-Sum"))
			})
			for i, sec := range tt.sections {
				t.Run(fmt.Sprintf("%s, %s, hold %v", sec.name, tt.name, hold), func(t *testing.T) {
					req, _ := http.NewRequest("POST", srv.URL, struct{ io.Reader }{strings.NewReader("hello")})
					req.Header.Set("X-Script", fmt.Sprintf("s%d", i))
					req.Trailer = http.Header{"X-Sum": {"42"}}
					resp, err := srv.Client().Do(req)
					if err != nil {
						t.Fatal(err)
					}
					if got := readAll(t, resp); got != "hello" || resp.Trailer.Get("X-End") != "e42" {
						t.Fatalf("got %q, trailer %v", got, resp.Trailer)
					}
					if tt.main != "" && len(w.log.find(fmt.Sprintf("f: s%d|", i))) == 0 {
						t.Error("the section did not run")
					}
				})
			}
		}
	}
}

func TestHeadersChangedWhilePaused(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", ticking+`[s]
request_headers: park proxy_continue_stream 0
request_headers: park proxy_get_header_map_value 0 ":path" ret
request_headers: return 1
response_headers: call proxy_get_header_map_value 0 ":path" ret`))
	srv := w.serve(echo)
	do(t, srv, "s", "x")
	// After the stream has continued, the map is no longer available: NOT_FOUND.
	w.log.wait(t, 2, `proxy_get_header_map_value=1`)
	w2 := newWorld(t)
	w2.start(spec("f", ticking+`[s]
request_headers: park proxy_replace_header_map_value 0 "x-late" "yes"
request_headers: park proxy_continue_stream 0
request_headers: return 1`))
	srv2 := w2.serve(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Header.Get("X-Late")) })
	if _, got := do(t, srv2, "s", "x"); got != "yes" {
		t.Errorf("got %q", got)
	}
}

// upstream starts a server that plugins may call.
func (w *world) upstream(name string, h http.HandlerFunc) {
	srv := httptest.NewServer(h)
	w.t.Cleanup(srv.Close)
	w.upstreams[name], _ = url.Parse(srv.URL + "/base")
}

const callAuth = `call proxy_http_call "auth" {:method=POST,:path=/check?a=1,:authority=,x-key=k,content-length=999} "ask" {} 5000 out`

func TestCallFromAPausedRequest(t *testing.T) {
	w := newWorld(t)
	var path atomic.Value
	w.upstream("auth", func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		path.Store(fmt.Sprint(r.Method, r.RequestURI, string(b), r.Header.Get("X-Key"), r.ContentLength))
		rw.Header().Set("X-User", "u1")
		rw.WriteHeader(203)
		io.WriteString(rw, "fine")
	})
	w.start(spec("f", `[s]
request_headers: `+callAuth+`
request_headers: return 1
http_call_response: call proxy_get_header_map_value 6 ":status" ret
http_call_response: call proxy_get_header_map_value 6 "x-user" ret
http_call_response: call proxy_get_buffer_bytes 4 0 100 ret
http_call_response: call proxy_set_effective_context $caller
http_call_response: call proxy_replace_header_map_value 0 "x-user" "u1"
http_call_response: call proxy_continue_stream 0`))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Header.Get("X-User")) })
	if resp, got := do(t, srv, "s", "x"); got != "u1" {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	if got := path.Load(); got != "POST/base/check?a=1askk3" {
		t.Errorf("upstream got %q", got)
	}
	w.log.wait(t, 1, `proxy_get_header_map_value=0 "203"`)
	w.log.wait(t, 1, `proxy_get_buffer_bytes=0 "fine"`)
}

func TestCallsThatFail(t *testing.T) {
	w := newWorld(t)
	release := make(chan struct{})
	w.upstream("auth", func(rw http.ResponseWriter, r *http.Request) { <-release })
	w.upstream("other", func(rw http.ResponseWriter, r *http.Request) {})
	defer close(release)
	s := spec("f", `[s]
request_headers: call proxy_http_call "nope" {:method=GET,:path=/,:authority=a} null null 1000 out
request_headers: call proxy_http_call "other" {:method=GET,:path=/,:authority=a} null null 1000 out
request_headers: call proxy_http_call "auth" {:method=GET,:path=/} null null 1000 out
request_headers: call proxy_http_call "auth" {:method=GET,:path=/,:authority=a} null null -1 out
request_headers: call proxy_http_call "auth" {:method=BAD(METHOD,:path=/,:authority=a} null null 10 out
request_headers: call proxy_http_call "auth" {:method=GET,:path=/,:authority=a} null null 20 out
request_headers: return 1
http_call_response: say $id $size
http_call_response: call proxy_get_status out ret
http_call_response: call proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0`)
	s.Upstreams = []string{"auth"}
	w.start(s)
	srv := w.serve(echo)
	if resp, _ := do(t, srv, "s", "x"); resp.StatusCode != 200 {
		t.Errorf("got %d", resp.StatusCode)
	}
	w.log.wait(t, 5, "proxy_http_call=2")
	w.log.wait(t, 1, "http_call_response|1|0 0")
	w.log.wait(t, 1, `proxy_get_status=0 11 "reset"`)
}

func TestAnswerAfterTheStreamEnded(t *testing.T) {
	w := newWorld(t)
	release := make(chan struct{})
	w.upstream("auth", func(rw http.ResponseWriter, r *http.Request) { <-release })
	w.start(spec("f", `[s]
request_headers: `+callAuth+`
[main]
http_call_response: call proxy_get_header_map_value 6 ":status" ret
http_call_response: call proxy_set_effective_context $caller
http_call_response: call proxy_get_header_map_value 0 ":path" ret`))
	srv := w.serve(echo)
	do(t, srv, "s", "x")
	w.waitIdle(0)
	close(release)
	w.log.wait(t, 1, `main|http_call_response|1|proxy_get_header_map_value=0 "200"`)
	w.log.wait(t, 1, `proxy_set_effective_context=2`) // the context has ended: BAD_ARGUMENT
}

// waitIdle waits until no stream uses plugin i: its contexts have ended.
func (w *world) waitIdle(i int) {
	w.t.Helper()
	p := w.plugins[i]
	for {
		p.mu.Lock()
		users := p.users
		p.mu.Unlock()
		if users == 0 {
			return
		}
		w.t.Helper()
		<-nap()
	}
}

func TestClientLeavesAPausedStream(t *testing.T) {
	for _, tt := range []struct{ name, script string }{
		{"request headers", "request_headers: return 1"},
		{"request body", "request_body: return 1"},
		{"response headers", "response_headers: return 1"},
		{"response body", "response_body: return 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.start(spec("f", "[s]\n"+tt.script+"\n"+strings.Split(tt.script, ":")[0]+`: say paused`+"\ndelete: say $live"))
			srv := w.serve(echo)
			ctx, cancel := context.WithCancel(t.Context())
			req, _ := http.NewRequestWithContext(ctx, "POST", srv.URL, strings.NewReader("hello"))
			req.Header.Set("X-Script", "s")
			failed := make(chan error)
			go func() {
				_, err := srv.Client().Do(req)
				failed <- err
			}()
			w.log.wait(t, 1, "|paused")
			cancel()
			<-failed
			w.log.wait(t, 1, "|delete|2|0")
			w.waitIdle(0)
		})
	}
}

// events writes events to a stream when the test sends them.
func events(lines <-chan string) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		rw.Header().Set("Content-Type", "text/event-stream")
		rw.WriteHeader(200)
		rc := http.NewResponseController(rw)
		if err := rc.Flush(); err != nil {
			return
		}
		for {
			var line string
			var more bool
			select {
			case line, more = <-lines:
			case <-r.Context().Done(): // the proxy returns then, too
			}
			if !more {
				return
			}
			if _, err := io.WriteString(rw, line); err != nil {
				return
			}
			if err := rc.Flush(); err != nil {
				return
			}
		}
	}
}

func TestEventsComeThroughOneByOne(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
response_body: say $size $eos
response_body: 2 call proxy_set_buffer_bytes 1 0 0 "+"`))
	lines := make(chan string)
	srv := w.serve(events(lines))
	req, _ := http.NewRequest("POST", srv.URL, strings.NewReader("hello"))
	req.Header.Set("X-Script", "s")
	resp, err := srv.Client().Do(req) // the head arrives before any event
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	for i, want := range []string{"data: 0\n", "+data: 1\n", "data: 2\n"} {
		lines <- fmt.Sprintf("data: %d\n", i)
		if got, err := in.ReadString('\n'); got != want || err != nil {
			t.Fatalf("got %q %v", got, err)
		}
	}
	close(lines)
	if rest, err := io.ReadAll(in); len(rest) > 0 || err != nil {
		t.Fatalf("got %q %v", rest, err)
	}
	if got := w.callbacks("f"); !slices.Equal(got, []string{"response_body 8 0", "response_body 8 0", "response_body proxy_set_buffer_bytes=0", "response_body 8 0", "response_body 0 1"}) {
		t.Errorf("got %q", got)
	}
}

// TestHeldEventGoesOnWhileTheEngineIsSilent: the guest releases the event while
// no handler writes.
func TestHeldEventGoesOnWhileTheEngineIsSilent(t *testing.T) {
	for _, callback := range []string{"response_headers", "response_body"} {
		t.Run(callback, func(t *testing.T) {
			w := newWorld(t)
			w.start(spec("f", ticking+"[s]\n"+callback+": park proxy_continue_stream 1\n"+callback+": 1 return 1"))
			lines := make(chan string)
			srv := w.serve(events(lines))
			req, _ := http.NewRequest("POST", srv.URL, strings.NewReader("hello"))
			req.Header.Set("X-Script", "s")
			answer := make(chan *http.Response, 1)
			go func() {
				resp, err := srv.Client().Do(req)
				if err != nil {
					t.Error(err)
				}
				answer <- resp
			}()
			lines <- "data: 0\n"
			resp := <-answer
			defer resp.Body.Close()
			if got, err := bufio.NewReader(resp.Body).ReadString('\n'); got != "data: 0\n" || err != nil {
				t.Fatalf("got %q %v", got, err)
			}
			close(lines)
		})
	}
}
