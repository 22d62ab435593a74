package http1

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// httpServer is what both servers have.
type httpServer interface {
	Serve(net.Listener) error
	Close() error
}

// refusal is the answer of newServer to a refused head.
func refusal(r Refusal) string { return "refused: " + r.Error() }

func newServer(h http.Handler) *Server {
	return &Server{
		Handler: h, Base: context.Background(), Refuse: func(r Refusal) []byte { return []byte(refusal(r)) },
		HeadLimit: 68 << 10, HeadTime: 10 * time.Second, IdleTime: time.Minute, Log: slog.New(slog.DiscardHandler),
	}
}

// serveScript serves one connection to its end, and returns what was written to it.
func serveScript(s httpServer, all string, cuts ...int) string {
	c := proxytest.NewScript(all, cuts...)
	served := make(chan struct{})
	go func() {
		s.Serve(proxytest.OneConn(c))
		close(served)
	}()
	<-c.Closed()
	s.Close()
	<-served
	return c.Sent()
}

// seen is a request as a handler gets it.
type seen struct {
	method, uri, path, query, host, proto, header, body, trailer string
	length                                                       int64
	failed, close                                                bool
}

// record is a handler that stores its requests.
type record struct {
	mu   sync.Mutex
	list []seen
}

func (l *record) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	h := r.Header.Clone()
	if v := h["Content-Length"]; len(v) > 0 {
		h["Content-Length"] = v[:1]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, seen{
		r.Method, r.RequestURI, r.URL.Path, r.URL.RawQuery, r.Host, r.Proto, fmt.Sprint(h), string(body), fmt.Sprint(r.Trailer),
		r.ContentLength, err != nil, r.Close,
	})
	io.WriteString(w, "served")
}

// both serves a connection with each server, and returns the requests that the handlers got, and
// what this server has written.
func both(all string, cuts ...int) (own, ref []seen, sent string) {
	var a, b record
	sent = serveScript(newServer(&a), all, cuts...)
	serveScript(&http.Server{Handler: &b, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}, all, cuts...)
	return a.list, b.list, sent
}

// answers reads the answers in what a server has written, up to a refusal.
func answers(t *testing.T, sent string, methods ...string) (list []string, rest string) {
	t.Helper()
	in := bufio.NewReader(strings.NewReader(sent))
	for i := 0; ; i++ {
		if b, err := in.Peek(len("HTTP/")); err != nil || string(b) != "HTTP/" {
			left, _ := io.ReadAll(in)
			return list, string(left)
		}
		method := http.MethodGet
		if i < len(methods) {
			method = methods[i]
		}
		resp, err := http.ReadResponse(in, &http.Request{Method: method})
		if err != nil {
			t.Fatalf("%v in %q", err, sent)
		}
		if resp.StatusCode < 200 && resp.StatusCode != 101 {
			i--
		}
		body, err := io.ReadAll(resp.Body)
		dated := resp.Header.Get("Date") != ""
		resp.Header.Del("Date")
		if resp.Close {
			resp.Header.Del("Connection") // net/http leaves it out in HTTP/1.0
		}
		list = append(list, fmt.Sprintf("%s %v dated=%v length=%d coding=%v close=%v trailer=%v %q %v", resp.Status, resp.Header, dated, resp.ContentLength, resp.TransferEncoding, resp.Close, resp.Trailer, body, err))
	}
}
