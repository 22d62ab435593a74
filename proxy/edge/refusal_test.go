package edge

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// A request that no handler gets has an answer with JSON, also behind answered requests of the
// same connection.
func TestRefusals(t *testing.T) {
	const first = "POST /first HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
	long := strings.Repeat("a", 70<<10)
	for _, tt := range []struct {
		name, head, code string
		status           int
		message          string // a part
	}{
		{"expectation", "POST / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\nContent-Length: 2\r\n\r\n{}", "invalid_head", 417, "100-continue"},
		{"expectation of HTTP/1.0", "POST / HTTP/1.0\r\nExpect: 200-ok\r\nContent-Length: 2\r\n\r\n{}", "invalid_head", 417, "100-continue"},
		{"expectation without a body", "GET / HTTP/1.1\r\nHost: a\r\nExpect: x\r\n\r\n", "invalid_head", 417, "100-continue"},
		{"long line", "GET / HTTP/1.1\r\nHost: a\r\nX-A: " + long + "\r\n\r\n", "head_too_large", 431, "65536 bytes"},
		{"long line without an end", "GET / HTTP/1.1\r\nHost: a\r\nX-A: " + long, "head_too_large", 431, "65536 bytes"},
		{"long path", "GET /" + long + " HTTP/1.1\r\nHost: a\r\n\r\n", "head_too_large", 431, "65536 bytes"},
		{"many lines", "GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("A: b\r\n", 20<<10) + "\r\n", "head_too_large", 431, "65536 bytes"},
		{"far too large", "GET / HTTP/1.1\r\nHost: a\r\nX-A: " + strings.Repeat("a", 1<<20) + "\r\n\r\n", "head_too_large", 431, "65536 bytes"},
		{"transfer coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\nhello", "invalid_head", 501, "Transfer-Encoding"},
		{"two transfer codings", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "invalid_head", 501, "Transfer-Encoding"},
		{"version", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", "invalid_head", 505, "version"},
		{"version 0.9", "GET /\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"no host", "GET / HTTP/1.1\r\n\r\n", "invalid_head", 400, "missing required Host header"},
		{"two hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"bad host", "GET / HTTP/1.1\r\nHost: a\"b\r\n\r\n", "invalid_head", 400, "malformed Host header"},
		{"bad name", "GET / HTTP/1.1\r\nHost: a\r\nA b: c\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"bad value", "GET / HTTP/1.1\r\nHost: a\r\nA: \x01\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"bad method", "G(T / HTTP/1.1\r\nHost: a\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"bad path", "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"no HTTP", "hello\r\n\r\n", "invalid_head", 400, "not valid HTTP"},
		{"cut head", "GET / HTTP/1.1\r\nHo", "invalid_head", 400, "not valid HTTP"},
		{"both framings", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "invalid_head", 400, "Content-Length and Transfer-Encoding"},
		{"bad length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello", "invalid_head", 400, "Content-Length and Transfer-Encoding"},
	} {
		for i, before := range []string{"", first, first + first, "", first} {
			own := i >= 3
			t.Run(fmt.Sprint(tt.name, " after ", len(before)/len(first), " own ", own), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var got []handled
					var sent string
					if own {
						got, sent = serveOwn(before+tt.head, len(before))
					} else {
						got, sent = serveStream(before+tt.head, true, len(before))
					}
					answered, _ := cutPlainRefusal(sent)
					if n := strings.Count(answered, "handled"); n != len(got) || n != len(before)/len(first) {
						t.Errorf("the handler got %+v, the client %q", got, answered)
					}
					status, code, message := checkRefusal(t, sent[len(answered):])
					if status != tt.status || code != tt.code || !strings.Contains(message, tt.message) {
						t.Errorf("got %d, %s, %q", status, code, message)
					}
				})
			})
		}
	}
}

// An answer of a handler passes unchanged, also one that looks like a refusal.
func TestRefusalOfHandler(t *testing.T) {
	const text = "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n431 Request Header Fields Too Large"
	conn := proxytest.NewScript("")
	c := &framingConn{Conn: conn, conns: new(clientConns)}
	c.handled.Store(true)
	if n, err := c.Write([]byte(text)); n != len(text) || err != nil || conn.Sent() != text {
		t.Errorf("got %d, %v, %q", n, err, conn.Sent())
	}
}

// OPTIONS * reaches no handler, but is no refusal.
func TestOptionsOfServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const request = "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"
		_, sent := serveStream(request+"GET / HTTP/1.1\r\n\r\n", true)
		answered, status := cutRefusal(t, sent)
		if !strings.HasPrefix(answered, "HTTP/1.1 200 OK\r\n") || status != "400" {
			t.Errorf("got %q", sent)
		}
	})
}

func TestOwnRefusal(t *testing.T) {
	for _, text := range []string{"", "HTTP/1.1 ", "HTTP/1.1 4", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 4x0 ", "HTTP/1.1\r\n431", "hello, this is a body"} {
		if e := ownRefusal([]byte(text)); e != nil {
			t.Errorf("%q: got %v", text, e)
		}
	}
}
