package upstream

import (
	"context"
	"io"
	"net/http"
	"sync"
	"time"
)

// phase is how far a call has come; it decides what the end of its context does.
type phase uint8

const (
	sending phase = iota // the connection is closed
	waiting              // or lingers, if the request asks for that
	reading              // likewise
)

// maxInformational is how many 1xx answers may precede the final one.
const maxInformational = 16

// call is one request and its answer on one connection. Do's goroutine owns it,
// then the reader of the body.
type call struct {
	resp   Response
	client *client
	ctx    context.Context // ended: hangUp
	stop   func() bool     // undoes that; nil when ctx cannot end
	idle   time.Duration
	readAt time.Time // when the read under way began; the reader's
	idleBy time.Time // the read deadline that is set; the reader's
	linger time.Duration
	seat   seat // on the client's list of calls
	keeps  bool // Request.Detach
	// keepsLate is Request.KeepLate.
	keepsLate bool
	once      bool   // the request must not reach the engine twice
	told      func() // Request.Sent
	noBody    bool   // the request was HEAD
	sent      bool
	headBy    time.Time // zero: no limit
	sendBy    time.Time // likewise

	body framing
	keep bool  // the connection can be used again after the body
	err  error // of every further Read

	mu       sync.Mutex
	conn     *conn     // guarded by mu; nil between connections and after the end
	phase    phase     // guarded by mu
	follows  bool      // guarded by mu; the socket is locked while a piece is used
	ended    error     // guarded by mu; why ctx ended
	left     bool      // guarded by mu; nobody waits for the answer any more
	undo     func()    // guarded by mu; ends the wait for a connection
	lingerBy time.Time // guarded by mu; set when the context ended and the call goes on
}

// run sends m on cn and returns the answer. A reused connection that turns out
// to be dead is replaced once.
func (c *call) run(cn *conn, m *message) (*Response, error) {
	if c.ctx.Done() != nil {
		c.stop = context.AfterFunc(c.ctx, c.hangUp)
	}
	h, stale, err := c.exchange(cn, m)
	if err != nil && stale {
		c.client.retries.Add(1)
		c.detach(cn)
		if cn, err = c.client.dial(c); err != nil {
			c.forget()
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

// exchange sends m on cn and reads the head of the final answer. stale says
// that the engine had closed cn before it could see the request.
func (c *call) exchange(cn *conn, m *message) (h head, stale bool, err error) {
	start := time.Now()
	if !c.enter(cn, sending) {
		return h, false, &Error{Op: OpWrite}
	}
	sent, err := cn.send(m)
	c.sent = c.sent || sent
	if err != nil {
		if c.stale(cn, start, err) {
			return h, true, &Error{Op: OpWrite, Err: err}
		}
		if h, ok := c.early(cn, err); ok {
			return h, false, nil
		}
		return h, false, &Error{Op: OpWrite, Err: err}
	}
	if c.told != nil {
		c.told()
	}
	if !c.enter(cn, waiting) {
		return h, false, &Error{Op: OpHead}
	}
	h, answered, err := c.awaitHead(cn)
	if err != nil {
		return h, !answered && c.stale(cn, start, err), &Error{Op: OpHead, Err: err}
	}
	return h, false, nil
}

// stale judges the loss of cn, on which no answer came to the request sent at start.
func (c *call) stale(cn *conn, start time.Time, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cn.served && !(c.once && c.sent) && c.ended == nil && !isTimeout(err) && time.Since(start) < staleWithin
}

// early looks for the answer of an engine that refused the request before it
// had read it, and then closed the connection: err is how sending failed.
func (c *call) early(cn *conn, err error) (head, bool) {
	if isTimeout(err) || !c.enter(cn, reading) { // not waiting: nothing to linger for
		return head{}, false
	}
	by := time.Now().Add(earlyWithin)
	if !c.headBy.IsZero() {
		by = earlier(by, c.headBy)
	}
	cn.readDeadline(by)
	h, _, err := c.awaitHead(cn)
	h.keep = false
	return h, err == nil
}

// awaitHead reads the head of the final answer; answered says whether any byte
// of an answer came.
func (c *call) awaitHead(cn *conn) (h head, answered bool, err error) {
	c.client.lendBuffer(cn)
	for range maxInformational {
		raw, some, err := cn.readHead(c.client.opt.MaxHeadBytes)
		answered = answered || some
		if err != nil {
			return h, answered, err
		}
		c.client.calls.hear(&c.seat, time.Now())
		if h, err = parseHead(raw); err != nil {
			return h, true, err
		}
		if h.status == http.StatusSwitchingProtocols {
			return h, true, errSwitched
		}
		if h.status >= 200 {
			return h, true, nil
		}
	}
	return h, true, errInformations
}

// answer fills in the response. An answer without body ends here.
func (c *call) answer(cn *conn, h *head) {
	c.resp.Status, c.resp.Header, c.resp.ContentLength = h.status, h.fields, h.length
	c.keep = h.keep
	switch {
	case c.noBody:
		c.body = framing{}
	case h.status == http.StatusNoContent || h.status == http.StatusNotModified:
		c.resp.ContentLength = 0
		c.body = framing{}
	case h.chunked:
		c.body = framing{kind: byChunks}
	case h.length >= 0:
		c.body = framing{kind: byLength, left: h.length}
	default:
		c.body = framing{kind: byClose}
		c.keep = false
	}
	if c.body.done() {
		c.finish(cn)
	}
}

// enter begins a phase on cn. false: the context has ended, and with it the
// call, unless it lingers.
func (c *call) enter(cn *conn, ph phase) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn, c.phase = cn, ph
	switch {
	case c.left && c.ended == nil:
		return false
	case c.ended == nil:
		if ph == sending {
			c.limitSending()
		}
		return true
	case ph == sending || c.linger == 0:
		return false
	case c.lingerBy.IsZero():
		c.limitLinger()
	}
	return true
}

// limitSending sets the deadlines of the write and of the head. mu is held, so
// that hangUp's come behind them.
func (c *call) limitSending() {
	by := time.Now().Add(c.client.opt.WriteTimeout)
	if !c.headBy.IsZero() {
		by = earlier(by, c.headBy)
	}
	if !c.sendBy.IsZero() {
		by = earlier(by, c.sendBy)
	}
	c.conn.deadlines(c.headBy, by)
}

// limitLinger begins the linger: cn will not be used again, and reading ends in
// time. mu is held.
func (c *call) limitLinger() {
	c.lingerBy = time.Now().Add(c.linger)
	if c.phase == waiting && !c.headBy.IsZero() {
		c.lingerBy = earlier(c.lingerBy, c.headBy)
	}
	c.conn.readDeadline(c.lingerBy)
}

// hangUp runs when the context has ended, in a goroutine of its own.
func (c *call) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = contextError(c.ctx)
	if c.conn != nil {
		c.linger = c.seat.lingers(c.linger)
	}
	switch {
	case c.conn == nil:
	case c.linger == 0:
		c.abort(c.conn)
	case c.phase == sending:
		// A write that is stuck fails. One that had put the request out
		// succeeds, and the call goes on to linger.
		c.conn.SetWriteDeadline(time.Unix(1, 0))
	default:
		c.limitLinger()
	}
}

// abort closes cn. That waits for a reader which follows it and is using a piece,
// so the engine is told first. mu is held.
func (c *call) abort(cn *conn) {
	if half, ok := cn.socket.(interface{ CloseWrite() error }); ok && c.follows {
		_ = half.CloseWrite() // the close that follows is what counts
	}
	cn.abort()
}

// end takes the connection out of the call. It is nil for all but the first
// caller: Close, or the reader that finished or failed.
func (c *call) end() (cn *conn, ended error) {
	c.mu.Lock()
	cn, ended = c.conn, c.ended
	c.conn = nil
	c.mu.Unlock()
	if cn != nil {
		c.forget()
	}
	return cn, ended
}

// forget makes the end of the context, and of the engine, mean nothing from here on.
func (c *call) forget() {
	c.client.calls.rise(&c.seat)
	if c.stop != nil {
		c.stop()
	}
}

// detach closes a stale connection and keeps its slot.
func (c *call) detach(cn *conn) {
	c.mu.Lock()
	c.conn = nil
	c.mu.Unlock()
	c.client.freeBuffer(cn)
	cn.abort()
}

// finish ends the call after the whole answer.
func (c *call) finish(cn *conn) {
	c.err = io.EOF
	clean := cn.buffered() == 0 // else the engine sent what nobody asked for
	c.client.freeBuffer(cn)
	first, ended := c.end()
	if first == nil {
		return
	}
	if c.keep && clean && ended == nil {
		c.client.pool.give(cn)
		return
	}
	cn.abort()
	c.client.pool.drop()
}

// fail ends the call with e, completed by what only the call knows. The cause
// is the context's when that had ended, whatever it made the connection say.
func (c *call) fail(cn *conn, e *Error) *Error {
	first, ended := c.end()
	c.mu.Lock()
	left, phase := c.left, c.phase
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
	if ended == nil && first != nil && phase == waiting && (left && c.keeps || late && c.keepsLate) {
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
		c.client.pool.drop()
	}
	e.Sent, e.Timeout = c.sent, isTimeout(e.Err)
	return e
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
