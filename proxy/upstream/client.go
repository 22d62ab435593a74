package upstream

import (
	"context"
	"crypto/tls"
	"sync"
	"sync/atomic"
	"time"
)

const (
	readSize = 4 << 10 // bytes of a read buffer: heads, and what comes with them

	// A request up to joinSize bytes is copied into one buffer, which costs
	// less than a vectored write; TLS, which cannot write vectors, joins more.
	joinSize    = 8 << 10
	joinSizeTLS = 64 << 10
	keepWrite   = 128 << 10 // largest write buffer that is kept

	// staleWithin is how soon after its request a reused connection must be
	// lost to count as one that the engine had closed before it saw the
	// request. A later loss is the engine dying at its work, and the caller's
	// to judge.
	staleWithin = time.Second
	// earlyWithin is how long a refused request looks for the answer that the
	// engine gave before it stopped reading.
	earlyWithin = time.Second
)

// client is the proxy's own Client. It starts no goroutine: a call runs in its
// caller's, and a timer closes what has been idle.
type client struct {
	opt    Options
	bad    error // of the options
	tls    *tls.Config
	pool   pool
	calls  callList
	reads  sync.Pool // *[readSize]byte
	writes sync.Pool // *message

	dials, reuses, retries atomic.Uint64
}

// New returns a Client that speaks HTTP/1.1 itself. It opens nothing before the
// first call.
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
	head []byte   // pooled; holds a small body too
	rest [][]byte // the body when it is not in head: the caller's memory
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
	if cap(m.head) <= keepWrite {
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
	c := &call{client: cl, ctx: ctx, sendBy: req.SendBy, idle: req.IdleTimeout, linger: req.Linger, once: req.Once, keeps: req.Detach, keepsLate: req.KeepLate, told: req.Sent, noBody: req.Method == "HEAD"}
	c.resp.body = c
	cl.calls.sit(&c.seat, c, req.Control)
	cn, err := cl.pool.take(c, untilSent(req.SendBy, req.HeadTimeout))
	if err != nil {
		c.forget()
		return nil, &Error{Op: OpCap, Timeout: isTimeout(err), Err: err}
	}
	if req.Control != nil && !req.Control.Wanted() {
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

// living returns a connection that can be used: cn, which comes from the pool,
// or an older one when that is dead, or a fresh one when cn is nil or all are
// dead. The slot is gone when it fails.
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

// dial opens a connection in a slot that is taken; the slot is gone when it fails.
func (cl *client) dial(c *call) (*conn, error) {
	cl.dials.Add(1)
	ctx, done := c.undoable()
	defer done()
	cn, err := dial(ctx, &cl.opt, cl.tls)
	if err == nil {
		return cn, nil
	}
	cl.pool.drop()
	if ctx.Err() != nil {
		err = c.undone()
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

// freeBuffer takes it back; what it still held is lost.
func (cl *client) freeBuffer(cn *conn) {
	if len(cn.buf) == readSize {
		cl.reads.Put((*[readSize]byte)(cn.buf))
	}
	cn.buf, cn.r, cn.w = nil, 0, 0
}
