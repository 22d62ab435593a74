package upstream

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// ErrEvicted is the cause of a call that was left because its engine has fallen
// silent (Client.EvictIdle).
var ErrEvicted = errors.New("the engine is silent")

// ErrUnwanted is the cause of a call that was not sent: its Waiter did not want it
// any more when its turn had come.
var ErrUnwanted = errors.New("the request is not wanted any more")

// CallControl is who waits for the answer of a call and could get it elsewhere. Its methods
// are called by any goroutine, must not block, and must not call the Client.
type CallControl interface {
	// Wanted reports whether the request is still to be sent. It is asked once, when
	// the call need not wait for a connection any more.
	Wanted() bool
	// Lingers reports whether the call, whose context has ended, is to go on for
	// Request.Linger. It is asked once at most, and only if that is not 0.
	Lingers() bool
	// Evict reports whether the call is to be left now, because of what Abandon
	// was told. It is not called any more when the call has ended.
	Evict(silent any) bool
}

// callList is the calls of one client that are under way, so that those which wait
// can be left. Nothing on it is allocated for a call.
type callList struct {
	base  time.Time // what seats count from
	mu    sync.Mutex
	first *seat // guarded by mu
	heard int64 // guarded by mu; that of the calls which have ended
}

// seat is the place of one call on the list.
type seat struct {
	prev, next *seat // guarded by the list's mu
	seated     bool  // guarded by the list's mu
	kept       bool  // guarded by the list's mu; it waits whatever comes
	call       interface{ quit() }
	waiter     CallControl  // nil: it waits whatever comes
	heard      atomic.Int64 // when something last came from the engine, since base; 0: never
}

// newCallList has its time begin a moment ago, so that no time is 0.
func newCallList() callList { return callList{base: time.Now().Add(-time.Second)} }

// lingers is how long a call of the request lingers whose context has ended now.
func (s *seat) lingers(linger time.Duration) time.Duration {
	if linger > 0 && s.waiter != nil && !s.waiter.Lingers() {
		return 0
	}
	return linger
}

// hear notes that something has come from the engine.
func (l *callList) hear(s *seat, now time.Time) { s.heard.Store(int64(now.Sub(l.base))) }

// sit puts the call on the list.
func (l *callList) sit(s *seat, call interface{ quit() }, waiter CallControl) {
	s.call, s.waiter = call, waiter
	l.mu.Lock()
	defer l.mu.Unlock()
	s.seated = true
	if s.next = l.first; s.next != nil {
		s.next.prev = s
	}
	l.first = s
}

// rise takes the call off the list, once.
func (l *callList) rise(s *seat) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.seated {
		return
	}
	s.seated = false
	l.heard = max(l.heard, s.heard.Load())
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

// keep has the call wait whatever comes.
func (l *callList) keep(s *seat) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.kept = true
}

// abandon leaves the calls whose waiters want that, unless something has come on
// any call within quiet.
func (l *callList) evictIdle(silent any, quiet time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.heard
	for s := l.first; s != nil; s = s.next {
		last = max(last, s.heard.Load())
	}
	if last != 0 && time.Since(l.base)-time.Duration(last) < quiet {
		return
	}
	for s := l.first; s != nil; s = s.next {
		if s.waiter != nil && !s.kept && s.waiter.Evict(silent) {
			s.kept = true // it is not asked again
			s.call.quit()
		}
	}
}

// EvictIdle implements Client.
func (cl *client) EvictIdle(silent any, quiet time.Duration) { cl.calls.evictIdle(silent, quiet) }

// EvictIdle implements Client.
func (cl *netHTTPClient) EvictIdle(silent any, quiet time.Duration) {
	cl.calls.evictIdle(silent, quiet)
}

// quit makes what the call waits for fail. A request that is out stays whole, for
// Left.
func (c *call) quit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		return
	}
	c.left = true
	switch {
	case c.undo != nil:
		c.undo()
	case c.conn == nil:
	case c.phase == sending: // one that had put the request out goes on to be left
		c.conn.SetWriteDeadline(time.Unix(1, 0))
	default:
		c.conn.readDeadline(time.Unix(1, 0))
	}
}

// undoable makes ctx one that quit ends, until done is called.
func (c *call) undoable() (ctx context.Context, done context.CancelFunc) {
	ctx, cancel := context.WithCancel(c.ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left {
		cancel()
	}
	c.undo = cancel
	return ctx, func() {
		c.mu.Lock()
		c.undo = nil
		c.mu.Unlock()
		cancel()
	}
}

// undone is why a context of undoable ended.
func (c *call) undone() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left && c.ctx.Err() == nil {
		return ErrEvicted
	}
	return contextError(c.ctx)
}

func (c *call) commit() bool {
	c.client.calls.keep(&c.seat)
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.left
}

// quit cuts the call: what the transport has sent cannot be taken over from it.
func (c *netHTTPCall) quit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended == nil && !c.over {
		c.left = true
		c.cut()
	}
}

func (c *netHTTPCall) commit() bool {
	c.client.calls.keep(&c.seat)
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.left
}

// Detached is a call that was left when its request was out (Request.Detach): the engine
// may yet answer. Await or Close must be called, once.
type Detached struct {
	c  *call
	cn *conn
}

// Await waits for the head of the answer, as Do does, until ctx ends, which closes
// the connection.
func (l *Detached) Await(ctx context.Context) (*Response, error) {
	cl := l.c.client
	c := &call{client: cl, ctx: ctx, idle: l.c.idle, once: true, sent: true, noBody: l.c.noBody}
	c.resp.body = c
	cl.calls.sit(&c.seat, c, nil)
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

// Close hangs up.
func (l *Detached) Close() {
	l.c.client.freeBuffer(l.cn)
	l.cn.discard()
	l.c.client.pool.drop()
}
