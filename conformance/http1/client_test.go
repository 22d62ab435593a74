package http1

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

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
