package upstream

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"
)

var pipeURL = &url.URL{Scheme: "http", Host: "engine:8000"}

// engine is a fake engine whose connections are in memory. Each write is one read at
// the client and waits for it, and each direction can be closed alone.
type engine struct {
	serve func(c *duplex, nth int) // called for each connection, the first is 1
	wg    sync.WaitGroup
	mu    sync.Mutex
	conns []*duplex
}

// newEngine returns an engine. Cleanup waits for the end of its connections.
func newEngine(t *testing.T, serve func(c *duplex, nth int)) *engine {
	e := &engine{serve: serve}
	t.Cleanup(e.stop)
	return e
}

func (e *engine) stop() {
	e.mu.Lock()
	for _, c := range e.conns {
		c.Close()
	}
	e.mu.Unlock()
	e.wg.Wait()
}

func (e *engine) dial(context.Context, string, string) (net.Conn, error) {
	client, server := newDuplex()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.conns = append(e.conns, server)
	nth := len(e.conns)
	e.wg.Go(func() {
		defer server.Close()
		e.serve(server, nth)
	})
	return client, nil
}

func (e *engine) options() Options { return Options{URL: pipeURL, Dial: e.dial} }

func (e *engine) dials() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.conns)
}

// duplex is one end of a connection that consists of two pipes.
type duplex struct {
	in, out net.Conn
	br      *bufio.Reader // for next
}

func newDuplex() (a, b *duplex) {
	ar, bw := net.Pipe()
	br, aw := net.Pipe()
	a, b = &duplex{in: ar, out: aw}, &duplex{in: br, out: bw}
	b.br = bufio.NewReader(b)
	return a, b
}

func (d *duplex) Read(p []byte) (int, error) {
	n, err := d.in.Read(p)
	if err == io.ErrClosedPipe {
		err = net.ErrClosed
	}
	return n, err
}

func (d *duplex) Write(p []byte) (int, error)        { return d.out.Write(p) }
func (d *duplex) CloseRead() error                   { return d.in.Close() }
func (d *duplex) Close() error                       { return errors.Join(d.in.Close(), d.out.Close()) }
func (d *duplex) LocalAddr() net.Addr                { return d.in.LocalAddr() }
func (d *duplex) RemoteAddr() net.Addr               { return d.in.RemoteAddr() }
func (d *duplex) SetReadDeadline(t time.Time) error  { return d.in.SetReadDeadline(t) }
func (d *duplex) SetWriteDeadline(t time.Time) error { return d.out.SetWriteDeadline(t) }
func (d *duplex) SetDeadline(t time.Time) error {
	return errors.Join(d.in.SetDeadline(t), d.out.SetDeadline(t))
}

// next reads one complete request. It returns nil when the client has closed the
// connection.
func (d *duplex) next() *http.Request {
	r, err := http.ReadRequest(d.br)
	if err != nil {
		return nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil
	}
	r.Body = io.NopCloser(&sliceReader{body})
	return r
}

type sliceReader struct{ b []byte }

func (s *sliceReader) Read(p []byte) (int, error) {
	if len(s.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.b)
	s.b = s.b[n:]
	return n, nil
}

// say writes the bytes of an answer.
func (d *duplex) say(s string) {
	if s != "" { // a pipe would block on an empty write until a read
		io.WriteString(d, s)
	}
}

const okAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// answering serves every request with okAnswer.
func answering(c *duplex, _ int) {
	for c.next() != nil {
		c.say(okAnswer)
	}
}

func get() *Request { return &Request{Method: "GET", Path: "/"} }

func post(body string) *Request {
	return &Request{Method: "POST", Path: "/v1/completions", Body: [][]byte{[]byte(body)}}
}

// ask makes one call and reads its whole answer. Any goroutine may call it.
func ask(t *testing.T, c Client, req *Request) (*Response, string) {
	t.Helper()
	resp, err := c.Do(t.Context(), req)
	if err != nil {
		t.Errorf("Do: %v", err)
		return new(Response), ""
	}
	defer resp.Close()
	body, err := io.ReadAll(resp)
	if err != nil {
		t.Errorf("read body: %v", err)
	}
	return resp, string(body)
}

// fault returns err as an *Error and checks its Op.
func fault(t *testing.T, err error, op string) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error = %v (%T), want *Error", err, err)
	}
	if e.Op != op {
		t.Errorf("Op = %q, want %q (%v)", e.Op, op, err)
	}
	return e
}

// client returns a Client of e whose idle connections are closed at the end of the
// test.
func (e *engine) client(t *testing.T, edit func(*Options)) Client {
	o := e.options()
	if edit != nil {
		edit(&o)
	}
	cl := New(o)
	t.Cleanup(cl.CloseIdle)
	return cl
}

func mustURL(s string) *url.URL {
	u, err := url.Parse(s)
	if err != nil {
		panic(err)
	}
	return u
}
