package upstream

import (
	"context"
	"errors"
	"time"
)

// ErrEvicted is the cause of a call that EvictIdle ended, mostly because its engine is
// unresponsive.
var ErrEvicted = errors.New("the engine is unresponsive")

// ErrUnwanted is the cause of a call that is not needed any more: CallControl.Wanted returned false
// when the call got a connection, or Useless returned true when Withdraw asked later.
var ErrUnwanted = errors.New("the request is not wanted any more")

// CallControl has the decisions of Do's caller about a call in progress. Any goroutine
// may call its methods. They must not block and must not call the Client.
type CallControl interface {
	// Wanted reports whether the request should still be sent. It is called once, when the
	// call has got a connection.
	Wanted() bool
	// Useless reports whether the answer is not needed any more. Each Withdraw calls it until
	// the call has ended.
	Useless() bool
	// Lingers reports whether the call, whose context has ended or which is not wanted any
	// more, should continue for Request.Linger. It is called at most once, and only if
	// Linger is not 0.
	Lingers() bool
	// Evict reports whether the call should end now because of engine, the argument of
	// EvictIdle. It is not called after the end of the call.
	Evict(engine any) bool
}

// EvictIdle implements Client.
func (cl *client) EvictIdle(engine any, quiet time.Duration) {
	p := &cl.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	last := p.lastRead
	for _, c := range p.calls {
		last = max(last, c.lastRead.Load())
	}
	if last != 0 && time.Since(p.base)-time.Duration(last) < quiet {
		return
	}
	for _, c := range p.calls {
		if c.control != nil && !c.pinned && c.control.Evict(engine) {
			c.pinned = true // Evict is not called again
			c.interrupt()
		}
	}
}

// Withdraw implements Client.
func (cl *client) Withdraw() {
	p := &cl.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.calls {
		if c.control != nil && !c.pinned && c.control.Useless() {
			c.withdraw()
		}
	}
}

// wanted reports whether the request is still to be sent. From now on Withdraw ends the call. wanted
// calls Wanted under mu, so that Wanted knows of an earlier Withdraw.
func (c *call) wanted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked = true
	return c.control.Wanted()
}

// interrupt makes the step that the call waits for fail. If the request is sent
// already, the connection stays open, for Detached.
func (c *call) interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		return
	}
	c.evicted = true
	switch {
	case c.cancelWait != nil:
		c.cancelWait()
	case c.conn == nil:
	case c.phase == sending: // if the write has finished, the call continues and is evicted in its next phase
		c.conn.SetWriteDeadline(time.Unix(1, 0))
	default:
		c.conn.readDeadline(time.Unix(1, 0))
	}
}

// withdraw ends the call as the end of its context does. A call that waits for a connection
// keeps its place.
func (c *call) withdraw() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.checked {
		c.leave(ErrUnwanted)
	}
}

// interruptible returns a child of the call's context that interrupt cancels, until
// done is called.
func (c *call) interruptible() (ctx context.Context, done context.CancelFunc) {
	ctx, cancel := context.WithCancel(c.ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.evicted {
		cancel()
	}
	c.cancelWait = cancel
	return ctx, func() {
		c.mu.Lock()
		c.cancelWait = nil
		c.mu.Unlock()
		cancel()
	}
}

// waitError returns why a context of interruptible ended.
func (c *call) waitError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.evicted && c.ctx.Err() == nil {
		return ErrEvicted
	}
	return contextError(c.ctx)
}

// Detached is a call that was evicted after its request was sent (Request.Detach): the
// engine may still answer. The caller must call either Await or Close, once.
type Detached struct {
	c  *call
	cn *conn
}

// Await waits for the head of the answer, as Do does. The end of ctx closes the
// connection.
func (l *Detached) Await(ctx context.Context) (*Response, error) {
	cl := l.c.client
	c := &call{client: cl, ctx: ctx, idle: l.c.idle, once: true, sent: true, noBody: l.c.noBody}
	c.resp.body = c
	cl.pool.add(c)
	c.register()
	if !c.enter(l.cn, waiting) {
		return nil, c.fail(l.cn, &Error{Op: OpHead})
	}
	l.cn.readDeadline(time.Time{})
	l.cn.SetWriteDeadline(time.Time{})
	h, _, err := c.awaitHead(l.cn)
	if err != nil {
		return nil, c.fail(l.cn, &Error{Op: OpHead, Err: err})
	}
	if !c.enter(l.cn, reading) {
		return nil, c.fail(l.cn, &Error{Op: OpHead})
	}
	c.answer(l.cn, &h)
	return &c.resp, nil
}

// Close closes the connection.
func (l *Detached) Close() {
	l.c.client.freeBuffer(l.cn)
	l.cn.discard()
	l.c.client.pool.give(l.c, nil)
}
