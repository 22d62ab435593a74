package http1

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
)

// server is an HTTP/1.1 server whose handler records the requests of each connection.
type server struct {
	name string
	dial func() (net.Conn, error)
	*recorder
}

// patience bounds each wait for a server. It is not a claim about speed.
const patience = 45 * time.Second

// stall is how long a server may send nothing before the client ends its side. Only a server that
// waits for bytes where another reader has seen a whole request costs this time.
const stall = 20 * time.Second

// readers are the values of server.http1: what reads HTTP/1.1 in the proxy.
var readers = []string{config.HTTP1Own, config.HTTP1NetHTTP}

// eachReader runs a test for each reader of HTTP/1.1.
func eachReader(t *testing.T, f func(t *testing.T, reader string)) {
	for _, reader := range readers {
		t.Run(reader, func(t *testing.T) { f(t, reader) })
	}
}

// proxyServer returns what starts the server of the proxy toward clients, package edge, in this process.
func proxyServer(reader string) startServer {
	return func(t testing.TB, l net.Listener, dial func() (net.Conn, error)) server {
		t.Helper()
		return startEdge(t, reader, l, dial)
	}
}

// startServer starts a server of a listener.
type startServer func(testing.TB, net.Listener, func() (net.Conn, error)) server

func startEdge(t testing.TB, reader string, l net.Listener, dial func() (net.Conn, error)) server {
	t.Helper()
	cfg := config.Default()
	cfg.Admin.Listen = "127.0.0.1:0"
	cfg.Server.HTTP1 = reader
	e, err := edge.Listen(&cfg, edge.Options{
		Sockets: edge.Sockets{Public: l},
		Limits:  func() *config.Limits { return &cfg.Limits },
		Running: func() int { return 0 }, OnDrain: func() {}, CutGrace: time.Second,
		Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	r := newRecorder()
	e.Handle(r, http.NotFoundHandler())
	ctx, end := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	drain := func() time.Duration { return time.Second }
	go func() { ended <- e.Serve(ctx, edge.Limits{Drain: drain, Remaining: drain}) }()
	t.Cleanup(func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return server{reader, dial, r}
}

// netHTTPServer is net/http with its defaults.
func netHTTPServer(t testing.TB, l net.Listener, dial func() (net.Conn, error)) server {
	r := newRecorder()
	s := &http.Server{Handler: r, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return server{"net/http", dial, r}
}

// onSockets starts a server on a loopback address.
func onSockets(t testing.TB, start startServer) server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return start(t, l, func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) })
}

// inMemory starts a server on connections where each Read gets the bytes of one Write, so that a
// test decides where the reads of the server end.
func inMemory(t testing.TB, start startServer) server {
	t.Helper()
	l := &memoryListener{conns: make(chan net.Conn), done: make(chan struct{})}
	return start(t, l, l.dial)
}

// recorder is the handler. A target with the word unread leaves the body unread, and one with the
// word some reads three bytes. Safe for concurrent use.
type recorder struct {
	mu    sync.Mutex
	conns map[string][]message // by the client's address
}

func newRecorder() *recorder { return &recorder{conns: map[string][]message{}} }

// handled is the header of an answer of the recorder: the number of the request on its
// connection. An answer without it comes from the server.
const handled = "X-Handled"

// ServeHTTP implements http.Handler.
func (rec *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m := message{method: r.Method, target: r.RequestURI, proto: r.Proto, host: r.Host, headed: true}
	m.addAll(r.Header, false)
	var body []byte
	switch {
	case strings.Contains(m.target, "unread"):
		m.unread = true
	case strings.Contains(m.target, "some"):
		body, _ = io.ReadAll(io.LimitReader(r.Body, 3))
		m.unread = true
	default:
		var err error
		body, err = io.ReadAll(r.Body)
		m.whole = err == nil
		m.addAll(r.Trailer, true)
	}
	m.body = string(body)
	rec.mu.Lock()
	rec.conns[r.RemoteAddr] = append(rec.conns[r.RemoteAddr], m)
	n := len(rec.conns[r.RemoteAddr])
	rec.mu.Unlock()
	w.Header().Set(handled, strconv.Itoa(n))
	io.WriteString(w, "ok")
}

func (rec *recorder) of(client string) []message {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.conns[client]
}

func (rec *recorder) forget(client string) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	delete(rec.conns, client)
}

// answer is one answer as the client gets it.
type answer struct {
	status  int
	handled int    // the number of the request, 0: the answer is the server's own
	message string // of the server's own answers
	close   bool   // the answer announces the end of the connection
}

// observation is what a server made of a stream.
type observation struct {
	reading
	answers []answer
	reset   bool // the server did not read all bytes, and answers may be lost
}

// String describes an observation as testdata/streams.txt does.
func (o observation) String() string {
	var lines []string
	for _, m := range o.messages {
		lines = append(lines, m.String())
	}
	for _, a := range o.answers {
		if a.refusal() {
			lines = append(lines, fmt.Sprintf("%d %s", a.status, a.message))
		}
	}
	if o.closes() {
		lines = append(lines, "close")
	}
	if len(lines) == 0 {
		return "nothing"
	}
	return strings.Join(lines, "\n")
}

// closes reports whether the last answer announces the end of the connection.
func (o observation) closes() bool {
	n := len(o.answers)
	return n > 0 && o.answers[n-1].close
}

// refusal reports whether the server has refused a request by itself.
func (a answer) refusal() bool { return a.handled == 0 && a.status >= 400 }

// send sends a stream in pieces over a new connection. When as many answers have come as the stream
// has whole requests, send ends its side, and reads until the server ends the connection. An earlier
// end of its side could break the answers, because a server may take it for the end of the client.
func (s server) send(whole int, pieces ...[]byte) (o observation, err error) {
	c, err := s.dial()
	if err != nil {
		return o, err
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		tcp.SetLinger(0) // leaves no socket in TIME_WAIT
	}
	client := c.LocalAddr().String()
	defer s.forget(client)
	written, ended := make(chan struct{}), make(chan struct{})
	end := sync.OnceFunc(func() { close(ended) })
	go func() {
		defer close(written)
		for _, p := range pieces {
			if len(p) == 0 { // a Read of no byte means nothing
				continue
			}
			if _, err := c.Write(p); err != nil { // the server has refused the stream
				return
			}
		}
		<-ended
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	defer func() { end(); c.Close(); <-written }()
	in := &patientReader{c: c, stalled: end}
	o.answers, err = s.readAnswers(bufio.NewReader(in), client, whole, end)
	if o.reset = errors.Is(err, syscall.ECONNRESET); o.reset {
		err = nil
	}
	o.messages = inOrder(s.of(client), o.answers)
	for _, a := range o.answers {
		if a.refusal() {
			o.refused = fmt.Sprintf("%d %s", a.status, a.message)
		}
	}
	return o, err
}

// inOrder adds requests that the server has answered without the handler, OPTIONS * in net/http.
func inOrder(seen []message, answers []answer) (messages []message) {
	for _, a := range answers {
		switch {
		case a.handled > 0 && len(seen) > 0:
			messages, seen = append(messages, seen[0]), seen[1:]
		case a.handled == 0 && !a.refusal():
			messages = append(messages, message{method: http.MethodOptions, target: "*", headed: true, whole: true, own: true})
		}
	}
	return append(messages, seen...)
}

// readAnswers reads answers until the connection ends. It calls end after whole of them.
func (s server) readAnswers(in *bufio.Reader, client string, whole int, end func()) (answers []answer, err error) {
	last := 0
	for {
		if len(answers) >= whole {
			end()
		}
		if _, err := in.Peek(1); err == io.EOF {
			return answers, nil
		} else if err != nil {
			return answers, err
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return answers, fmt.Errorf("answer %d: %w", len(answers)+1, err)
		}
		if resp.StatusCode < 200 {
			continue
		}
		a := answer{status: resp.StatusCode, close: resp.Close}
		if a.handled, _ = strconv.Atoi(resp.Header.Get(handled)); a.handled != 0 {
			if last++; a.handled != last {
				return answers, fmt.Errorf("answer %d belongs to request %d", last, a.handled)
			}
		}
		if a.handled == 0 || s.of(client)[a.handled-1].method != http.MethodHead {
			body, err := io.ReadAll(resp.Body)
			if err != nil && (a.handled > 0 || !a.close) { // the body of an error is absent after HEAD
				return answers, fmt.Errorf("answer %d: %w", len(answers)+1, err)
			}
			a.message = refusalText(body)
		}
		answers = append(answers, a)
	}
}

// refusalText returns the message of an answer with an error as OpenAI's API has it.
func refusalText(body []byte) string {
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil {
		return ""
	}
	return e.Error.Message
}

// patientReader reads from a connection. If nothing comes for the time stall it calls stalled.
type patientReader struct {
	c       net.Conn
	stalled func()
	late    bool
}

func (r *patientReader) Read(p []byte) (int, error) {
	if !r.late {
		r.c.SetReadDeadline(time.Now().Add(stall))
		n, err := r.c.Read(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		r.late = true
		r.stalled()
	}
	r.c.SetReadDeadline(time.Now().Add(patience))
	return r.c.Read(p)
}

// memoryListener accepts the server's ends of connections in memory.
type memoryListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
	last  atomic.Uint32
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{} }

// dial returns the client's end of a new connection, which has an address of its own.
func (l *memoryListener) dial() (net.Conn, error) {
	n := l.last.Add(1)
	client := &net.TCPAddr{IP: net.IPv4(127, byte(n>>24), byte(n>>16), byte(n>>8)), Port: 1 + int(n&0xff)}
	a, b := net.Pipe()
	c, d := net.Pipe()
	select {
	case l.conns <- memoryConn{a, d, client, &net.TCPAddr{}}:
		return memoryConn{c, b, &net.TCPAddr{}, client}, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// memoryConn is one end of a connection whose directions end separately.
type memoryConn struct {
	net.Conn          // for reads
	out      net.Conn // for writes
	peer, me net.Addr
}

func (c memoryConn) Write(p []byte) (int, error) { return c.out.Write(p) }
func (c memoryConn) CloseWrite() error           { return c.out.Close() }
func (c memoryConn) LocalAddr() net.Addr         { return c.me }
func (c memoryConn) RemoteAddr() net.Addr        { return c.peer }
func (c memoryConn) Close() error {
	c.out.Close()
	return c.Conn.Close()
}
func (c memoryConn) SetDeadline(t time.Time) error {
	c.out.SetWriteDeadline(t)
	return c.Conn.SetReadDeadline(t)
}
func (c memoryConn) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }
