package http1

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// bufferSize is the size in bytes of the buffers in the pool. One read of it gets the head and
	// the body of most requests.
	bufferSize = 4 << 10
	// lingerLimit is how long a client may take to read an answer behind which the connection
	// closes with unread bytes. A close with unread bytes makes the kernel drop the answer.
	lingerLimit = 500 * time.Millisecond
	// lineOverhead is what a line counts beside its bytes, because its header field takes memory. HTTP/2
	// has the same number (RFC 9113 6.5.2).
	lineOverhead = 32
	// preface begins an HTTP/2 connection (RFC 9113 3.4).
	preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
)

// buffers has *[bufferSize]byte.
var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// conn is the connection of one client. One goroutine reads heads and runs the handler.
type conn struct {
	server *Server
	nc     net.Conn
	state  *tls.ConnectionState // nil without TLS
	remote string
	values context.Context

	// The bytes that have been read and not used are buf[r:w]. They belong to the goroutine of
	// the connection, while a handler runs to the reader of the body.
	buf      []byte // nil: r and w are 0
	r, w     int
	lineEnds int // bytes of empty lines that may come before the next head

	waits   atomic.Int64                   // see clock.go
	current atomic.Pointer[requestContext] // nil: no handler runs
	gone    atomic.Bool                    // the client has left
	taken   bool                           // a handler has taken over the connection
	reading *body                          // the handler may read it; nil: there is none
	watched leaving                        // how the server notices that the client leaves

	timing     sync.Mutex
	readTimed  bool // a handler has set a deadline for reads; guarded by timing
	writeTimed bool // the same for writes; guarded by timing
}

// request is the memory of one request and its answer. Handlers may keep it.
type request struct {
	http   http.Request
	url    url.URL
	ctx    requestContext
	body   body
	answer answer
}

// blank is copied for each request.
var blank http.Request

// serve serves the requests of a connection.
func (c *conn) serve() {
	defer c.finish()
	for first := true; ; first = false {
		text, err := c.readHead()
		if err != nil {
			c.refuse(err)
			return
		}
		if first && c.isHTTP2(text) {
			c.handOver(text)
			return
		}
		if !c.request(text) {
			return
		}
	}
}

// request serves the request with that head, and reports whether another one may follow.
func (c *conn) request(text string) bool {
	q := new(request)
	q.ctx.conn = c
	r := &q.http
	*r = *blank.WithContext(&q.ctx) // the only way to set the context
	h, err := parseHead(text, r, &q.url)
	if err != nil {
		c.refuse(err)
		return false
	}
	if !c.busy() {
		return false
	}
	r.RemoteAddr, r.TLS, r.Body = c.remote, c.state, http.NoBody
	q.answer = answer{conn: c, req: r, body: &q.body, length: -1, closes: h.close, keeps: h.keep, continues: h.continues, asked: h.continues}
	q.body.begin(c, r, h, &q.answer)
	c.current.Store(&q.ctx)
	c.release() // a body that comes slowly must not keep the memory of a large head
	if h.length != 0 {
		r.Body, c.reading = &q.body, &q.body
	} else {
		c.watch()
	}
	if c.gone.Load() || c.values.Err() != nil {
		q.ctx.cancel(context.Cause(c.values))
	}
	if r.Method == http.MethodOptions && r.RequestURI == "*" {
		q.answer.Header().Set("Content-Length", "0") // as net/http does
	} else {
		c.server.Handler.ServeHTTP(&q.answer, r)
	}
	if c.taken {
		q.ctx.cancel(context.Canceled)
		return false
	}
	more := q.answer.end()
	c.current.Store(nil)
	q.ctx.cancel(context.Canceled)
	c.reading = nil
	c.unwatch()
	c.endDeadlines(&q.answer)
	if !more {
		if c.r < c.w || q.body.broken.Load() {
			c.linger()
		}
		return false
	}
	return c.rest(r.Method == http.MethodPost)
}

// finish is the end of the connection's goroutine.
func (c *conn) finish() {
	if v := recover(); v != nil && v != http.ErrAbortHandler {
		c.server.Log.Error("a handler panicked", "panic", v, "stack", string(debug.Stack()))
	}
	if x := c.current.Load(); x != nil {
		x.cancel(context.Canceled)
	}
	if !c.taken {
		c.nc.Close()
	}
	if c.reading != nil && !c.taken { // a handler has panicked, and another goroutine may still read
		_ = c.reading.Close() // waits for it; the connection is closed
		c.reading = nil
	}
	c.unwatch()
	if c.reading == nil {
		c.r = c.w
		c.release()
	}
	c.server.forget(c)
}

// readHead reads up to the end of the next head. Its error is a Refusal, or one of the connection.
func (c *conn) readHead() (string, error) {
	line, at, overhead := 0, 0, 0 // behind c.r: where the current line begins, and how far lines have been searched
	for {
		if at == 0 { // empty lines may stand behind the body of a POST (RFC 9112 2.2)
			for ; c.lineEnds > 0 && c.r < c.w && (c.buf[c.r] == '\r' || c.buf[c.r] == '\n'); c.r++ {
				c.lineEnds--
			}
		}
		got := c.buf[c.r:c.w]
		for at < len(got) {
			i := bytes.IndexByte(got[at:], '\n')
			if i < 0 {
				at = len(got)
				break
			}
			at += i + 1
			switch {
			case at-line < 2 || got[at-2] != '\r':
				return "", BadLine
			case at-line > 2:
				line = at
				overhead += lineOverhead
			case line > 0 && at+overhead > c.server.HeadLimit:
				return "", HeadTooLarge
			case line > 0:
				text := string(got[:at])
				c.r += at
				return text, nil
			default:
				return "", Malformed
			}
		}
		if len(got)+overhead > c.server.HeadLimit {
			return "", HeadTooLarge
		}
		if err := c.fill(); err != nil {
			if err == io.EOF && c.r < c.w {
				return "", Malformed
			}
			return "", err
		}
		c.begun()
	}
}

// isHTTP2 reports whether the connection begins with the preface of HTTP/2, whose first bytes are
// the head text.
func (c *conn) isHTTP2(text string) bool {
	rest, ok := strings.CutPrefix(preface, text)
	if !ok || c.server.HTTP2 == nil {
		return false
	}
	for {
		got := string(c.buf[c.r:c.w])
		if len(got) >= len(rest) || got != rest[:len(got)] {
			return strings.HasPrefix(got, rest)
		}
		if c.fill() != nil {
			return false
		}
	}
}

// handOver gives an HTTP/2 connection away.
func (c *conn) handOver(text string) {
	if !c.busy() {
		return
	}
	c.taken = true
	c.server.HTTP2(&begunConn{Conn: c.nc, first: append([]byte(text), c.buf[c.r:c.w]...)})
}

// begunConn is a connection whose first bytes have been read.
type begunConn struct {
	net.Conn
	first []byte
}

// Read implements net.Conn.
func (c *begunConn) Read(p []byte) (int, error) {
	if len(c.first) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.first)
	if c.first = c.first[n:]; len(c.first) == 0 {
		c.first = nil
	}
	return n, nil
}

// NetConn returns the connection below.
func (c *begunConn) NetConn() net.Conn { return c.Conn }

// refuse answers a head that err refuses.
func (c *conn) refuse(err error) {
	why, ok := err.(Refusal)
	if !ok || c.waits.Load() < 0 {
		return
	}
	if _, err := c.nc.Write(c.server.Refuse(why)); err == nil {
		c.linger()
	}
}

// linger tells the client that nothing more comes, and drops what it sends until it has closed the
// connection too.
func (c *conn) linger() {
	w, ok := c.nc.(interface{ CloseWrite() error })
	if ok && w.CloseWrite() == nil && c.nc.SetReadDeadline(time.Now().Add(lingerLimit)) == nil {
		_, _ = io.Copy(io.Discard, c.nc) // the connection ends in any case
	}
}

// fill reads more bytes into buf.
func (c *conn) fill() error {
	c.grow()
	for range maxEmptyReads {
		n, err := c.nc.Read(c.buf[c.w:])
		c.w += n
		if n > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

// maxEmptyReads is how many reads in a row may return nothing, as in package bufio.
const maxEmptyReads = 100

// grow makes room in buf behind w.
func (c *conn) grow() {
	switch {
	case c.buf == nil:
		c.buf = newBuffer()
	case c.r == c.w:
		c.r, c.w = 0, 0
	case c.w < len(c.buf):
	case c.r > 0:
		c.w = copy(c.buf, c.buf[c.r:c.w])
		c.r = 0
	default:
		c.buf = append(c.buf, make([]byte, len(c.buf))...)
	}
}

// release gives an empty buffer back.
func (c *conn) release() {
	if c.buf == nil || c.r < c.w {
		return
	}
	freeBuffer(c.buf)
	c.buf, c.r, c.w = nil, 0, 0
}

// leave ends the running request of a client that has left. Safe for concurrent use.
func (c *conn) leave() {
	c.gone.Store(true)
	if x := c.current.Load(); x != nil {
		x.cancel(context.Canceled)
	}
}

// limitRest gives the client a limit of time for the rest of a body.
func (c *conn) limitRest() {
	c.timing.Lock()
	defer c.timing.Unlock()
	c.readTimed = true
	_ = c.nc.SetReadDeadline(time.Now().Add(c.server.HeadTime)) // the next read fails too
}

// endDeadlines removes the deadlines that the handler has set, and makes later calls on its answer
// have no effect.
func (c *conn) endDeadlines(a *answer) {
	c.timing.Lock()
	defer c.timing.Unlock()
	a.over = true
	if c.readTimed {
		c.readTimed = false
		_ = c.nc.SetReadDeadline(time.Time{}) // the next read fails too
	}
	if c.writeTimed {
		c.writeTimed = false
		_ = c.nc.SetWriteDeadline(time.Time{})
	}
}

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
