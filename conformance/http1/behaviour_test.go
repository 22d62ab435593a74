package http1

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
)

// TestBehaviour runs all behaviours over TCP and TLS against the built program.
func TestBehaviour(t *testing.T) {
	eachReader(t, func(t *testing.T, reader string) {
		for _, secure := range []bool{false, true} {
			t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
				p := startProgram(t, reader, secure, "max_body = \"1MiB\"")
				for _, b := range behaviours {
					t.Run(b.name, func(t *testing.T) {
						p.forget()
						b.run(t, p, p.client(t))
						p.idle(t)
					})
				}
			})
		}
	})
}

const ping = "GET /health HTTP/1.1\r\nHost: h\r\n\r\n"

// behaviours are what a client sees of the connections of the program. Each has an own connection.
var behaviours = []struct {
	name string
	run  func(t *testing.T, p *program, c *client)
}{
	{"a slow first answer comes before those of pipelined requests", func(t *testing.T, p *program, c *client) {
		c.send(chat("wait", false) + ping + chat("next", false, "X-Request-Id: three") + "GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n")
		p.arrives(t, "wait")
		c.silent()
		p.release <- struct{}{}
		if a := c.answer(200); a.body != unaryAnswer {
			t.Errorf("%q", a.body)
		}
		c.answer(200)
		if a := c.answer(200); a.Header.Get("X-Request-Id") != "three" || a.body != unaryAnswer {
			t.Errorf("%v %q", a.Header, a.body)
		}
		c.answer(404)
	}},
	{"requests behind a stream", func(t *testing.T, p *program, c *client) {
		c.send(chat("wait", true))
		resp := c.head("POST")
		c.send(chat("behind", true) + ping)
		p.release <- struct{}{}
		if b, err := io.ReadAll(resp.Body); err != nil || string(b) != firstEvent+lastEvent {
			t.Errorf("%q, %v", b, err)
		}
		if a := c.answer(200); a.body != firstEvent+lastEvent {
			t.Errorf("%q", a.body)
		}
		c.answer(200)
	}},
	{"a refused request behind a slow one", func(t *testing.T, p *program, c *client) {
		c.send(chat("wait", false) + post(chatPath, "hello", "Content-Length: 5", "Transfer-Encoding: chunked"))
		p.arrives(t, "wait")
		p.release <- struct{}{}
		c.answer(200)
		a := c.answer(400)
		a.refusal(t, "invalid_head")
		c.ends()
	}},
	{"100 before the body", func(t *testing.T, p *program, c *client) {
		for range 2 {
			body := chatBody("continued", false)
			c.send(post(chatPath, "", "Expect: 100-continue", "Content-Length: "+strconv.Itoa(len(body))))
			interim := make([]byte, len("HTTP/1.1 100 Continue\r\n\r\n"))
			if _, err := io.ReadFull(c.in, interim); err != nil || string(interim) != "HTTP/1.1 100 Continue\r\n\r\n" {
				t.Fatalf("%q, %v", interim, err)
			}
			c.send(body)
			c.answer(200)
		}
	}},
	{"a body that does not wait for 100", func(t *testing.T, p *program, c *client) {
		c.send(chat("at once", false, "Expect: 100-continue") + ping)
		resp := c.head("POST")
		if resp.StatusCode == 100 {
			resp = c.head("POST")
		}
		if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || string(b) != unaryAnswer {
			t.Errorf("%d %q, %v", resp.StatusCode, b, err)
		}
		c.answer(200)
	}},
	{"no 100 for a body that is too large", func(t *testing.T, p *program, c *client) {
		c.send(post(chatPath, "", "Expect: 100-continue", "Content-Length: 1048577"))
		a := c.answer(413)
		a.refusal(t, "body_too_large")
		c.ends() // the client may send the body or not
	}},
	{"no 100 for another path", func(t *testing.T, p *program, c *client) {
		c.send(post("/nothing", "", "Expect: 100-continue", "Content-Length: 5"))
		c.answer(404)
		c.ends()
	}},
	{"no 100 for another expectation", func(t *testing.T, p *program, c *client) {
		c.send(post(chatPath, "", "Expect: 200-ok", "Content-Length: 5"))
		a := c.answer(417)
		a.refusal(t, "invalid_head")
		c.ends()
	}},
	{"no 100 for HTTP/1.0", func(t *testing.T, p *program, c *client) {
		body := chatBody("old", false)
		c.send(old(post(chatPath, body, "Expect: 100-continue", "Content-Length: "+strconv.Itoa(len(body)))))
		c.answer(200)
		c.ends()
	}},
	{"early hints", func(t *testing.T, p *program, c *client) {
		c.send(chat("hints", false) + chat("hints", true))
		for range 2 {
			resp := c.head("POST")
			if resp.StatusCode != 103 || resp.Header.Get("Link") != "</style.css>" || len(resp.Header) != 1 {
				t.Errorf("%d %v", resp.StatusCode, resp.Header)
			}
			if a := c.answer(200); a.Header.Get("Link") != "" {
				t.Errorf("%v", a.Header)
			}
		}
	}},
	{"no early hints for HTTP/1.0", func(t *testing.T, p *program, c *client) {
		c.send(old(chat("hints", false)))
		c.answer(200)
		c.ends()
	}},
	{"a trailer of a request", func(t *testing.T, p *program, c *client) {
		body := chatBody("trailer", false)
		c.send(post(chatPath, fmt.Sprintf("%x\r\n%s\r\n0\r\nX-T: v\r\n\r\n", len(body), body), "Trailer: X-T", "Transfer-Encoding: chunked") + ping)
		c.answer(200)
		c.answer(200)
		for _, r := range p.with("trailer") {
			if faults := r.faults(); len(faults) > 0 || r.body != body {
				t.Errorf("the engine received %q %q", faults, r.body)
			}
		}
	}},
	{"HTTP/1.0", func(t *testing.T, p *program, c *client) {
		c.send(old(chat("old", false)) + ping)
		if a := c.answer(200); a.body != unaryAnswer || !a.Close || a.Header.Get("Content-Length") == "" {
			t.Errorf("%v %q", a.Header, a.body)
		}
		c.ends()
	}},
	{"HTTP/1.0 with keep-alive", func(t *testing.T, p *program, c *client) {
		c.send(old(chat("old", false, "Connection: keep-alive")) + ping)
		if a := c.answer(200); a.body != unaryAnswer || !strings.EqualFold(a.Header.Get("Connection"), "keep-alive") {
			t.Errorf("%v %q", a.Header, a.body)
		}
		c.answer(200)
	}},
	{"a stream for HTTP/1.0", func(t *testing.T, p *program, c *client) { // the end of the connection ends it
		oldStream(t, p, c)
	}},
	{"a stream for HTTP/1.0 with keep-alive", func(t *testing.T, p *program, c *client) {
		oldStream(t, p, c, "Connection: keep-alive")
	}},
	{"HEAD", func(t *testing.T, p *program, c *client) {
		c.send("HEAD /health HTTP/1.1\r\nHost: h\r\n\r\nHEAD " + chatPath + " HTTP/1.1\r\nHost: h\r\n\r\nHEAD /nothing HTTP/1.1\r\nHost: h\r\n\r\n" + ping)
		for _, status := range []int{200, 405, 404} {
			if resp := c.head("HEAD"); resp.StatusCode != status {
				t.Errorf("got %d, want %d", resp.StatusCode, status)
			}
		}
		c.answer(200)
	}},
	{"the client asks for the end", func(t *testing.T, p *program, c *client) {
		c.send(chat("close", true, "Connection: close") + ping)
		if a := c.answer(200); !a.Close || a.body != firstEvent+lastEvent {
			t.Errorf("%v %q", a.Header, a.body)
		}
		c.ends()
	}},
	{"FIN behind an answer", func(t *testing.T, p *program, c *client) {
		c.send(ping)
		c.answer(200)
		c.finish()
		c.ends()
	}},
	{"FIN in a head", func(t *testing.T, p *program, c *client) {
		c.send("GET /health HTTP/1.1\r\nHost:")
		c.finish()
		c.whole(400)
	}},
	{"FIN in a body", func(t *testing.T, p *program, c *client) {
		c.send(post(chatPath, chatBody("cut", false), "Content-Length: 5000"))
		c.finish()
		c.whole(400)
		if len(p.with("cut")) > 0 {
			t.Error("the engine received the request")
		}
	}},
	{"FIN in a chunk", func(t *testing.T, p *program, c *client) {
		c.send(post(chatPath, "5000\r\n"+chatBody("cut", false), "Transfer-Encoding: chunked"))
		c.finish()
		c.whole(400)
		if len(p.with("cut")) > 0 {
			t.Error("the engine received the request")
		}
	}},
	{"FIN behind a whole request", func(t *testing.T, p *program, c *client) { // like the engines, the program may take the client for gone
		c.send(chat("fin", false))
		c.finish()
		c.whole(200)
	}},
	{"FIN behind pipelined requests", func(t *testing.T, p *program, c *client) {
		c.send(chat("fin", false) + chat("fin", true) + ping)
		c.finish()
		c.whole(200)
	}},
	{"FIN in a stream", func(t *testing.T, p *program, c *client) {
		c.send(chat("wait", true))
		resp := c.head("POST")
		c.finish()
		select {
		case p.release <- struct{}{}: // the program waits for the rest of the answer
		case <-p.alone():
		}
		io.Copy(io.Discard, resp.Body)
		c.ends()
	}},
	{"the client leaves while the first of two requests is served", func(t *testing.T, p *program, c *client) {
		c.send(chat("wait", false) + chat("never", false))
		p.arrives(t, "wait")
		c.reset()
		p.idle(t)
		if len(p.with("never")) > 0 {
			t.Error("the engine received the second request")
		}
	}},
	{"the client leaves in a stream", func(t *testing.T, p *program, c *client) {
		c.send(chat("wait", true))
		c.head("POST")
		c.reset()
		p.idle(t)
	}},
	{"a head that is too large", func(t *testing.T, p *program, c *client) {
		c.send(chat("large", false, "X: "+strings.Repeat("a", 80<<10)))
		a := c.answer(431)
		a.refusal(t, "head_too_large")
		c.ends()
	}},
	{"a body that is too large", func(t *testing.T, p *program, c *client) { // its rest is read, so that the client can read the answer
		for range 2 {
			c.send(post(chatPath, strings.Repeat("a", 2<<20), "Content-Length: 2097152"))
			a := c.answer(413)
			a.refusal(t, "body_too_large")
		}
		c.send(post(chatPath, strings.Repeat("fffff\r\n"+strings.Repeat("a", 0xfffff)+"\r\n", 3)+"0\r\n\r\n", "Transfer-Encoding: chunked"))
		c.answer(413)
		c.send(ping)
		c.answer(200)
	}},
	{"a body that nothing reads", func(t *testing.T, p *program, c *client) {
		c.send(post("/nothing", "hello", "Content-Length: 5") + post("/nothing", "5\r\nhello\r\n0\r\nX-T: v\r\n\r\n", "Transfer-Encoding: chunked") + post("/nothing", strings.Repeat("a", 1<<20), "Content-Length: 1048576") + ping)
		for range 3 {
			a := c.answer(404)
			a.refusal(t, "not_found")
		}
		c.answer(200)
	}},
	{"an upgrade to WebSocket with a frame behind the head", func(t *testing.T, p *program, c *client) {
		c.send("GET /v1/responses HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" +
			"\x89\x85\x00\x00\x00\x00hello")
		if resp := c.head("GET"); resp.StatusCode != 101 || resp.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" { // RFC 6455 1.3
			t.Fatalf("%d %v", resp.StatusCode, resp.Header)
		}
		pong := make([]byte, 7)
		if _, err := io.ReadFull(c.in, pong); err != nil || string(pong) != "\x8a\x05hello" {
			t.Errorf("%q, %v", pong, err)
		}
	}},
	{"requests before an upgrade", func(t *testing.T, p *program, c *client) {
		c.send(chat("before", false) + ping + "GET /v1/responses HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" +
			"\x88\x80\x00\x00\x00\x00")
		c.answer(200)
		c.answer(200)
		if resp := c.head("GET"); resp.StatusCode != 101 {
			t.Fatalf("%d %v", resp.StatusCode, resp.Header)
		}
		end := make([]byte, 2)
		if _, err := io.ReadFull(c.in, end); err != nil || end[0] != 0x88 {
			t.Errorf("%q, %v", end, err)
		}
		c.ends()
	}},
}

func oldStream(t *testing.T, p *program, c *client, lines ...string) {
	t.Helper()
	c.send(old(chat("wait", true, lines...)))
	resp := c.head("POST")
	if resp.StatusCode != 200 || len(resp.TransferEncoding) > 0 || resp.ContentLength >= 0 {
		t.Errorf("%d %v %v", resp.StatusCode, resp.TransferEncoding, resp.Header)
	}
	p.release <- struct{}{}
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != firstEvent+lastEvent {
		t.Errorf("%q, %v", b, err)
	}
	c.ends()
}
