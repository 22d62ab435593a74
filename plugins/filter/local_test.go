package filter

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const deny = `call proxy_send_local_response 403 "details" "denied" {x-why=rule,content-length=99} -1`

func TestLocalResponse(t *testing.T) {
	cases := []struct {
		name, script string
		called       bool // the next handler was called
	}{
		{"request headers", "request_headers: " + deny, false},
		{"request headers, going on", "request_headers: " + deny + "\nrequest_headers: return 0", false},
		{"request headers, paused", "request_headers: " + deny + "\nrequest_headers: return 1", false},
		{"request body", "request_body: " + deny, true},
		{"request body, held", "request_body: !eos return 1\nrequest_body: eos " + deny, true},
		{"response headers", "response_headers: " + deny, true},
		{"from a tick, request", "request_headers: park " + deny[5:] + "\nrequest_headers: return 1", false},
		{"from a tick, response", "response_headers: park " + deny[5:] + "\nresponse_headers: return 1", true},
		{"call response", "request_headers: " + callAuth + "\nrequest_headers: return 1\nhttp_call_response: call proxy_set_effective_context $caller\nhttp_call_response: " + deny, false},
	}
	// Each case is one section of the scripts of three shared guests.
	var before, script, after string
	for i, tt := range cases {
		section := fmt.Sprintf("[s%d]\n", i)
		before += section + "response_headers: call proxy_add_header_map_value 2 \"x-before\" \"1\"\nresponse_body: say $size $eos\n"
		script += section + tt.script + "\n"
		after += section + "request_headers: say seen\n"
	}
	w := newWorld(t)
	w.upstream("auth", func(http.ResponseWriter, *http.Request) {})
	w.start(spec("before", before))
	w.start(spec("f", ticking+script))
	w.start(spec("after", after))
	called := make(chan bool, 1)
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		called <- true
		echo(rw, r)
	})
	for i, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			resp, body := do(t, srv, fmt.Sprintf("s%d", i), "hello")
			if resp.StatusCode != 403 || body != "denied" || resp.ContentLength > 0 && resp.ContentLength != 6 ||
				resp.Header.Get("X-Why") != "rule" || resp.Header.Get("Content-Type") != "text/plain" || len(resp.Header.Get("X-Request-Id")) != 32 {
				t.Errorf("got %d %q %v", resp.StatusCode, body, resp.Header)
			}
			if len(called) == 1 != tt.called {
				t.Errorf("next was called: %v", !tt.called)
			}
			if tt.called {
				<-called
			}
			// A reply that replaces a begun answer goes directly to the client.
			// Any other reply passes the filters that have seen the request.
			direct := strings.Contains(tt.name, "response") && !strings.Contains(tt.name, "call")
			if got := resp.Header.Get("X-Before"); got == "1" == direct {
				t.Errorf("the filter before saw the reply: %q", got)
			}
			if !tt.called && len(w.log.find(fmt.Sprintf("after: s%d|request_headers", i))) > 0 {
				t.Error("the filter after saw the request")
			}
			w.waitIdle(0)
			w.waitIdle(1)
			w.waitIdle(2)
		})
	}
}

func TestLocalResponsePassesItsOwnFilter(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
request_headers: `+deny+`
request_headers: `+deny+`
response_headers: say $eos
response_headers: call proxy_get_property "response\x00code_details" ret
response_headers: `+deny+`
response_body: call proxy_get_buffer_bytes 1 0 100 ret
response_body: call proxy_set_buffer_bytes 1 0 0 "really "
log: `+deny))
	srv := w.serve(echo)
	resp, body := do(t, srv, "s", "hello")
	if resp.StatusCode != 403 || body != "really denied" || resp.ContentLength != 13 {
		t.Errorf("got %d %q %d", resp.StatusCode, body, resp.ContentLength)
	}
	w.log.wait(t, 1, "|log|")
	want := []string{
		"request_headers proxy_send_local_response=0", "request_headers proxy_send_local_response=2",
		"response_headers 0", `response_headers proxy_get_property=0 "details"`, "response_headers proxy_send_local_response=2",
		`response_body proxy_get_buffer_bytes=0 "denied"`, "response_body proxy_set_buffer_bytes=0",
		"log proxy_send_local_response=2",
	}
	if got := w.callbacks("f"); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestLocalResponseToAChunkBeforeTheHead(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", "[s]\nresponse_body: "+deny+"\n[bad]\nrequest_headers: call proxy_send_local_response 99 null null {} -1\nrequest_headers: call proxy_send_local_response 700 null null {} -1"))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, "one")
		http.NewResponseController(rw).Flush()
		io.WriteString(rw, "two")
	})
	// The guest sees the first chunk before the head is sent.
	if resp, body := do(t, srv, "s", ""); resp.StatusCode != 403 || body != "denied" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	if resp, body := do(t, srv, "bad", ""); resp.StatusCode != 200 {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	w.log.wait(t, 2, "bad|request_headers|3|proxy_send_local_response=2")
}

// TestLateLocalResponseCutsTheStream: the client has received a head when the guest
// answers. The client must not see a regular end of the answer, with any protocol, whether
// the answer has a length or not, and from every callback.
func TestLateLocalResponseCutsTheStream(t *testing.T) {
	w := newWorld(t)
	w.upstream("auth", func(http.ResponseWriter, *http.Request) {})
	w.start(spec("f", ticking+`
[body]
response_body: 2 `+deny+`
[held body]
response_body: 2 return 1
response_body: eos `+deny+`
[end]
response_body: eos `+deny+`
[trailers]
response_trailers: `+deny+`
[tick]
response_body: 2 park `+deny[5:]+`
[paused]
response_body: 2 park `+deny[5:]+`
response_body: 2 return 1
response_body: 3 return 1
[call]
response_body: 2 `+callAuth+`
http_call_response: call proxy_set_effective_context $caller
http_call_response: `+deny+`
[request body]
request_body: 2 `+deny+`
[twice]
response_body: 2 `+deny+`
response_body: 2 `+deny+`
`))
	handler := duplex(w.chain.Wrap(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("length") {
			rw.Header().Set("Content-Length", "6")
		}
		section := r.Header.Get("X-Script")
		if section == "request body" { // the second part comes after "one", and so is a second callback
			io.ReadFull(r.Body, make([]byte, len("first")))
		}
		io.WriteString(rw, "one")
		http.NewResponseController(rw).Flush()
		switch section {
		case "tick", "call":
			io.WriteString(rw, "two")
			http.NewResponseController(rw).Flush()
			<-r.Context().Done()
		case "request body":
			io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		case "trailers":
			io.WriteString(rw, "two")
			rw.Header().Set(http.TrailerPrefix+"X-Sum", "42")
		default:
			io.WriteString(rw, "two")
		}
	})))
	plain := w.serveAs(handler)
	secure := httptest.NewUnstartedServer(handler)
	secure.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	secure.EnableHTTP2 = true
	secure.StartTLS()
	t.Cleanup(secure.Close)
	for _, srv := range []*httptest.Server{plain, secure} {
		for _, query := range []string{"", "?length"} {
			sections := []string{"body", "held body", "end", "trailers", "tick", "paused", "call", "request body", "twice"}
			if query != "" {
				sections = slices.DeleteFunc(sections, func(s string) bool { return s == "trailers" }) // an answer with a length has none
			}
			for _, section := range sections {
				t.Run(fmt.Sprint(srv == secure, query, section), func(t *testing.T) {
					body, send := io.Pipe()
					defer send.Close()
					req, _ := http.NewRequest("POST", srv.URL+query, body)
					req.Header.Set("X-Script", section)
					go io.WriteString(send, "first")
					resp, err := srv.Client().Do(req)
					if err != nil {
						t.Fatal(err)
					}
					defer resp.Body.Close()
					if srv == secure && resp.ProtoMajor != 2 {
						t.Fatalf("got %s", resp.Proto)
					}
					first := make([]byte, 3)
					if _, err := io.ReadFull(resp.Body, first); err != nil || resp.StatusCode != 200 || string(first) != "one" {
						t.Fatalf("got %d %q %v", resp.StatusCode, first, err)
					}
					if section == "request body" {
						go io.WriteString(send, "second")
					}
					rest, err := io.ReadAll(resp.Body)
					if err == nil || strings.Contains(string(rest), "denied") {
						t.Errorf("the answer ended: %q, %v", rest, err)
					}
				})
			}
		}
	}
	w.waitIdle(0)
	if ok, late := len(w.log.find("proxy_send_local_response=0")), len(w.log.find("proxy_send_local_response=2")); ok != 34 || late != 4 {
		t.Errorf("%d local responses were accepted, %d were refused", ok, late)
	}
}

func TestLocalResponsesOfEveryStatus(t *testing.T) {
	cases := []struct {
		status int
		body   string
		want   string
	}{{200, "b", "b"}, {204, "b", ""}, {300, "b", "b"}, {304, "b", ""}, {403, "", ""}, {599, "b", "b"}}
	w, script := newWorld(t), ""
	for _, tt := range cases {
		script += fmt.Sprintf("[s%d]\nrequest_headers: call proxy_send_local_response %d null %q {a=b,a=c} 7\n", tt.status, tt.status, tt.body)
	}
	w.start(spec("f", script))
	srv := w.serve(echo)
	srv.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for _, tt := range cases {
		t.Run(fmt.Sprint(tt.status, len(tt.body)), func(t *testing.T) {
			resp, body := do(t, srv, fmt.Sprintf("s%d", tt.status), "x")
			if resp.StatusCode != tt.status || body != tt.want || !slices.Equal(resp.Header["A"], []string{"b", "c"}) {
				t.Errorf("got %d %q %v", resp.StatusCode, body, resp.Header)
			}
		})
	}
}

// TestLocalResponseWhileNextIsSilent: the guest answers from a tick, long after
// it let the request continue.
func TestLocalResponseWhileNextIsSilent(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", ticking+"[s]\nrequest_headers: park "+deny[5:]))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		<-r.Context().Done() // the chain no longer needs an answer
		if _, err := io.WriteString(rw, "too late"); err == nil {
			t.Error("next could write")
		}
	})
	if resp, body := do(t, srv, "s", "x"); resp.StatusCode != 403 || body != "denied" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
}

// TestLocalResponseToABodyThatHangs: when the guest answers, next waits for a
// body that does not arrive, or does something else.
func TestLocalResponseToABodyThatHangs(t *testing.T) {
	goOn, answered := func(*http.Request) {}, func(r *http.Request) { <-r.Context().Done() }
	for _, tt := range []struct {
		name          string
		before, after func(*http.Request) // the first read
	}{
		{"next reads", goOn, goOn},
		{"next does not", goOn, answered},
		{"next has not begun", answered, goOn},
	} {
		t.Run(tt.name, func(t *testing.T) {
			untilNextBegins(t, func() bool {
				w := newWorld(t)
				w.start(spec("f", ticking+"[s]\nrequest_headers: park "+deny[5:]))
				var begun atomic.Bool
				failed, returned := make(chan error, 1), make(chan struct{})
				chain := w.chain.Wrap(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
					begun.Store(true)
					tt.before(r)
					io.ReadFull(r.Body, make([]byte, 5))
					tt.after(r)
					_, err := io.ReadAll(r.Body)
					failed <- err
				}))
				srv := w.serveAs(duplex(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
					defer close(returned)
					chain.ServeHTTP(rw, r)
				})))
				body, answers := slowBody(t, srv, "s")
				defer body.Close()
				go io.WriteString(body, "begin") // the answer may come before the body is read
				resp := <-answers
				if resp == nil {
					t.Fatal("no answer")
				}
				defer resp.Body.Close()
				if line, _ := bufio.NewReader(resp.Body).ReadString('\n'); resp.StatusCode != 403 || line != "denied" {
					t.Errorf("got %d %q", resp.StatusCode, line)
				}
				if <-returned; !begun.Load() {
					return false
				}
				if err := <-failed; err == nil {
					t.Error("next read the body to its end")
				}
				return true
			})
		})
	}
}

// untilNextBegins repeats a scenario in which a tick of the guest answers while next runs.
// On a busy machine the tick may come before next begins. The scenario then returns false.
func untilNextBegins(t *testing.T, scenario func() (begun bool)) {
	t.Helper()
	for range 100 {
		if scenario() {
			return
		}
	}
	t.Fatal("the tick always came before next began")
}

// lateEnd is a body whose reader learns the end of the body late.
type lateEnd struct {
	io.ReadCloser
	ended chan struct{} // closed at the end of the body
	learn chan struct{} // the reader learns the end when this channel is closed
}

func (b *lateEnd) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		close(b.ended)
		<-b.learn
	}
	return n, err
}

// TestConnectionAfterALocalResponse: the guest answers while net/http has read the end of
// the body, and the reader of the body has not learned this yet. The connection must not
// serve another request, and the answer announces its end.
func TestConnectionAfterALocalResponse(t *testing.T) {
	untilNextBegins(t, func() bool {
		w := newWorld(t)
		w.start(spec("f", ticking+"[s]\nrequest_headers: park "+deny[5:]))
		ended, learn, returned := make(chan struct{}), make(chan struct{}), make(chan struct{})
		chain := w.chain.Wrap(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadAll(r.Body) // the chain has answered
		}))
		srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			defer close(returned)
			if err := r.Context().Err(); err != nil {
				t.Errorf("a request begins with %v", err)
			}
			r.Body = &lateEnd{r.Body, ended, learn}
			chain.ServeHTTP(rw, r)
		}))
		defer srv.Close()
		c, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nX-Script: s\r\nContent-Length: 4\r\n\r\nbody"); err != nil {
			t.Fatal(err)
		}
		select {
		case <-ended:
		case <-returned: // without next, which alone reads the body
			close(learn)
			return false
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		close(learn)
		if resp.StatusCode != 403 || string(body) != "denied" || err != nil {
			t.Errorf("got %d %q, %v", resp.StatusCode, body, err)
		}
		if !resp.Close {
			t.Error("the answer does not announce the end of the connection")
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Minute)) // never fails
		if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("the connection continues: %d, %v", n, err)
		}
		return true
	})
}

func TestCloseStream(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
request_headers: call proxy_close_stream 0
[a]
response_headers: call proxy_close_stream 1`))
	srv := w.serve(echo)
	for _, section := range []string{"s", "a"} {
		req, _ := http.NewRequest("POST", srv.URL, strings.NewReader("x"))
		req.Header.Set("X-Script", section)
		if resp, err := srv.Client().Do(req); err == nil {
			t.Errorf("%s: got %d", section, resp.StatusCode)
			resp.Body.Close()
		}
	}
	w.waitIdle(0)
}

// TestConnectionAfterALateBody: the body of a paused request does not come in time. The
// answer announces the end of the connection. With full duplex, as in the proxy,
// net/http does not announce the end by itself.
func TestConnectionAfterALateBody(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", "[s]\nrequest_headers: return 1"))
	w.chain.Set(w.plugins, Limits{ReadTimeout: time.Millisecond})
	srv := w.serveAs(duplex(w.chain.Wrap(http.HandlerFunc(echo))))
	c, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nX-Script: s\r\nContent-Length: 4\r\n\r\nb"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 408 || !resp.Close {
		t.Errorf("got %d, close %v", resp.StatusCode, resp.Close)
	}
}
