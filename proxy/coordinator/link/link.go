// Package link implements one connection between a worker and its coordinator. The
// connection carries frames. A frame is a call, an answer, or a message without an
// answer. Either side may make calls, and several calls may be open at the same time.
// Frames arrive in the order in which a side sent them. The package does not interpret
// the payloads.
//
// The sender of an urgent frame writes the frame to the socket. If another goroutine is
// writing at that moment, that goroutine writes the frame instead. Therefore a single
// call needs one write, and under load many calls share one write. A sender never waits
// for the peer to read: if the socket does not accept all bytes at once, a goroutine of
// the connection writes the remaining bytes. Similarly, a single caller reads its own
// answer from the socket, so that the scheduler need not wake another goroutine.
//
// The decisions behind this package are in docs/design/fleet.md.
package link

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// Beat is the interval of heartbeats. The connection ends after Silence beats without
	// a byte from the peer. The connection counts its own beats instead of time.
	// Otherwise a process that was suspended would regard its peer as dead when the
	// process resumes.
	Beat    = time.Second
	Silence = 3
	// Linger is the longest time that a frame that is not urgent waits for other frames.
	// Linger is also the precision of the time limits of calls. One goroutine (tend)
	// checks frames and calls at this interval, because one timer per call would cost
	// more.
	Linger = 2 * time.Millisecond
	// restful is the number of checks without work after which tend stops the checks.
	restful = 50
	// MaxFrame is the largest payload of a frame.
	MaxFrame = 16 << 20
	// maxWaiting bounds the bytes that wait to be written.
	maxWaiting = 2 * MaxFrame
	// maxRounds bounds how often in a row one sender writes frames of other senders.
	maxRounds = 4
	// usualBuffer is the usual size of a read.
	usualBuffer = 64 << 10
	// keptBuffer is the largest buffer, in bytes, that the connection reuses for later
	// frames.
	keptBuffer = 256 << 10
	// farewell bounds the time in which a closed connection writes its last frames.
	farewell = 200 * time.Millisecond
)

// Reasons why a connection ended or a call failed.
var (
	ErrLeft   = errors.New("link: the peer has left")
	ErrGone   = errors.New("link: the peer closed the connection without a farewell") // the peer's process has died: a running peer sends a bye frame before it closes
	ErrSilent = errors.New("link: the peer sends no sign of life")
	ErrBehind = errors.New("link: the peer does not read")
	ErrLate   = errors.New("link: no answer in time") // of a call; the connection stays open
	ErrSize   = errors.New("link: frame too large")   // of a frame to send; the connection stays open
	// ErrGarbage matches every error of malformed bytes.
	ErrGarbage = errors.New("link: malformed bytes")
)

// Handler handles the peer's frames, one at a time. The connection reads no other frame
// in the meantime. The goroutine that reads calls the Handler. This goroutine may be a
// caller that waits for its answer. A payload is valid until the method returns. An error
// ends the connection.
type Handler interface {
	// Message handles a message of the peer.
	Message(kind uint8, payload []byte) error
	// Call handles a call of the peer. Conn.Answer answers the call, from the handler or
	// later. The connection sends all answers together that the handler gives for the
	// frames of one read.
	Call(number uint32, kind uint8, payload []byte) error
}

// Conn is a connection. Its methods are safe for concurrent use.
type Conn struct {
	nc      net.Conn // frames are read from it
	socket  net.Conn // frames are written to it, encrypted if tls is set
	tls     *TLS     // nil: frames go over the socket as they are
	handler Handler
	raw     syscall.RawConn // nil: only writeRests writes
	single  bool            // Go runs on one processor
	reads   atomic.Uint64
	wake    chan struct{} // informs writeRests that it is the writer now
	stir    chan struct{} // makes tend start the checks of lookAfter
	ended   chan struct{} // closed with err
	pool    sync.Pool     // of *pending
	began   time.Time
	ticked  atomic.Int64 // time of the last beat, measured from began
	resumed atomic.Int64 // time of the last beat that was late because this process was suspended, measured from began; 0: none

	mu      sync.Mutex
	out     []byte              // frames that wait; guarded by mu
	spare   []byte              // memory for the next out; guarded by mu
	writing bool                // a goroutine writes and owns rest, unsealed and try; guarded by mu
	wrote   bool                // a frame was written since the last beat; guarded by mu
	active  bool                // tend runs lookAfter every Linger; guarded by mu
	looks   uint64              // number of runs of lookAfter; guarded by mu
	vain    int                 // number of runs of lookAfter without work in a row; guarded by mu
	calls   map[uint32]*pending // guarded by mu
	last    uint32              // number of the last call; guarded by mu
	err     error               // why the connection ended; guarded by mu
	leaving error               // why the connection ends after all frames are written; guarded by mu
	lost    error               // why nothing can be written any more; guarded by mu

	rest     []byte // bytes being written, encrypted if tls is set
	unsealed error  // why TLS did not encrypt the rest
	try      attempt

	in     []byte        // bytes that were read; owned by the reader
	deaf   bool          // the reader handles no more frames; owned by the reader
	resume chan struct{} // makes Run's goroutine read again
	reader reader        // which goroutine reads; guarded by mu
	leader *pending      // call of the caller that reads; guarded by mu
	kicked bool          // the deadline of reads has passed; guarded by mu
	timed  bool          // there was a call with a time limit recently; guarded by mu
	seen   uint64        // value of reads at the last run of lookAfter; guarded by mu
}

// pending is a call that waits for its answer.
type pending struct {
	done   chan struct{}
	until  uint64 // value of Conn.looks at which the call times out; 0: no limit
	ctx    context.Context
	answer []byte
	err    error
}

// New returns a connection over nc and owns nc. If nc is a *TLS, its handshake must be
// complete. Run starts the connection.
func New(nc net.Conn, h Handler) *Conn {
	c := &Conn{
		handler: h, single: runtime.GOMAXPROCS(0) == 1, began: time.Now(),
		wake: make(chan struct{}, 1), stir: make(chan struct{}, 1), ended: make(chan struct{}),
		calls: make(map[uint32]*pending), in: make([]byte, 0, usualBuffer), resume: make(chan struct{}, 1),
	}
	c.pool.New = func() any { return &pending{done: make(chan struct{}, 1)} }
	if t, ok := nc.(*TLS); ok {
		t.under.hold()
		c.nc, c.socket, c.tls, c.raw = t, t.under.Conn, t, t.under.raw
	} else {
		c.nc, c.socket, c.raw = nc, nc, rawOf(nc)
	}
	c.try.init()
	return c
}

// Run serves the connection until the connection or ctx ends, and returns the reason.
// When Run returns, all goroutines of the connection have ended, no handler runs, and all
// calls have an answer or an error.
func (c *Conn) Run(ctx context.Context) error {
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		c.Close(context.Cause(ctx))
	})
	var tended sync.WaitGroup
	tended.Go(c.tend)
	tended.Go(c.writeRests)
	c.fail(c.read())
	tended.Wait()
	if !stop() {
		<-closed
	}
	return c.Err()
}

// Err returns why the connection has ended; nil if it has not.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Reads returns the number of reads that returned bytes from the peer.
func (c *Conn) Reads() uint64 { return c.reads.Load() }

// Close sends the peer a bye frame and ends the connection. If the peer does not read,
// Close ends the connection after 200 ms. Close does not wait for Run.
func (c *Conn) Close(reason error) {
	c.mu.Lock()
	if c.err != nil || c.leaving != nil {
		c.mu.Unlock()
		return
	}
	c.leaving = reason
	if c.lost != nil {
		c.mu.Unlock()
		c.fail(reason)
		return
	}
	c.nc.SetWriteDeadline(time.Now().Add(farewell))
	c.out = appendFrame(c.out, bye, 0, 0, nil)
	c.flush()
}

// fail ends the connection. Only the first reason is stored. fail sends no bye frame,
// because the peer has left or does not read. Close is for a peer that may still read.
func (c *Conn) fail(reason error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	if c.leaving != nil {
		reason = c.leaving
	}
	c.err = reason
	calls := c.calls
	c.calls = nil
	c.mu.Unlock()
	close(c.ended)
	c.nc.Close()
	for _, p := range calls {
		p.err = reason
		p.done <- struct{}{}
	}
}

// Answer answers a call of the peer. A caller outside the handler must then call Flush.
func (c *Conn) Answer(number uint32, payload []byte) error {
	return c.put(answer, 0, number, payload, false)
}

// Flush writes the frames that wait.
func (c *Conn) Flush() {
	c.mu.Lock()
	c.flush()
}

// Call sends a call and appends the answer to dst. Call returns an error if ctx ends (the
// cause of ctx), if the connection ends (the reason), or after limit (ErrLate; 0: no
// limit). The connection drops an answer that arrives later. The end of ctx takes effect
// within Linger.
func (c *Conn) Call(ctx context.Context, kind uint8, payload, dst []byte, limit time.Duration) ([]byte, error) {
	if len(payload) > MaxFrame {
		return dst, ErrSize
	}
	p := c.pool.Get().(*pending)
	p.answer, p.err, p.until, p.ctx = dst, nil, 0, ctx
	c.mu.Lock()
	if err := c.over(); err != nil {
		c.mu.Unlock()
		c.pool.Put(p)
		return dst, err
	}
	c.last++
	number := c.last
	c.calls[number] = p
	if limit > 0 {
		p.until = c.looks + uint64(limit/Linger) + 1
		c.timed = true
		c.look()
	}
	c.out = appendFrame(c.out, call, kind, number, payload)
	behind := len(c.out) > maxWaiting
	c.flushSoon()
	if behind {
		c.Close(ErrBehind) // Close ends p with an error
	}

	var err error
	if limit <= 0 || !c.lead(number, p) {
		select {
		case <-p.done:
		case <-ctx.Done():
			err = c.forget(number, p, context.Cause(ctx))
		}
	}
	if err == nil {
		dst, err = p.answer, p.err
	}
	p.answer, p.ctx = nil, nil
	c.pool.Put(p)
	return dst, err
}

// forget removes a call whose caller stops waiting and returns why. It returns nil if the
// answer has already arrived.
func (c *Conn) forget(number uint32, p *pending, why error) error {
	c.mu.Lock()
	waits := c.calls[number] == p
	if waits {
		delete(c.calls, number)
	}
	c.mu.Unlock()
	if !waits {
		<-p.done
		return nil
	}
	return why
}

// over returns why the connection cannot send frames, nil if it can. The caller holds
// c.mu.
func (c *Conn) over() error {
	switch {
	case c.err != nil:
		return c.err
	case c.leaving != nil:
		return c.leaving
	}
	return c.lost
}
