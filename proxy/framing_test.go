package proxy_test

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// A request with both framings reaches no handler. This test uses a real socket.
func TestFramingOverSocket(t *testing.T) {
	w := newWorld(t, world.Setup{Sockets: true})
	for _, cut := range []int{0, 30, 60, 80} {
		conn, err := w.DialPublic(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		body := world.Completions(false)
		req := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(body), len(body), body)
		io.WriteString(conn, req[:cut])
		io.WriteString(conn, req[cut:])
		answer, err := io.ReadAll(conn)
		conn.Close()
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 400 Bad Request\r\n") {
			t.Errorf("split at %d: got %q, %v", cut, answer, err)
		}
	}
	if n := len(w.Ended()); n != 0 {
		t.Errorf("got %d exchanges, want none", n)
	}
}
