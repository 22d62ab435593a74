package http1

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// client is a client of the program that writes bytes of its own.
type client struct {
	net.Conn
	t  *testing.T
	in *bufio.Reader
}

func (p *program) client(t *testing.T) *client {
	t.Helper()
	c, err := p.dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return &client{c, t, bufio.NewReader(c)}
}

func (c *client) send(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		c.t.Fatal(err)
	}
}

// finish sends the end of the client's side.
func (c *client) finish() {
	c.t.Helper()
	if err := c.Conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		c.t.Fatal(err)
	}
}

// reset ends the connection without a FIN.
func (c *client) reset() {
	raw := c.Conn
	if s, ok := raw.(*tls.Conn); ok {
		raw = s.NetConn()
	}
	raw.(*net.TCPConn).SetLinger(0)
	raw.Close()
}

// wholeAnswer is an answer with its body.
type wholeAnswer struct {
	*http.Response
	body string
}

// head reads the head of an answer to a request with that method.
func (c *client) head(method string) *http.Response {
	c.t.Helper()
	resp, err := http.ReadResponse(c.in, &http.Request{Method: method})
	if err != nil {
		c.t.Fatal(err)
	}
	return resp
}

// answer reads an answer and checks its status.
func (c *client) answer(status int) wholeAnswer {
	c.t.Helper()
	resp := c.head("GET")
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != status {
		c.t.Fatalf("got %d, %v, want %d: %.300q", resp.StatusCode, err, status, b)
	}
	return wholeAnswer{resp, string(b)}
}

// ends checks that the program sends nothing more and ends the connection.
func (c *client) ends() {
	c.t.Helper()
	if rest, err := io.ReadAll(c.in); len(rest) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Errorf("the connection goes on: %.300q, %v", rest, err)
	}
}

// refusal checks an answer with an error as OpenAI's API has it, and its code.
func (a wholeAnswer) refusal(t *testing.T, code string) {
	t.Helper()
	var e struct {
		Error struct {
			Message, Type string
			Param         any
			Code          string
		}
	}
	if err := json.Unmarshal([]byte(a.body), &e); err != nil || e.Error.Code != code || e.Error.Message == "" || e.Error.Type == "" ||
		a.Header.Get("Content-Type") != "application/json" || a.Header.Get("X-Request-Id") == "" {
		t.Errorf("want code %s: %d %v %s", code, a.StatusCode, a.Header, a.body)
	}
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

// silent checks that no byte of an answer has come.
func (c *client) silent() {
	c.t.Helper()
	c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if b, err := c.in.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Errorf("got %q, %v before the first answer", b, err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
}

// whole checks that each answer until the end of the connection is whole and has that status.
func (c *client) whole(status int) {
	c.t.Helper()
	for {
		resp, err := http.ReadResponse(c.in, nil)
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				c.t.Error("the connection goes on")
			}
			return
		}
		b, err := io.ReadAll(resp.Body)
		if resp.StatusCode != status && resp.StatusCode < 400 || err == nil && resp.StatusCode == 200 && len(b) == 0 {
			c.t.Errorf("%d %.200q", resp.StatusCode, b)
		}
	}
}

// old makes a request one of HTTP/1.0.
func old(request string) string { return strings.Replace(request, "HTTP/1.1\r\n", "HTTP/1.0\r\n", 1) }

// arrives waits until a request with that text is at the engine.
func (p *program) arrives(t *testing.T, text string) {
	t.Helper()
	testbed.Eventually(t, "the engine receives the request", func() bool { return len(p.with(text)) > 0 })
}

// alone is closed when the engine has no request.
func (e *engine) alone() <-chan struct{} {
	over := make(chan struct{})
	go func() {
		defer close(over)
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
			e.mu.Lock()
			n := e.running
			e.mu.Unlock()
			if n == 0 {
				return
			}
		}
	}()
	return over
}

// TestBehaviour runs all behaviours over TCP and TLS against the built program.
func TestBehaviour(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			p := startProgram(t, secure, "max_body = \"1MiB\"")
			for _, b := range behaviours {
				t.Run(b.name, func(t *testing.T) {
					p.forget()
					b.run(t, p, p.client(t))
					p.idle(t)
				})
			}
		})
	}
}

// TestPriorKnowledge: HTTP/2 without TLS whose first bytes come one by one, in two pieces, and at once.
func TestPriorKnowledge(t *testing.T) {
	p := startProgram(t, false, "")
	var first, block bytes.Buffer
	first.WriteString(http2.ClientPreface)
	framer, fields := http2.NewFramer(&first, nil), hpack.NewEncoder(&block)
	framer.WriteSettings()
	for _, f := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":path", "/health"}, {":authority", "h"}} {
		fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true})
	for cut := range first.Len() {
		c := p.client(t)
		pieces := []string{first.String()[:cut], first.String()[cut:]}
		if cut == 1 {
			pieces = strings.Split(first.String(), "")
		}
		for _, piece := range pieces {
			c.send(piece)
		}
		if status := http2Status(c); status != "200" {
			t.Fatalf("cut at %d: %s", cut, status)
		}
		c.Close()
	}
}

// http2Status returns the status of the first answer.
func http2Status(c *client) (status string) {
	framer := http2.NewFramer(io.Discard, c.in)
	for {
		f, err := framer.ReadFrame()
		if err != nil {
			return err.Error()
		}
		if h, ok := f.(*http2.HeadersFrame); ok {
			hpack.NewDecoder(4096, func(f hpack.HeaderField) {
				if f.Name == ":status" {
					status = f.Value
				}
			}).Write(h.HeaderBlockFragment())
			return status
		}
	}
}

// TestDrain: after SIGTERM a running request ends, its answer announces the end of the connection,
// and connections without a request end.
func TestDrain(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			p := startProgram(t, secure, "drain_timeout = \"30s\"")
			idle, busy, stream := p.client(t), p.client(t), p.client(t)
			idle.send(ping)
			idle.answer(200)
			busy.send(chat("wait", false))
			stream.send(chat("wait", true) + ping)
			resp := stream.head("POST")
			testbed.Eventually(t, "both requests are at the engine", func() bool { return len(p.with("wait")) == 2 })
			p.cmd.Process.Signal(syscall.SIGTERM)
			idle.ends()
			p.release <- struct{}{}
			p.release <- struct{}{}
			if a := busy.answer(200); a.body != unaryAnswer {
				t.Errorf("%q", a.body)
			}
			busy.ends()
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != firstEvent+lastEvent {
				t.Errorf("%q, %v", b, err)
			}
			stream.whole(200)
		})
	}
}

// TestTakeover: the connections of a process whose successor has the address are served. The next
// answer of each announces the end of the connection.
func TestTakeover(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			p := startProgram(t, secure, "")
			idle, half, busy := p.client(t), p.client(t), p.client(t)
			idle.send(ping)
			idle.answer(200)
			request := chat("half", false)
			half.send(request[:len(request)-20])
			busy.send(chat("wait", true) + chat("behind", false))
			resp := busy.head("POST")
			p.run("--takeover")
			testbed.Eventually(t, "the successor has the address", func() bool {
				idle := p.client(t)
				defer idle.Close()
				idle.send(ping)
				return !idle.answer(200).Close && strings.Contains(p.logged(), "a successor has taken over")
			})
			idle.send(chat("old connection", false))
			if a := idle.answer(200); !a.Close || a.body != unaryAnswer {
				t.Errorf("%v %q", a.Header, a.body)
			}
			idle.ends()
			half.send(request[len(request)-20:])
			if a := half.answer(200); a.body != unaryAnswer {
				t.Errorf("%q", a.body)
			}
			p.release <- struct{}{}
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != firstEvent+lastEvent {
				t.Errorf("%q, %v", b, err)
			}
			if a := busy.answer(200); !a.Close || a.body != unaryAnswer {
				t.Errorf("%v %q", a.Header, a.body)
			}
			busy.ends()
			fresh := p.client(t)
			fresh.send(ping + ping)
			fresh.answer(200)
			fresh.answer(200)
		})
	}
}

// TestLimits: clients that are slow or silent.
func TestLimits(t *testing.T) {
	p := startProgram(t, false, "read_header_timeout = \"1s\"\nread_timeout = \"2s\"\nidle_timeout = \"1s\"")
	for _, tt := range []struct {
		name, sent string
		before     int // answers before the limit
		status     int // of the answer at the limit; 0: none
		code       string
	}{
		{"nothing", "", 0, 0, ""},
		{"half a head", "GET /health HTTP/1.1\r\nHost: h\r\n", 0, 0, ""},
		{"half of the second head", ping + "GET /health HTTP/1.1\r\nHost: h\r\n", 1, 0, ""},
		{"no second request", ping, 1, 0, ""},
		{"half a body", post(chatPath, "{", "Content-Length: 100"), 0, 408, "body_timeout"},
		{"half a chunk", post(chatPath, "5\r\n{", "Transfer-Encoding: chunked"), 0, 408, "body_timeout"},
		{"half a trailer", post(chatPath, "2\r\n{}\r\n0\r\nX-T:", "Transfer-Encoding: chunked"), 0, 0, ""},
		{"half a body that nothing reads", post("/nothing", "{", "Content-Length: 100"), 0, 404, "not_found"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := p.client(t)
			c.send(tt.sent)
			for range tt.before {
				c.answer(200)
			}
			if tt.status != 0 {
				a := c.answer(tt.status)
				a.refusal(t, tt.code)
			}
			c.ends()
		})
	}
}

// TestRefusedHeads: the answer to a refused head has an error as OpenAI's API has it, at the address
// of clients and of operators.
func TestRefusedHeads(t *testing.T) {
	p := startProgram(t, false, "")
	list, _ := namedStreams(t)
	for _, n := range list {
		status, _, _ := strings.Cut(n.want, " ")
		if status < "400" || status > "599" {
			continue // the first request is accepted
		}
		for _, addr := range []string{p.addr, p.admin} {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(patience))
			go func() {
				conn.Write(n.stream)
				conn.(*net.TCPConn).CloseWrite()
			}()
			c := &client{conn, t, bufio.NewReader(conn)}
			resp := c.head("GET")
			b, err := io.ReadAll(resp.Body)
			if err != nil || strconv.Itoa(resp.StatusCode) != status || !resp.Close {
				t.Errorf("%s: got %d, close %v, %v, want %s", n.name, resp.StatusCode, resp.Close, err, status)
			}
			code := "invalid_head"
			if resp.StatusCode == 431 {
				code = "head_too_large"
			}
			wholeAnswer{resp, string(b)}.refusal(t, code)
			c.ends()
			conn.Close()
		}
	}
}
