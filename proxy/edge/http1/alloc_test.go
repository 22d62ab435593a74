package http1

import (
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// endless is a connection whose client sends the same request again and again, as the server reads.
type endless struct {
	*proxytest.Script
	request string
	left    int // requests
}

func (c *endless) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	c.left--
	return copy(p, c.request), nil
}

func (c *endless) Write(p []byte) (int, error) { return len(p), nil }

// serveEndless serves n requests. It does not watch for the client to leave.
func serveEndless(s *Server, request string, n int) {
	c := &endless{Script: proxytest.NewScript(""), request: request, left: n}
	k := s.newConn(c)
	k.watched.socket = watched{}
	k.serve()
}

// watched is a socket that the kernel watches.
type watched struct{ syscall.RawConn }

const typical = "POST /v1/completions HTTP/1.1\r\nHost: proxy:8080\r\nUser-Agent: x/1.0\r\nContent-Type: application/json\r\nAccept: */*\r\nAuthorization: Bearer abc\r\nContent-Length: 5\r\n\r\nhello"

// maxRequestAllocs is the number of allocations for a request and its answer: the request with its
// context and its answer, the head as a string, two maps, and the values of the header.
const maxRequestAllocs = 9

func TestRequestAllocs(t *testing.T) {
	body := []byte(strings.Repeat("x", 500))
	s := newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var b [16]byte
		for {
			if _, err := r.Body.Read(b[:]); err != nil {
				break
			}
		}
		w.Header()["Content-Type"] = jsonType
		w.Write(body)
	}))
	s.start(proxytest.OneConn(nil))
	defer s.Close()
	if n := testing.AllocsPerRun(20, func() { serveEndless(s, typical, 100) }) / 100; n > maxRequestAllocs {
		t.Errorf("%v allocations a request", n)
	} else {
		t.Logf("%v allocations a request", n)
	}
}

var jsonType = []string{"application/json"}

func TestEventAllocs(t *testing.T) {
	event := []byte("data: {\"choices\":[{\"text\":\"x\"}]}\n\n")
	s := newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		rc := http.NewResponseController(w)
		if n := testing.AllocsPerRun(1000, func() { w.Write(event); rc.Flush() }); n > 0 {
			t.Errorf("%v allocations an event", n)
		}
	}))
	s.start(proxytest.OneConn(nil))
	defer s.Close()
	serveEndless(s, typical, 1)
}

func BenchmarkRequest(b *testing.B) {
	body := []byte(strings.Repeat("x", 500))
	s := newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header()["Content-Type"] = jsonType
		w.Write(body)
	}))
	s.start(proxytest.OneConn(nil))
	defer s.Close()
	b.ReportAllocs()
	serveEndless(s, typical, b.N)
}
