package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http/httptrace"
	"strings"
	"sync"
	"time"
)

var (
	errLostReused = errors.New("reused connection was lost")
	errNotHTTP    = errors.New("malformed answer")
)

// netHTTPCall is one call through the transport. The transport's context does not end
// with the caller's: netHTTPCall decides when to cut the call.
type netHTTPCall struct {
	client *netHTTPClient
	ctx    context.Context // the caller's
	inner  context.Context // the transport's
	cut    context.CancelFunc
	stop   func() bool // cancels hangUp
	timer  *time.Timer // of the head, then of each Read; runs expire
	head   time.Duration
	sendBy time.Time
	idle   time.Duration
	linger time.Duration
	once   bool   // the request must not reach the engine twice
	sent   func() // Request.Sent
	err    error  // returned by every further Read; used by the reader only
	entry  entry  // in the client's list of calls

	mu      sync.Mutex
	socket  *netHTTPConn  // guarded by mu; connection of the last try
	h2      bool          // guarded by mu; the connection is shared with other calls
	getting bool          // guarded by mu; the transport is getting a connection
	dialing bool          // guarded by mu; the transport is dialing
	tries   int           // guarded by mu; number of connections got
	since   time.Time     // guarded by mu; when the last connection was got
	phase   phase         // guarded by mu; reading from the first byte of the answer
	body    io.ReadCloser // guarded by mu; nil before the head
	ended   error         // guarded by mu; why ctx ended, or ErrUnwanted
	evicted bool          // guarded by mu; the call was evicted and must end
	refused bool          // guarded by mu; Wanted returned false
	late    bool          // guarded by mu; timer has fired
	patient *time.Timer   // guarded by mu; ends the linger; nil if the call does not linger
	over    bool          // guarded by mu
}

func newNetHTTPCall(cl *netHTTPClient, ctx context.Context, req *Request) *netHTTPCall {
	c := &netHTTPCall{client: cl, ctx: ctx, head: req.HeadTimeout, sendBy: req.SendBy, idle: req.IdleTimeout, linger: req.Linger, once: req.Once, sent: req.Sent}
	c.inner, c.cut = context.WithCancel(context.Background())
	c.timer = time.AfterFunc(1<<62, c.expire)
	c.limit(untilSent(c.sendBy, c.head))
	c.stop = context.AfterFunc(ctx, c.hangUp)
	cl.calls.add(&c.entry, c, req.Control)
	return c
}

// limit restarts the timer; 0 stops it.
func (c *netHTTPCall) limit(d time.Duration) {
	if d > 0 {
		c.timer.Reset(d)
	} else {
		c.timer.Stop()
	}
}

func (c *netHTTPCall) expire() {
	c.mu.Lock()
	c.late = true
	c.mu.Unlock()
	c.cut()
}

func (c *netHTTPCall) getConn(string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.getting = true
}

// dialBegins stops the call's timer, because DialTimeout now bounds the wait. It does
// nothing if another connection has become free first.
func (c *netHTTPCall) dialBegins() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dialing = c.getting; c.dialing && c.tries == 0 {
		c.timer.Stop()
	}
}

// gotConn begins a try: from here on bytes may reach the engine.
func (c *netHTTPCall) gotConn(info httptrace.GotConnInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.getting, c.dialing = false, false
	if c.tries++; c.tries == 1 {
		c.client.busy.Add(1)
		c.limit(c.head)
	} else {
		c.client.retries.Add(1)
	}
	if info.Reused {
		c.client.reuses.Add(1)
	}
	c.since, c.phase = time.Now(), sending
	socket := info.Conn
	if t, ok := socket.(*tls.Conn); ok {
		c.h2 = t.ConnectionState().NegotiatedProtocol == "h2"
		socket = t.NetConn()
	}
	c.socket, _ = socket.(*netHTTPConn)
	by, waiter := c.sendBy, c.entry.control
	c.late = c.late || !by.IsZero() && !time.Now().Before(by)
	c.refused = c.tries == 1 && waiter != nil && !waiter.Wanted()
	if c.late || c.refused {
		c.cut()
		if !c.h2 { // on HTTP/2 the connection is shared and must not be closed
			c.socket.Close()
		}
	}
}

func (c *netHTTPCall) wroteRequest(info httptrace.WroteRequestInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if info.Err == nil && c.phase == sending {
		c.phase = waiting
		if c.sent != nil {
			c.sent()
		}
	}
}

func (c *netHTTPCall) answerBegins() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.phase = reading
	c.client.calls.noteRead(&c.entry, time.Now())
}

// mayRetry decides about the loss of a reused connection as call.stale does.
func (c *netHTTPCall) mayRetry() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended == nil && !c.late && !c.refused && !(c.once && c.phase == waiting) && time.Since(c.since) < staleWithin
}

// hangUp runs in its own goroutine when the context has ended.
func (c *netHTTPCall) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave(contextError(c.ctx))
}

// leave cuts the call, or begins the linger. A call that lingers already continues. mu is held.
func (c *netHTTPCall) leave(why error) {
	if c.ended != nil {
		return
	}
	c.ended = why
	sent := c.phase == reading || c.phase == waiting && !c.unsent()
	if !sent || c.over {
		c.linger = 0
	}
	if c.linger = c.entry.lingers(c.linger); c.linger > 0 {
		c.patient = time.AfterFunc(c.linger, c.cut)
		return
	}
	c.cut()
}

// failedOp returns the step at which the call failed, before the head.
func (c *netHTTPCall) failedOp() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.getting && !c.dialing && c.client.opt.MaxConns > 0:
		return OpCap
	case c.getting:
		return OpDial
	case c.phase == sending || c.phase == waiting && c.unsent():
		return OpWrite
	}
	return OpHead
}

// unsent reports whether part of the request is still in the transport's buffer: the
// transport reports a request as written before it flushes the buffer. mu is held.
func (c *netHTTPCall) unsent() bool { return !c.h2 && c.socket.unsent.Load() }

// begin takes the body over from the transport. It returns false if the call has ended.
func (c *netHTTPCall) begin(body io.ReadCloser) bool {
	c.timer.Stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.body = body
	return c.live()
}

// live reports whether nothing has cut the call. mu is held.
func (c *netHTTPCall) live() bool {
	return !c.over && !c.late && !c.evicted && (c.ended == nil || c.patient != nil)
}

// Read implements Response.Read.
func (c *netHTTPCall) Read(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	c.mu.Lock()
	live := c.live()
	c.mu.Unlock()
	if !live {
		c.err = c.fail(&Error{Op: OpBody, Err: context.Canceled}) // fail finds the cause
		return 0, c.err
	}
	c.limit(c.idle)
	n, err := 0, error(nil)
	for n == 0 && err == nil {
		n, err = c.body.Read(p)
	}
	if n > 0 {
		c.client.calls.noteRead(&c.entry, time.Now())
	}
	c.timer.Stop()
	switch {
	case err == io.EOF:
		c.end()
		c.err = io.EOF
	case err != nil:
		c.err = c.fail(&Error{Op: OpBody, Err: err})
	}
	if n > 0 {
		return n, nil
	}
	return 0, c.err
}

// Close implements Response.Close.
func (c *netHTTPCall) Close() error {
	if c.end() {
		c.body.Close()
	}
	return nil
}

// end releases the resources of the call. It reports whether it is the first call of end.
func (c *netHTTPCall) end() bool {
	c.client.calls.remove(&c.entry)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return false
	}
	c.over = true
	c.stop()
	c.timer.Stop()
	if c.tries > 0 {
		c.client.busy.Add(-1)
	}
	if c.patient != nil {
		c.patient.Stop()
	}
	c.cut()
	return true
}

// fail ends the call with e, and fills in the fields that only the call has.
func (c *netHTTPCall) fail(e *Error) *Error {
	first := c.end()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ended != nil:
		e.Err = c.ended
	case c.evicted:
		e.Err = ErrEvicted
	case c.refused:
		e.Err = ErrUnwanted
	case c.late:
		e.Err = errTimeout
	case !first:
		e.Err = ErrClosed
	default:
		e.Err = c.plain(e.Op, e.Err)
	}
	e.Sent, e.Timeout, e.Local = c.tries > 0 && !c.refused, isTimeout(e.Err), e.Op == OpDial && IsLocal(e.Err)
	return e
}

// plain distinguishes the end of a connection or stream from an answer that is not
// HTTP. For the latter it drops the transport's text, which quotes the answer.
func (c *netHTTPCall) plain(op string, err error) error {
	var ne net.Error
	switch {
	case op != OpHead && op != OpBody, err == errSwitched, err == errLostReused:
		return err
	case errors.As(err, &ne), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), c.h2,
		strings.HasSuffix(err.Error(), "unexpected EOF reading trailer"), // has no error type
		strings.HasSuffix(err.Error(), "server closed idle connection"):  // has no error type
		if op == OpBody && !isTimeout(err) {
			return lost(err)
		}
		return err
	}
	return errNotHTTP
}
