package upstream

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// ErrEvicted is the cause of a call that EvictIdle ended because its engine is
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
	// Evict reports whether the call should end now because engine, the argument of
	// EvictIdle, is unresponsive. It is not called after the end of the call.
	Evict(engine any) bool
}

// callList lists the calls of one client that are in progress, so that EvictIdle can
// end them. Adding a call allocates nothing.
type callList struct {
	base     time.Time // origin of the times in entries
	mu       sync.Mutex
	first    *entry // guarded by mu
	lastRead int64  // the latest lastRead of calls that have ended; guarded by mu
}

// entry is one call in the list.
type entry struct {
	prev, next *entry // guarded by the list's mu
	listed     bool   // guarded by the list's mu
	pinned     bool   // guarded by the list's mu; the call cannot be evicted
	call       *call
	control    CallControl  // nil: the call cannot be evicted
	lastRead   atomic.Int64 // when bytes last came from the engine, since base; 0: never
}

// newCallList sets base to one second ago, so that no time is 0.
func newCallList() callList { return callList{base: time.Now().Add(-time.Second)} }

// lingers returns how long the call lingers if its context ends now.
func (s *entry) lingers(linger time.Duration) time.Duration {
	if linger > 0 && s.control != nil && !s.control.Lingers() {
		return 0
	}
	return linger
}

// noteRead notes that bytes have come from the engine.
func (l *callList) noteRead(s *entry, now time.Time) { s.lastRead.Store(int64(now.Sub(l.base))) }

// add puts the call on the list.
func (l *callList) add(s *entry, call *call, waiter CallControl) {
	s.call, s.control = call, waiter
	l.mu.Lock()
	defer l.mu.Unlock()
	s.listed = true
	if s.next = l.first; s.next != nil {
		s.next.prev = s
	}
	l.first = s
}

// remove takes the call off the list. Further calls do nothing.
func (l *callList) remove(s *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.listed {
		return
	}
	s.listed = false
	l.lastRead = max(l.lastRead, s.lastRead.Load())
	if s.next != nil {
		s.next.prev = s.prev
	}
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		l.first = s.next
	}
	s.prev, s.next = nil, nil
}

// pin makes the call immune to eviction.
func (l *callList) pin(s *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.pinned = true
}

// evictIdle evicts the calls whose control agrees. It does nothing if bytes came on any
// call within quiet.
func (l *callList) evictIdle(engine any, quiet time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.lastRead
	for s := l.first; s != nil; s = s.next {
		last = max(last, s.lastRead.Load())
	}
	if last != 0 && time.Since(l.base)-time.Duration(last) < quiet {
		return
	}
	for s := l.first; s != nil; s = s.next {
		if s.control != nil && !s.pinned && s.control.Evict(engine) {
			s.pinned = true // Evict is not called again
			s.call.interrupt()
		}
	}
}

// withdraw withdraws the calls that are not wanted any more.
func (l *callList) withdraw() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := l.first; s != nil; s = s.next {
		if s.control != nil && !s.pinned && s.control.Useless() {
			s.call.withdraw()
		}
	}
}

// Withdraw implements Client.
func (cl *client) Withdraw() { cl.calls.withdraw() }

// EvictIdle implements Client.
func (cl *client) EvictIdle(engine any, quiet time.Duration) { cl.calls.evictIdle(engine, quiet) }

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

// checkWanted asks, once the call has got a connection, whether the request should be sent.
// From then on withdraw ends the call. A call that withdraw has found before asks later, so no
// change of the answer is missed.
func (c *call) checkWanted(control CallControl) bool {
	if control == nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked = true
	return control.Wanted()
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

func (c *call) commit() bool {
	c.client.calls.pin(&c.entry)
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.evicted
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
	cl.calls.add(&c.entry, c, nil)
	if ctx.Done() != nil {
		c.stop = context.AfterFunc(ctx, c.hangUp)
	}
	if !c.enter(l.cn, waiting) {
		return nil, c.fail(l.cn, &Error{Op: OpHead})
	}
	l.cn.deadlines(time.Time{}, time.Time{})
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
	l.c.client.pool.drop()
}
