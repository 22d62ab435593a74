package clients

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// TestWire sends malformed or unusual requests over a separate socket.
func TestWire(t *testing.T) {
	fleet := startFleet(t, "vllm-nixl")
	limits := setup{server: "read_header_timeout = \"1s\"\nread_timeout = \"1s\"\nmax_body = \"10000B\"\nidle_timeout = \"2s\""}
	plain := startProxy(t, fleet, limits)
	limits.tls = "self_signed = true"
	secure := startProxy(t, fleet, limits)
	for _, w := range []wire{
		{"plain", plain, func(addr string) (net.Conn, error) { return net.Dial("tcp", addr) }},
		{"TLS", secure, func(addr string) (net.Conn, error) {
			return tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
		}},
	} {
		t.Run(w.name, func(t *testing.T) {
			t.Run("smuggling", w.smuggling)
			t.Run("good framing", w.goodFraming)
			t.Run("pipelined", w.pipelined)
			t.Run("slow head", w.slowHead)
			t.Run("slow body", w.slowBody)
			t.Run("body that no handler reads", w.unreadBody)
			t.Run("idle connection", w.idleConnection)
			t.Run("half-closed connection", w.halfClose)
			t.Run("reset in a stream", w.reset)
		})
	}
	t.Run("no handshake", func(t *testing.T) {
		c, err := net.Dial("tcp", secure.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		wantClosed(t, c)
	})
}

type wire struct {
	name string
	*front
	dial func(addr string) (net.Conn, error)
}

// open connects; every read and write ends within patience.
func (w wire) open(t *testing.T) net.Conn {
	t.Helper()
	c, err := w.dial(w.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// wantClosed reads until the other side has closed the connection.
func wantClosed(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetDeadline(time.Now().Add(patience))
	_, err := io.Copy(io.Discard, c)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection is still open after %s", patience)
	}
}

// post returns a POST with those headers.
func post(body string, lines ...string) string {
	return "POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n" + body
}

const small = `{"model":"sim","max_tokens":2,"prompt":"the sea"}`

func chunked(body string) string {
	cut := len(body) / 2
	return fmt.Sprintf("%x;ext=1\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n", cut, body[:cut], len(body)-cut, body[cut:])
}

// smuggling: two readers could see the end of such a request in different
// places. The proxy answers 400 and closes the connection, and no engine
// receives the request.
func (w wire) smuggling(t *testing.T) {
	length := fmt.Sprintf("Content-Length: %d", len(small))
	inner := post(small, length)
	tests := []struct {
		name, bytes string
	}{
		{"length first", post(chunked(small), length, "Transfer-Encoding: chunked")},
		{"encoding first", post(chunked(small), "Transfer-Encoding: chunked", length)},
		{"other case", post(chunked(small), "cOnTent-lEngth: 5", "TRANSFER-encoding: CHUNKED")},
		{"fields between", post(chunked(small), length, "X-A: "+strings.Repeat("a", 300), "X-B: b", "Transfer-Encoding: chunked")},
		{"folded", post(chunked(small), length, "Transfer-Encoding:\r\n chunked")},
		{"the same length twice", post(small, length, length)},
		{"length zero", post(chunked(small), "Content-Length: 0", "Transfer-Encoding: chunked")},
		{"with a second request inside", post("0\r\n\r\n"+inner, fmt.Sprintf("Content-Length: %d", len(inner)+5), "Transfer-Encoding: chunked")},
		{"two lengths", post(small, length, "Content-Length: 5")},
		{"list of lengths", post(small, fmt.Sprintf("Content-Length: %d, 5", len(small)))},
		{"the same length twice", post(small, length, length)},
		{"lines that end in LF", strings.ReplaceAll(post(small, length), "\r", "")},
		{"folded line", post(small, "X-A: a\r\n b", length)},
		{"signed length", post(small, fmt.Sprintf("Content-Length: +%d", len(small)))},
		{"space before the colon", post(chunked(small), length, "Transfer-Encoding : chunked")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before := w.engines(t).Requests
			for _, step := range []int{len(tt.bytes), 7, 1} { // in one write, in pieces, byte by byte
				c := w.open(t)
				go writeSteps(c, tt.bytes, step)
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatalf("in steps of %d: %v", step, err)
				}
				if resp.StatusCode != 400 {
					t.Errorf("in steps of %d: status %d, want 400", step, resp.StatusCode)
				}
				wantClosed(t, c)
			}
			if n := w.engines(t).Requests - before; n != 0 {
				t.Errorf("%d requests reached an engine", n)
			}
		})
	}
	t.Run("on a used connection", func(t *testing.T) {
		c := w.open(t)
		r := bufio.NewReader(c)
		for _, good := range []string{post(chunked(small), "Transfer-Encoding: chunked"), post(small, length)} {
			io.WriteString(c, good)
			wantStatus(t, r, 200)
		}
		before := w.engines(t).Requests
		io.WriteString(c, tests[0].bytes)
		wantStatus(t, r, 400)
		wantClosed(t, c)
		if n := w.engines(t).Requests - before; n != 0 {
			t.Errorf("%d requests reached an engine", n)
		}
	})
}

// writeSteps stops at the first error: the other side may close before the end.
func writeSteps(c net.Conn, text string, step int) {
	for len(text) > 0 {
		n := min(step, len(text))
		if _, err := io.WriteString(c, text[:n]); err != nil {
			return
		}
		text = text[n:]
	}
}

// wantStatus reads one whole answer.
func wantStatus(t *testing.T, r *bufio.Reader, status int) {
	t.Helper()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != status {
		t.Fatalf("got status %d, want %d, error %v: %.300s", resp.StatusCode, status, err, body)
	}
}

// goodFraming lists requests that the check of framing must accept, in any pieces.
func (w wire) goodFraming(t *testing.T) {
	misleading := strings.Replace(small, "the sea", `\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n`, 1)
	length := func(body string) string { return fmt.Sprintf("Content-Length: %d", len(body)) }
	for _, text := range []string{
		post(small, length(small)),
		post(misleading, length(misleading)),
		post(chunked(misleading), "Transfer-Encoding: chunked"),
		strings.TrimSuffix(post(chunked(small), "Transfer-Encoding: chunked", "Trailer: X-Sum"), "\r\n") + "X-Sum: Content-Length: 3\r\n\r\n",
	} {
		for _, step := range []int{len(text), 3} {
			c := w.open(t)
			r := bufio.NewReader(c)
			for range 2 { // the second shows that the first ended at the right place
				go writeSteps(c, text, step)
				wantStatus(t, r, 200)
			}
		}
	}
}

func (w wire) pipelined(t *testing.T) {
	c := w.open(t)
	length := fmt.Sprintf("Content-Length: %d", len(small))
	io.WriteString(c, post(small, length, "X-Request-Id: one")+post(chunked(small), "Transfer-Encoding: chunked", "X-Request-Id: two")+post(small, length, "X-Request-Id: three"))
	r := bufio.NewReader(c)
	for _, id := range []string{"one", "two", "three"} {
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		if resp.StatusCode != 200 || resp.Header.Get("X-Request-Id") != id {
			t.Errorf("got status %d, request id %q, want %q", resp.StatusCode, resp.Header.Get("X-Request-Id"), id)
		}
	}
}

// slowHead holds connections open with half a head: the proxy closes them and
// serves others.
func (w wire) slowHead(t *testing.T) {
	var held []net.Conn
	for range 50 {
		c := w.open(t)
		io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		held = append(held, c)
	}
	c := w.open(t)
	io.WriteString(c, post(small, fmt.Sprintf("Content-Length: %d", len(small))))
	wantStatus(t, bufio.NewReader(c), 200)
	for _, c := range held {
		wantClosed(t, c)
	}
}

// slowBody never sends the end of the body.
func (w wire) slowBody(t *testing.T) {
	c := w.open(t)
	io.WriteString(c, post(small, "Content-Length: 1000"))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 408 {
		t.Errorf("got status %d, want 408", resp.StatusCode)
	}
	wantClosed(t, c)
	w.waitIdle(t)
}

// unreadBody announces a body and does not send it, to an endpoint that answers
// without reading it. The answer arrives anyway, and the connection ends.
func (w wire) unreadBody(t *testing.T) {
	for _, tt := range []struct {
		name, head string
		status     int
	}{
		{"no such endpoint", "POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", 404},
		{"wrong method", "PUT /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 405},
		{"too large", post("", "Content-Length: 20000"), 413},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := w.open(t)
			io.WriteString(c, tt.head)
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != tt.status {
				t.Errorf("got status %d, want %d", resp.StatusCode, tt.status)
			}
			wantClosed(t, c)
		})
	}
}

func (w wire) idleConnection(t *testing.T) {
	c := w.open(t)
	io.WriteString(c, post(small, fmt.Sprintf("Content-Length: %d", len(small))))
	r := bufio.NewReader(c)
	wantStatus(t, r, 200)
	if _, err := r.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("an idle connection ends with %v, want EOF", err)
	}
}

// halfClose sends a request and its FIN. The proxy may serve the request or,
// like the engines, treat the client as gone. It must never give an incomplete
// answer as complete.
func (w wire) halfClose(t *testing.T) {
	c := w.open(t)
	io.WriteString(c, post(strings.Replace(small, ":2", ":20", 1), fmt.Sprintf("Content-Length: %d", len(small)+1)))
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil {
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode == 200 && !strings.Contains(string(body), `"choices"`) {
			t.Errorf("status 200 with body %q", body)
		}
	}
	w.waitIdle(t)
}

// reset closes the connection in the middle of a stream without a FIN.
func (w wire) reset(t *testing.T) {
	c := w.open(t)
	body := strings.Replace(small, `"max_tokens":2`, `"max_tokens":2000,"stream":true`, 1)
	io.WriteString(c, post(body, fmt.Sprintf("Content-Length: %d", len(body))))
	r := bufio.NewReader(c)
	for line := ""; !strings.HasPrefix(line, "data: "); {
		var err error
		if line, err = r.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	raw := c
	if tc, ok := c.(*tls.Conn); ok {
		raw = tc.NetConn()
	}
	raw.(*net.TCPConn).SetLinger(0)
	raw.Close()
	w.waitIdle(t)
}
