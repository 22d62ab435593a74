package upstream

import (
	"context"
	"io"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// phase is the progress of a call. It decides what happens when the call's context
// ends.
type phase uint8

const (
	sending phase = iota // the connection is closed
	waiting              // the connection is closed, or the call lingers if Request.Linger is set
	reading              // as waiting
)

// maxInformational is the maximum number of 1xx answers before the final one.
const maxInformational = 16

// call is one request and its answer on one connection. It belongs to the goroutine of
// Do, then to the reader of the body.
type call struct {
	resp       Response
	client     *client
	ctx        context.Context // its end runs ContextEnded
	stop       func() bool     // cancels that; nil if ctx is a registrar, or cannot end
	idle       time.Duration
	readAt     time.Time // when the read in progress began; used by the reader only
	idleBy     time.Time // the read deadline that is set; used by the reader only
	linger     time.Duration
	control    CallControl  // nil: the call cannot be evicted
	lastRead   atomic.Int64 // when bytes last came from the engine, since the pool's base; 0: never
	detachable bool         // Request.Detach
	// detachableLate is Request.KeepLate.
	detachableLate bool
	once           bool   // the request must not reach the engine twice
	sentFunc       func() // Request.Sent
	hints          interface{ EarlyHints(fields []Field) }
	noBody         bool // the request was HEAD
	sent           bool
	start          time.Time // when the call had its first connection
	headBy         time.Time // zero: no limit
	sendBy         time.Time // zero: no limit

	body     framing
	reusable bool  // the connection can be reused after the body
	err      error // returned by every further Read

	mu         sync.Mutex
	conn       *conn     // guarded by mu; nil between connections and after the end
	phase      phase     // guarded by mu
	follows    bool      // guarded by mu; the socket is locked while Each uses a piece
	ended      error     // why ctx ended, or ErrUnwanted; guarded by mu
	checked    bool      // guarded by mu; the call has a connection, and Wanted was asked
	evicted    bool      // the call was evicted and must end; guarded by mu, and set only with the pool's mu
	cancelWait func()    // guarded by mu; ends the wait for a connection
	lingerBy   time.Time // set when the context has ended and the call lingers; guarded by mu

	place  int  // in the pool's calls, from 1; 0: the call is not in progress; guarded by the pool's mu
	pinned bool // the call cannot be evicted; guarded by the pool's mu
}

// run sends m on cn and returns the answer. A reused connection that turns out to be
// dead is replaced once.
func (c *call) run(cn *conn, m *message) (*Response, error) {
	c.register()
	h, stale, err := c.exchange(cn, m)
	if err != nil && stale {
		c.client.retries.Add(1)
		c.detach(cn)
		if cn, err = c.client.dial(c); err != nil {
			c.unregister()
			return nil, err
		}
		h, _, err = c.exchange(cn, m)
	}
	if err != nil {
		return nil, c.fail(cn, err.(*Error))
	}
	if !c.enter(cn, reading) {
		return nil, c.fail(cn, &Error{Op: OpHead})
	}
	c.answer(cn, &h)
	return &c.resp, nil
}

// exchange sends m on cn and reads the head of the final answer. stale: the engine had
// closed cn before it could read the request.
func (c *call) exchange(cn *conn, m *message) (h head, stale bool, err error) {
	by := c.start.Add(c.client.opt.WriteTimeout)
	if !c.headBy.IsZero() && c.headBy.Before(by) {
		by = c.headBy
	}
	if !c.sendBy.IsZero() && c.sendBy.Before(by) {
		by = c.sendBy
	}
	cn.readDeadline(c.headBy)
	cn.SetWriteDeadline(by) // before enter, so that a deadline of ContextEnded comes later and wins
	if !c.enter(cn, sending) {
		return h, false, &Error{Op: OpWrite}
	}
	sent, err := cn.send(m)
	c.sent = c.sent || sent
	if err != nil {
		if c.stale(cn, err) {
			return h, true, &Error{Op: OpWrite, Err: err}
		}
		if h, ok := c.early(cn, err); ok {
			return h, false, nil
		}
		return h, false, &Error{Op: OpWrite, Err: err}
	}
	if c.sentFunc != nil {
		c.sentFunc()
	}
	if !c.enter(cn, waiting) {
		return h, false, &Error{Op: OpHead}
	}
	h, answered, err := c.awaitHead(cn)
	if err != nil {
		return h, !answered && c.stale(cn, err), &Error{Op: OpHead, Err: err}
	}
	return h, false, nil
}

// enter begins a phase on cn. It returns false if the context has ended, unless the request has been
// sent and the call lingers, or if the call was evicted.
func (c *call) enter(cn *conn, ph phase) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn, c.phase = cn, ph
	switch {
	case c.ended == nil:
		return !c.evicted
	case c.linger == 0 || ph == sending:
		return false
	case c.lingerBy.IsZero():
		c.limitLinger()
	}
	return true
}

// awaitHead reads the head of the final answer. answered: at least one byte of an answer
// arrived.
func (c *call) awaitHead(cn *conn) (h head, answered bool, err error) {
	if cn.buf == nil {
		cn.buf = c.client.reads.Get().(*[readSize]byte)[:]
	}
	for range maxInformational {
		raw, some, err := cn.readHead(c.client.opt.MaxHeadBytes)
		answered = answered || some
		if err != nil {
			return h, answered, err
		}
		c.noteRead(time.Now())
		if h, err = parseHead(raw); err != nil {
			return h, true, err
		}
		if h.status == http.StatusSwitchingProtocols {
			return h, true, errSwitched
		}
		if h.status >= 200 {
			return h, true, nil
		}
		if h.status == http.StatusEarlyHints && c.hints != nil {
			c.hints.EarlyHints(h.fields)
		}
	}
	return h, true, errInformations
}

// noteRead notes that bytes have come from the engine.
func (c *call) noteRead(now time.Time) { c.lastRead.Store(int64(now.Sub(c.client.pool.base))) }

// answer fills in the response. An answer without body ends here.
func (c *call) answer(cn *conn, h *head) {
	c.resp.Status, c.resp.Header, c.resp.ContentLength = h.status, h.fields, h.length
	c.reusable = h.keepAlive
	switch {
	case c.noBody:
	case h.status == http.StatusNoContent || h.status == http.StatusNotModified:
		c.resp.ContentLength = 0
	case h.chunked:
		c.body = framing{kind: byChunks, state: inSize}
	case h.length > 0:
		c.body = framing{kind: byLength, state: inData, left: h.length}
	case h.length < 0:
		c.body = framing{kind: byClose, state: inData, left: math.MaxInt64}
		c.reusable = false
	}
	if c.body.state == inEnd {
		c.finish(cn)
	}
}

// finish ends the call after the whole answer.
func (c *call) finish(cn *conn) {
	c.err, cn.served = io.EOF, true
	clean := cn.r == cn.w // false: the engine sent bytes after its answer
	c.client.freeBuffer(cn)
	first, ended := c.end()
	if first == nil {
		return
	}
	if !c.reusable || !clean || ended != nil {
		cn.abort()
		cn = nil
	}
	c.client.pool.give(c, cn)
}

// end takes the connection out of the call. It returns nil for all but the first
// caller: Close, or the reader that finished or failed. The first caller removes the call
// from the pool.
func (c *call) end() (cn *conn, ended error) {
	c.mu.Lock()
	cn, ended = c.conn, c.ended
	c.conn = nil
	c.mu.Unlock()
	if cn != nil {
		c.unregister()
	}
	return cn, ended
}

// stale reports whether the loss of cn, by err, shows that the engine had closed it
// before it could read the request.
func (c *call) stale(cn *conn, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cn.served && !(c.once && c.sent) && c.ended == nil && !isTimeout(err) && time.Since(c.start) < staleWithin
}

// early reads the answer of an engine that rejected the request before it had read all
// of it, and then closed the connection. err is how sending failed.
func (c *call) early(cn *conn, err error) (head, bool) {
	if isTimeout(err) || !c.enter(cn, reading) { // reading, not waiting: a call in this state must not linger
		return head{}, false
	}
	by := time.Now().Add(earlyWithin)
	if !c.headBy.IsZero() && c.headBy.Before(by) {
		by = c.headBy
	}
	c.mu.Lock()
	if c.ended == nil && !c.evicted { // else the deadline of ContextEnded or interrupt stays
		cn.readDeadline(by)
	}
	c.mu.Unlock()
	h, _, err := c.awaitHead(cn)
	h.keepAlive = false
	return h, err == nil
}

// detach closes a stale connection and keeps its slot in the pool.
func (c *call) detach(cn *conn) {
	c.mu.Lock()
	c.conn = nil
	c.mu.Unlock()
	c.client.freeBuffer(cn)
	cn.abort()
}

// forget ends a call that a panic has left. cn is its first connection, or nil.
func (c *call) forget(cn *conn) {
	if last, _ := c.end(); last != nil {
		cn = last
	}
	if cn != nil {
		cn.abort()
	}
	c.client.pool.give(c, nil)
}

// fail ends the call with e, and fills in the fields that only the call has. If the context has
// ended, its error is the cause, whatever error the connection returned.
func (c *call) fail(cn *conn, e *Error) *Error {
	first, ended := c.end()
	if first != nil {
		c.client.pool.remove(c)
	}
	c.mu.Lock()
	left, phase := c.evicted, c.phase
	c.mu.Unlock()
	switch {
	case ended != nil:
		e.Err = ended
	case first == nil:
		e.Err = ErrClosed
	case left:
		e.Err = ErrEvicted
	}
	late := e.Op == OpHead && isTimeout(e.Err)
	if ended == nil && first != nil && phase == waiting && (left && c.detachable || late && c.detachableLate) {
		e.Detached = &Detached{c, first}
		first = nil
	} else if cn != nil {
		c.client.freeBuffer(cn)
	}
	if first != nil {
		if left {
			first.discard()
		} else {
			first.abort()
		}
		c.client.pool.give(c, nil)
	}
	e.Sent, e.Timeout = c.sent, isTimeout(e.Err)
	return e
}

// limitLinger begins the linger: cn will not be reused, and reading ends at lingerBy.
// mu is held.
func (c *call) limitLinger() {
	c.lingerBy = time.Now().Add(c.linger)
	if c.phase == waiting && !c.headBy.IsZero() && c.headBy.Before(c.lingerBy) {
		c.lingerBy = c.headBy
	}
	c.conn.readDeadline(c.lingerBy)
}

// registrar is a context that tells a call of its end without a channel and without an allocation.
type registrar interface {
	Register(e interface{ ContextEnded() })
	Unregister(e interface{ ContextEnded() }) bool
}

// register makes the end of the context run ContextEnded.
func (c *call) register() {
	if ctx, ok := c.ctx.(registrar); ok {
		ctx.Register(c)
	} else if c.ctx.Done() != nil {
		c.stop = context.AfterFunc(c.ctx, c.ContextEnded)
	}
}

// unregister prevents a later ContextEnded.
func (c *call) unregister() {
	if ctx, ok := c.ctx.(registrar); ok {
		ctx.Unregister(c)
	} else if c.stop != nil {
		c.stop()
	}
}

// ContextEnded runs in its own goroutine when the context has ended.
func (c *call) ContextEnded() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave(contextError(c.ctx))
}

// leave closes the connection, or begins the linger. A call that lingers already continues. mu
// is held.
func (c *call) leave(why error) {
	if c.ended != nil {
		return
	}
	c.ended = why
	if c.conn != nil && c.linger > 0 && c.control != nil && !c.control.Lingers() {
		c.linger = 0
	}
	switch {
	case c.conn == nil:
	case c.linger == 0:
		c.abort(c.conn)
	case c.phase == sending:
		// A blocked write fails. If the write has already finished, the call continues
		// and lingers.
		c.conn.SetWriteDeadline(time.Unix(1, 0))
	default:
		c.limitLinger()
	}
}

// abort closes cn. Closing waits for a reader in Each that is using a piece, so abort
// first shuts down the sending side, which the engine notices at once. mu is held.
func (c *call) abort(cn *conn) {
	if half, ok := cn.socket.(interface{ CloseWrite() error }); ok && c.follows {
		_ = half.CloseWrite() // an error does not matter: the close below ends the connection
	}
	cn.abort()
}
