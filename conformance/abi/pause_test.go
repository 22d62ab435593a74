package abi

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// ticking is the part of a script that resumes paused streams at every tick.
const ticking = "configure: quiet proxy_set_tick_period_milliseconds 5\ntick: wake\n"

// A stream that is paused in any phase continues on request: from the same
// callback, a tick, or the answer of a call (row 9).
func TestPause(t *testing.T) {
	side := startSide(t)
	n := start(t, options{plugins: []config.Plugin{scripted(t, "pause", ticking+`
[same]
request_headers: call proxy_continue_stream 0
request_headers: return 1
response_headers: call proxy_continue_stream 1
response_headers: return 1
delete: say gone
[headers]
request_headers: park proxy_continue_stream 0
request_headers: return 1
delete: say gone
[body]
request_body: eos park proxy_continue_stream 0
request_body: return 1
delete: say gone
[answer]
response_headers: park proxy_continue_stream 1
response_headers: return 1
delete: say gone
[answer-body]
response_body: eos park proxy_continue_stream 1
response_body: return 1
delete: say gone
[everywhere]
request_headers: park proxy_continue_stream 0
request_headers: return 1
request_body: eos park proxy_continue_stream 0
request_body: return 1
response_headers: park proxy_continue_stream 1
response_headers: return 1
response_body: eos park proxy_continue_stream 1
response_body: return 1
delete: say gone
[call]
request_headers: call proxy_http_call "side" {:method=GET,:path=/side,:authority=a} null {} 5000 out
request_headers: return 1
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0
delete: say gone
[unneeded]
request_headers: call proxy_continue_stream 0
request_headers: call proxy_continue_stream 1
request_body: call proxy_continue_stream 0
response_headers: call proxy_continue_stream 0
response_body: call proxy_continue_stream 1
delete: say gone
[strange]
request_headers: say here
request_headers: return 2
response_headers: return 77
response_headers: park proxy_continue_stream 1
delete: say gone
`)}, config: func(c *config.Config) { c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}} }})
	stream := strings.Replace(unary, "{", `{"stream":true,`, 1)
	whole := event(0) + event(1) + event(2) + "data: [DONE]\n\n"
	for _, section := range []string{"same", "headers", "body", "answer", "answer-body", "everywhere", "call", "unneeded"} {
		t.Run(section, func(t *testing.T) {
			n := n.with(t)
			n.fine(n.post(section))
			n.deleted(section)
			if r := n.send(n.client, section, stream); r.status != 200 || r.body != whole {
				t.Errorf("the stream: %d %v %q", r.status, r.err, r.body)
			}
		})
	}
	t.Run("strange actions", func(t *testing.T) {
		// Numbers above 1 are Envoy's filter statuses. Whatever a host does
		// with them, the request ends.
		n := n.with(t)
		ctx, leave := context.WithCancel(context.Background())
		defer leave()
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, n.url+"/v1/completions", strings.NewReader(unary))
		req.Header.Set("X-Script", "strange")
		done := make(chan struct{})
		go func() { do(n.client, req); close(done) }()
		n.eventually("it ends or is held", func() bool { return len(n.book.section("strange")) > 0 || closed(done) })
		leave()
		<-done
		n.deleted("strange")
	})
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// with returns the node with a subtest's t for failures.
func (n *node) with(t *testing.T) *node {
	c := *n
	c.t = t
	return &c
}

// A stream that never continues ends when its client leaves, in any phase, and
// nothing of it remains (row 9).
func TestPauseForEver(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "stuck", `
[headers]
request_headers: say here
request_headers: return 1
done: say done
log: say log
delete: say gone
[body]
request_body: say here
request_body: return 1
done: say done
log: say log
delete: say gone
[answer]
response_headers: say here
response_headers: return 1
done: say done
log: say log
delete: say gone
[answer-body]
response_body: say here
response_body: return 1
done: say done
log: say log
delete: say gone
`)}})
	for _, section := range []string{"headers", "body", "answer", "answer-body"} {
		for _, protocol := range []string{"h1", "h2"} {
			t.Run(section+" "+protocol, func(t *testing.T) {
				n := n.with(t)
				before := len(with(n.book.said(section), "delete "))
				ctx, leave := context.WithCancel(context.Background())
				defer leave()
				client := n.client
				if protocol == "h2" {
					client = h2Client()
					defer client.CloseIdleConnections()
				}
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, n.url+"/v1/completions", strings.NewReader(strings.Replace(unary, "{", `{"stream":true,`, 1)))
				req.Header.Set("X-Script", section)
				n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) {
					events(w, 2, func(i int) {
						if i > 0 {
							<-r.Context().Done() // until the proxy cancels the request
						}
					})
				})
				here := func() int {
					count := 0
					for _, s := range n.book.said(section) {
						if strings.HasSuffix(s, " here") {
							count++
						}
					}
					return count
				}
				had := here()
				done := make(chan struct{})
				go func() { do(client, req); close(done) }()
				n.logged("it is held", func() bool { return here() > had })
				leave()
				<-done
				n.logged("it is deleted", func() bool { return len(with(n.book.said(section), "delete ")) > before })
				has(t, n.book.said(section), "done done", "log log", "delete gone")
			})
		}
	}
}

// h2Client uses HTTP/2 without TLS.
func h2Client() *http.Client {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{Protocols: &protocols}}
}

// Body callbacks run for each chunk, and the data that a paused guest sees
// grows (row 10).
func TestBodyChunks(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "chunks", `
[through]
request_headers: say eos $eos
request_body: say size $size eos $eos
request_trailers: say size $size
response_body: say size $size eos $eos
delete: say gone
[held]
request_body: say size $size eos $eos
request_body: !eos return 1
response_body: say size $size eos $eos
response_body: !eos return 1
delete: say gone
[trailers]
request_headers: say eos $eos
request_body: say size $size eos $eos
request_trailers: call proxy_get_header_map_value 1 "x-sum" ret
delete: say gone
`)}})
	stream := strings.Replace(unary, "{", `{"stream":true,`, 1)
	cuts := []int{10, 25, len(stream)}
	for _, section := range []string{"through", "held"} {
		t.Run(section, func(t *testing.T) {
			n := n.with(t)
			// The test sends each part of the request when the guest has seen
			// the previous one. The same holds for each event of the answer.
			sizes := func(callback string) []string { return with(n.book.said(section), callback+" size ") }
			n.engine.Script(func(w http.ResponseWriter, _ testbed.Leg) {
				events(w, 3, func(i int) {
					n.logged("the guest has seen event "+strconv.Itoa(i), func() bool { return len(sizes("response_body")) >= i })
				})
			})
			reader, writer := io.Pipe()
			go func() {
				from := 0
				for i, to := range cuts {
					n.logged("the guest has seen part "+strconv.Itoa(i), func() bool { return len(sizes("request_body")) >= i })
					io.WriteString(writer, stream[from:to])
					from = to
				}
				n.logged("the guest has seen all", func() bool { return len(sizes("request_body")) >= len(cuts) })
				writer.Close()
			}()
			req, _ := http.NewRequest(http.MethodPost, n.url+"/v1/completions", reader)
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Script", section)
			r := do(n.client, req)
			if want := event(0) + event(1) + event(2) + "data: [DONE]\n\n"; r.status != 200 || r.body != want {
				t.Errorf("got %d %q", r.status, r.body)
			}
			said := n.deleted(section)
			if section == "through" {
				has(t, said, "request_headers eos 0", "request_body size 10 eos 0", "request_body size 15 eos 0", "request_body size "+strconv.Itoa(len(stream)-25)+" eos 0")
				has(t, said, "response_body size "+strconv.Itoa(len(event(0)))+" eos 0", "response_body size "+strconv.Itoa(len(event(1)))+" eos 0")
			} else {
				has(t, said, "request_body size 10 eos 0", "request_body size 25 eos 0", "request_body size "+strconv.Itoa(len(stream))+" eos 0", "request_body size "+strconv.Itoa(len(stream))+" eos 1")
				has(t, said, "response_body size "+strconv.Itoa(len(event(0)))+" eos 0", "response_body size "+strconv.Itoa(len(event(0)+event(1)))+" eos 0",
					"response_body size "+strconv.Itoa(len(event(0)+event(1)+event(2)+"data: [DONE]\n\n"))+" eos 1")
			}
			for _, callback := range []string{"request_body size ", "response_body size "} {
				var ends int
				for _, s := range with(said, callback) {
					if strings.HasSuffix(s, " eos 1") {
						ends++
					}
				}
				if ends != 1 {
					t.Errorf("%s ended %d times:\n%s", callback, ends, strings.Join(said, "\n"))
				}
			}
		})
	}
	for _, protocol := range []string{"h1", "h2"} {
		t.Run("trailers "+protocol, func(t *testing.T) {
			n := n.with(t)
			n.engine.Script(answers)
			client := n.client
			if protocol == "h2" {
				client = h2Client()
				defer client.CloseIdleConnections()
			}
			before := len(n.book.said("trailers"))
			req, _ := http.NewRequest(http.MethodPost, n.url+"/v1/completions", io.NopCloser(strings.NewReader(unary)))
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Script", "trailers")
			req.Trailer = http.Header{"X-Sum": {"42"}}
			n.fine(do(client, req))
			n.logged("it is deleted", func() bool {
				said := n.book.said("trailers")
				return len(said) > before && said[len(said)-1] == "delete gone"
			})
			said := n.book.said("trailers")[before:]
			has(t, said, "request_headers eos 0", `request_trailers proxy_get_header_map_value=0 "42"`)
			for _, s := range with(said, "request_body ") {
				if strings.HasSuffix(s, "eos 1") {
					t.Errorf("the body ended before the trailers: %v", said)
				}
			}
		})
	}
	t.Run("no body", func(t *testing.T) {
		n := n.with(t)
		before := len(n.book.said("through"))
		req, _ := http.NewRequest(http.MethodGet, n.url+"/v1/models", nil)
		req.Header.Set("X-Script", "through")
		if r := do(n.client, req); r.status != 200 {
			t.Errorf("got %d", r.status)
		}
		n.logged("it is deleted", func() bool {
			said := n.book.said("through")
			return len(said) > before && said[len(said)-1] == "delete gone"
		})
		said := n.book.said("through")[before:]
		has(t, said, "request_headers eos 1")
		if got := with(said, "request_body"); len(got) > 0 {
			t.Errorf("body callbacks of a request without a body: %v", got)
		}
	})
}

// A request that a guest holds in memory is rejected above the limit.
func TestBodyLimit(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "limit", `
[held]
request_body: !eos return 1
delete: say gone
[open]
delete: say gone
`)}, config: func(c *config.Config) { c.Server.MaxBody = 64 << 10 }})
	big := `{"model":"sim","prompt":"` + strings.Repeat("x", 256<<10) + `"}`
	for _, section := range []string{"held", "open"} {
		r := n.send(n.client, section, big)
		if r.err == nil && r.status != http.StatusRequestEntityTooLarge {
			t.Errorf("%s: got %d %s", section, r.status, r.body)
		}
		n.deleted(section)
	}
	if c := len(n.engine.Seen(nil)); c != 0 {
		t.Errorf("the engine got %d requests", c)
	}
	n.fine(n.post("main"))
}

// A body is changed in place, at its beginning and at its end; lengths remain
// right (row 11).
func TestSetBody(t *testing.T) {
	at := strings.Index(unary, "hello")
	n := start(t, options{plugins: []config.Plugin{scripted(t, "edit", `
[prepend]
request_body: eos call proxy_set_buffer_bytes 0 0 0 "  "
response_body: eos call proxy_set_buffer_bytes 1 0 0 "<<"
request_body: !eos return 1
response_body: !eos return 1
delete: say gone
[append]
request_body: eos call proxy_set_buffer_bytes 0 0xffffffff 0 "   "
request_body: !eos return 1
response_body: eos call proxy_set_buffer_bytes 1 1000000 0 ">>"
response_body: !eos return 1
delete: say gone
[replace]
request_body: eos call proxy_set_buffer_bytes 0 0 0xffffffff "{\"model\":\"sim\",\"prompt\":\"all new\"}"
request_body: !eos return 1
response_body: eos call proxy_set_buffer_bytes 1 0 1000000 "short"
response_body: !eos return 1
delete: say gone
[splice]
request_body: eos call proxy_set_buffer_bytes 0 `+strconv.Itoa(at)+` 5 "good day"
request_body: eos call proxy_get_buffer_bytes 0 `+strconv.Itoa(at)+` 8 ret
request_body: !eos return 1
response_body: eos call proxy_set_buffer_bytes 1 1 4 "X"
response_body: !eos return 1
delete: say gone
[empty]
response_body: eos call proxy_set_buffer_bytes 1 0 1000000 ""
response_body: eos call proxy_get_buffer_bytes 1 0 10 ret
response_body: !eos return 1
delete: say gone
[chunk]
response_body: !eos call proxy_set_buffer_bytes 1 0 1000000 "data: {\"x\":1}\n\n"
delete: say gone
[status]
request_body: eos call proxy_get_buffer_status 0 out out
request_body: eos call proxy_get_buffer_bytes 0 2 5 ret
request_body: eos call proxy_get_buffer_bytes 0 0 0xffffffff ret
request_body: !eos return 1
delete: say gone
`)}})
	for _, tt := range []struct{ section, sent, got string }{
		{"prepend", unary, "<<" + engineAnswer},
		{"append", unary, engineAnswer + ">>"},
		{"replace", `{"model":"sim","prompt":"all new"}`, "short"},
		{"splice", strings.Replace(unary, "hello", "good day", 1), engineAnswer[:1] + "X" + engineAnswer[5:]},
		{"empty", unary, ""},
	} {
		for _, protocol := range []string{"h1", "h2"} {
			t.Run(tt.section+" "+protocol, func(t *testing.T) {
				n := n.with(t)
				client := n.client
				if protocol == "h2" {
					client = h2Client()
					defer client.CloseIdleConnections()
				}
				r := n.send(client, tt.section, unary)
				if r.err != nil || r.status != 200 || r.body != tt.got {
					t.Errorf("got %d %v %q", r.status, r.err, r.body)
				}
				if l := r.header.Get("Content-Length"); l != "" && l != strconv.Itoa(len(tt.got)) {
					t.Errorf("content-length %s for %d bytes", l, len(tt.got))
				}
				e := n.last()
				if strings.TrimSpace(e.Text) != tt.sent {
					t.Errorf("the engine got %q", e.Text)
				}
				for _, s := range n.deleted(tt.section) {
					if strings.Contains(s, "proxy_set_buffer_bytes=") && !strings.HasSuffix(s, "=0") {
						t.Error(s)
					}
				}
			})
		}
	}
	has(t, n.book.said("splice"), `request_body proxy_get_buffer_bytes=0 "good day"`)
	n.fine(n.post("status"))
	said := n.deleted("status")
	has(t, said, "request_body proxy_get_buffer_status=0 "+strconv.Itoa(len(unary))+" 0",
		"request_body proxy_get_buffer_bytes=0 "+strconv.Quote(unary[2:7]), "request_body proxy_get_buffer_bytes=0 "+strconv.Quote(unary))
	t.Run("events", func(t *testing.T) {
		n := n.with(t)
		r := n.send(n.client, "chunk", strings.Replace(unary, "{", `{"stream":true,`, 1))
		count := strings.Count(r.body, `data: {"x":1}`+"\n\n")
		if r.status != 200 || count == 0 || strings.Contains(r.body, "choices") {
			t.Errorf("got %d %q", r.status, r.body)
		}
		n.deleted("chunk")
	})
}

// The events of a stream pass a chain one by one. Each reaches the guest and
// the client before the engine makes the next.
func TestEventsAreNotHeldBack(t *testing.T) {
	script := "[main]\nresponse_body: say size $size\ndelete: say gone\n"
	n := start(t, options{plugins: []config.Plugin{
		scripted(t, "first", script), scripted(t, "second", script),
		filter("none", writeModule(t, newModule()), ""),
	}})
	for _, protocol := range []string{"h1", "h2"} {
		t.Run(protocol, func(t *testing.T) {
			n := n.with(t)
			client := n.client
			if protocol == "h2" {
				client = h2Client()
				defer client.CloseIdleConnections()
			}
			// The engine makes an event when the client has seen the previous
			// one. The head may wait for the first event.
			seen := make(chan struct{}, 1)
			seen <- struct{}{}
			n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) {
				events(w, 20, func(int) {
					select {
					case <-seen:
					case <-r.Context().Done():
					}
				})
			})
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, n.url+"/v1/completions", strings.NewReader(strings.Replace(unary, "{", `{"stream":true,`, 1)))
			req.Header.Set("X-Script", "main")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			for i := range 20 {
				got := make([]byte, len(event(i)))
				if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != event(i) {
					t.Fatalf("event %d: %q %v", i, got, err)
				}
				seen <- struct{}{}
			}
			rest, err := io.ReadAll(resp.Body)
			if err != nil || !slices.Equal(strings.Fields(string(rest)), []string{"data:", "[DONE]"}) {
				t.Errorf("rest of the stream %q %v", rest, err)
			}
		})
	}
}
