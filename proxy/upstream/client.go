package upstream

import (
	"context"
	"crypto/tls"
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
	pool   pool
	calls  callList
	reads  sync.Pool // *[readSize]byte
	writes sync.Pool // *message

	dials, reuses, retries atomic.Uint64
}

// New returns a Client with its own implementation of HTTP/1.1. The Client opens no
// connection before the first call.
func New(o Options) Client {
	o = o.withDefaults()
	c := &client{opt: o, bad: o.checkURL(), calls: newCallList()}
	if o.secure() {
		c.tls = o.tlsConfig("http/1.1")
	}
	c.pool.maxConns, c.pool.maxIdle, c.pool.idleTimeout = o.MaxConns, o.MaxIdle, o.IdleTimeout
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

// message is a request in wire form.
type message struct {
	head []byte   // pooled; also holds a small body
	rest [][]byte // the body if it is not in head: the caller's memory
}

func (cl *client) newMessage(req *Request) *message {
	m := cl.writes.Get().(*message)
	size := req.bodySize()
	m.head = req.appendHead(m.head[:0], cl.opt.URL.Host, size)
	limit := joinSize
	if cl.tls != nil {
		limit = joinSizeTLS
	}
	if len(m.head)+size <= limit {
		for _, b := range req.Body {
			m.head = append(m.head, b...)
		}
	} else {
		m.rest = req.Body
	}
	return m
}

func (cl *client) freeMessage(m *message) {
	m.rest = nil
	if cap(m.head) <= maxPooledWrite {
		cl.writes.Put(m)
	}
}

// Do implements Client.
func (cl *client) Do(ctx context.Context, req *Request) (*Response, error) {
	if err := req.check(); err != nil {
		return nil, &Error{Op: OpWrite, Err: err}
	}
	if cl.bad != nil {
		return nil, &Error{Op: OpDial, Err: cl.bad}
	}
	if ctx.Err() != nil {
		err := contextError(ctx)
		return nil, &Error{Op: OpDial, Timeout: isTimeout(err), Err: err}
	}
	c := &call{client: cl, ctx: ctx, sendBy: req.SendBy, idle: req.IdleTimeout, linger: req.Linger, once: req.Once, detachable: req.Detach, detachableLate: req.KeepLate, sentFunc: req.Sent, hints: req.Hints, noBody: req.Method == "HEAD"}
	c.resp.body = c
	cl.calls.add(&c.entry, c, req.Control)
	cn, err := cl.pool.take(c, untilSent(req.SendBy, req.HeadTimeout))
	if err != nil {
		c.forget()
		return nil, &Error{Op: OpCap, Timeout: isTimeout(err), Err: err}
	}
	if !c.checkWanted(req.Control) {
		if cn != nil {
			cl.pool.give(cn)
		} else {
			cl.pool.drop()
		}
		c.forget()
		return nil, &Error{Op: OpCap, Err: ErrUnwanted}
	}
	m := cl.newMessage(req)
	defer cl.freeMessage(m)
	if cn, err = cl.living(c, cn); err != nil {
		c.forget()
		return nil, err
	}
	if req.HeadTimeout > 0 {
		c.headBy = time.Now().Add(req.HeadTimeout)
	}
	return c.run(cn, m)
}

// living returns a usable connection. If cn, from the pool, is alive, living returns cn.
// If cn is dead, living tries the older idle connections. If cn is nil or all idle
// connections are dead, living opens a new one. On an error the slot is released.
func (cl *client) living(c *call, cn *conn) (*conn, error) {
	for cn != nil {
		if cn.alive() {
			cl.reuses.Add(1)
			return cn, nil
		}
		cn.abort()
		cn = cl.pool.swap()
	}
	return cl.dial(c)
}

// dial opens a connection in a slot that the caller holds. On an error the slot is
// released.
func (cl *client) dial(c *call) (*conn, error) {
	cl.dials.Add(1)
	ctx, done := c.interruptible()
	defer done()
	cn, err := dial(ctx, &cl.opt, cl.tls)
	if err == nil {
		return cn, nil
	}
	cl.pool.drop()
	if ctx.Err() != nil {
		err = c.waitError()
	}
	return nil, &Error{Op: OpDial, Sent: c.sent, Timeout: isTimeout(err), Local: IsLocal(err), Err: err}
}

// lendBuffer gives cn a read buffer.
func (cl *client) lendBuffer(cn *conn) {
	if cn.buf == nil {
		cn.buf = cl.reads.Get().(*[readSize]byte)[:]
		cn.r, cn.w = 0, 0
	}
}

// freeBuffer takes the read buffer back and drops the bytes in it.
func (cl *client) freeBuffer(cn *conn) {
	if len(cn.buf) == readSize {
		cl.reads.Put((*[readSize]byte)(cn.buf))
	}
	cn.buf, cn.r, cn.w = nil, 0, 0
}
