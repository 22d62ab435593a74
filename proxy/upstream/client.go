package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	readSize = 4 << 10 // bytes of a read buffer: it holds heads, and the bytes that come with them

	// A request of up to joinSize bytes is copied into one buffer, which costs less
	// than a vectored write. TLS cannot write vectors, so it copies larger requests
	// too.
	joinSize       = 8 << 10
	joinSizeTLS    = 64 << 10
	maxPooledWrite = 128 << 10 // largest write buffer that is pooled

	// staleWithin bounds the time from a request to the loss of its reused connection
	// within which the client assumes that the engine had closed the connection before
	// it read the request. A later loss counts as a failure of the engine, which the
	// caller handles.
	staleWithin = time.Second
	// earlyWithin bounds how long the client, after a failed write, waits for an answer
	// that the engine sent before it stopped reading.
	earlyWithin = time.Second
)

// client is the proxy's own Client. It starts no goroutine: a call runs in its caller's
// goroutine, and a timer closes idle connections.
type client struct {
	opt    Options
	bad    error // why the options are unusable
	tls    *tls.Config
	joins  int // bytes up to which a request is sent in one piece: joinSize or joinSizeTLS
	pool   pool
	reads  sync.Pool // *[readSize]byte
	writes sync.Pool // *message

	dials, reuses, retries atomic.Uint64
}

// New returns a Client with its own implementation of HTTP/1.1. The Client opens no
// connection before the first call.
func New(o Options) Client {
	o = o.withDefaults()
	c := &client{opt: o, bad: o.checkURL(), joins: joinSize}
	if o.secure() {
		c.tls, c.joins = o.tlsConfig("http/1.1"), joinSizeTLS
	}
	c.pool.maxConns, c.pool.maxIdle, c.pool.idleTimeout = o.MaxConns, o.MaxIdle, o.IdleTimeout
	c.pool.base = time.Now().Add(-time.Second) // no time since base is 0
	c.reads.New = func() any { return new([readSize]byte) }
	c.writes.New = func() any { return new(message) }
	return c
}

// CloseIdle implements Client.
func (cl *client) CloseIdle() { cl.pool.closeIdle() }

// Stats implements Client.
func (cl *client) Stats() Stats {
	s := cl.pool.stats()
	s.Dials, s.Reuses, s.Retries = cl.dials.Load(), cl.reuses.Load(), cl.retries.Load()
	return s
}

// Do implements Client.
func (cl *client) Do(ctx context.Context, req *Request) (resp *Response, err error) {
	if err := req.check(); err != nil {
		return nil, &Error{Op: OpWrite, Err: err}
	}
	if ctx.Err() != nil {
		err := contextError(ctx)
		return nil, &Error{Op: OpDial, Timeout: isTimeout(err), Err: err}
	}
	c := &call{client: cl, ctx: ctx, control: req.Control, sendBy: req.SendBy, idle: req.IdleTimeout, linger: req.Linger, once: req.Once, detachable: req.Detach, detachableLate: req.KeepLate, sentFunc: req.Sent, hints: req.Hints, noBody: req.Method == http.MethodHead}
	c.resp.body = c
	cn, err := cl.pool.take(c, req.HeadTimeout)
	if err != nil {
		return nil, &Error{Op: OpCap, Timeout: isTimeout(err), Err: err}
	}
	defer func() {
		if resp == nil && err == nil { // a function of the caller has panicked
			c.forget(cn)
		}
	}()
	if req.Control != nil && !c.wanted() {
		cl.pool.give(c, cn)
		return nil, &Error{Op: OpCap, Err: ErrUnwanted}
	}
	for cn != nil && !cn.alive() { // then the older idle connections are tried
		cn.abort()
		cn = cl.pool.swap()
	}
	if cn != nil {
		cl.reuses.Add(1)
	} else if cn, err = cl.dial(c); err != nil {
		return nil, err
	}
	if c.start = time.Now(); req.HeadTimeout > 0 {
		c.headBy = c.start.Add(req.HeadTimeout)
	}
	m := cl.newMessage(req)
	resp, err = c.run(cn, m)
	if m.rest = nil; cap(m.head) <= maxPooledWrite {
		cl.writes.Put(m)
	}
	return resp, err
}

// dial opens a connection in a slot that the call holds. An error ends the call.
func (cl *client) dial(c *call) (*conn, error) {
	if cl.bad != nil {
		cl.pool.give(c, nil)
		return nil, &Error{Op: OpDial, Err: cl.bad}
	}
	cl.dials.Add(1)
	ctx, done := c.interruptible()
	defer done()
	cn, err := dial(ctx, &cl.opt, cl.tls)
	if err == nil {
		return cn, nil
	}
	cl.pool.give(c, nil)
	if ctx.Err() != nil {
		err = c.waitError()
	}
	return nil, &Error{Op: OpDial, Sent: c.sent, Timeout: isTimeout(err), Local: IsLocal(err), Err: err}
}

// check rejects a request that could not be written without changing its meaning.
func (r *Request) check() error {
	if r.Method != "" && !isToken(r.Method) {
		return errBadMethod
	}
	if r.Path == "" || r.Path[0] != '/' || !isFieldValue(r.Path) || strings.ContainsAny(r.Path, " \t") {
		return errBadPath
	}
	for i := range r.Header {
		f := &r.Header[i]
		if !isToken(f.Name) || !isFieldValue(f.Value) {
			return errBadField
		}
		if sameName(f.Name, "Transfer-Encoding") {
			return errBadCoding
		}
	}
	return nil
}

// ValidField reports whether a header field can be written unchanged: its name is a
// token, and its value has no control character but tab.
func ValidField(f Field) bool { return isToken(f.Name) && isFieldValue(f.Value) }

// isToken reports whether s is a token of RFC 9110, 5.6.2.
func isToken(s string) bool {
	for i := range len(s) {
		if !tokenBytes[s[i]] {
			return false
		}
	}
	return len(s) > 0
}

// tokenBytes has the bytes of which tokens consist.
var tokenBytes = func() (in [256]bool) {
	for _, c := range []byte("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		in[c] = true
	}
	return in
}()

// isFieldValue reports whether s has no control character but tab: above all no
// CR, LF or NUL.
func isFieldValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// sameName compares two field names or options, ignoring case.
func sameName(a, b string) bool { return len(a) == len(b) && strings.EqualFold(a, b) }

// message is a request in wire form.
type message struct {
	head []byte   // pooled; also holds a small body
	rest [][]byte // the body if it is not in head: the caller's memory
}

// newMessage returns a request that has passed check in wire form.
func (cl *client) newMessage(req *Request) *message {
	m := cl.writes.Get().(*message)
	b := append(m.head[:0], cmp.Or(req.Method, http.MethodGet)...)
	b = append(b, ' ')
	b = append(b, req.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, cl.opt.URL.Host...)
	b = append(b, "\r\n"...)
	for i := range req.Header {
		f := &req.Header[i]
		if sameName(f.Name, "Host") || sameName(f.Name, "Content-Length") {
			continue
		}
		b = append(b, f.Name...)
		b = append(b, ": "...)
		b = append(b, f.Value...)
		b = append(b, "\r\n"...)
	}
	size := 0
	for _, piece := range req.Body {
		size += len(piece)
	}
	// Without a body, only methods with which servers expect one have a length (RFC 9110, 8.6).
	if size > 0 || req.Method == http.MethodPost || req.Method == http.MethodPut || req.Method == http.MethodPatch {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, int64(size), 10)
		b = append(b, "\r\n"...)
	}
	b = append(b, "\r\n"...)
	if len(b)+size > cl.joins {
		m.head, m.rest = b, req.Body
		return m
	}
	for _, piece := range req.Body {
		b = append(b, piece...)
	}
	m.head = b
	return m
}

// freeBuffer takes the read buffer back and drops the bytes in it.
func (cl *client) freeBuffer(cn *conn) {
	if len(cn.buf) == readSize {
		cl.reads.Put((*[readSize]byte)(cn.buf))
	}
	cn.buf, cn.r, cn.w = nil, 0, 0
}
