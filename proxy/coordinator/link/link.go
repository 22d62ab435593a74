// Package link is one connection between a worker and its coordinator. It carries frames:
// calls of either side, which may wait for their answers at the same time, and messages
// without an answer. Frames arrive in the order in which they were sent. The package does
// not know their content.
//
// A sender of an urgent frame writes to the socket itself, unless another goroutine is
// writing: then that goroutine writes the frame too. So a single call costs one write, and
// under load many calls share one. No sender waits for the peer to read: a goroutine of
// the connection writes what the socket does not accept at once. In the same way a single
// caller reads its answer itself, so that no other goroutine must be woken.
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

	"github.com/pdproxy/pdproxy/proxy/socket"
)

const (
	// Beat is the interval of the signs of life. A peer counts as dead after Silence beats
	// without a frame. Beats are counted, not time, so that a process that was stopped
	// does not take its peer for dead.
	Beat    = time.Second
	Silence = 3
	// Linger is the longest time that a frame that is not urgent waits for others, and the
	// precision of the limits of calls. A goroutine looks after them at this interval,
	// because a timer for each would cost more.
	Linger = 2 * time.Millisecond
	// restful is the number of looks without work after which the goroutine rests.
	restful = 50
	// MostFrame is the largest payload of a frame.
	MostFrame = 16 << 20
	// mostWaiting bounds the bytes that wait to be written.
	mostWaiting = 2 * MostFrame
	// mostRounds bounds how often in a row a sender writes the frames of others.
	mostRounds = 4
	// usualBuffer is the usual size of a read.
	usualBuffer = 64 << 10
	// keptBuffer is the largest buffer that is kept for the next frames.
	keptBuffer = 256 << 10
	// farewell is how long a closed connection may take to write its rest.
	farewell = 200 * time.Millisecond
)

// Why a connection ended or a call failed.
var (
	ErrLeft   = errors.New("link: the peer has left")
	ErrGone   = errors.New("link: the peer closed the connection without a farewell") // the peer has died: a live peer says that it leaves
	ErrSilent = errors.New("link: the peer sends no sign of life")
	ErrBehind = errors.New("link: the peer does not read")
	ErrLate   = errors.New("link: no answer in time") // of a call; the connection stays
	ErrSize   = errors.New("link: frame too large")   // of what was to be sent; the connection stays
	// ErrGarbage matches every error of malformed bytes.
	ErrGarbage = errors.New("link: malformed bytes")
)

// Handler handles the peer's frames, one at a time. Nothing else is read in the meantime.
// The goroutine that reads calls it, which may be a caller that waits for its answer. A
// payload is valid until the method returns. An error ends the connection.
type Handler interface {
	// Message handles a message of the peer.
	Message(kind uint8, payload []byte) error
	// Call handles a call of the peer. Conn.Answer answers it: from the handler, so that
	// the answers to all frames of one read are sent together, or later.
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
	wake    chan struct{} // tells writeRests that it writes now
	stir    chan struct{} // tells tend that there is something to look after
	ended   chan struct{} // closed with err
	pool    sync.Pool     // of *pending
	began   time.Time
	ticked  atomic.Int64 // the last beat, since began
	resumed atomic.Int64 // the last beat that was late because this process was stopped; 0: none

	mu      sync.Mutex
	out     []byte              // frames that wait; guarded by mu
	spare   []byte              // memory for the next out; guarded by mu
	writing bool                // a goroutine writes and owns rest, unsealed and try; guarded by mu
	wrote   bool                // since the last beat; guarded by mu
	active  bool                // tend runs its looks; guarded by mu
	looks   uint64              // looks so far; guarded by mu
	vain    int                 // looks without work in a row; guarded by mu
	calls   map[uint32]*pending // guarded by mu
	last    uint32              // number of the last call; guarded by mu
	err     error               // why it ended; guarded by mu
	leaving error               // why it ends after everything is written; guarded by mu
	lost    error               // why nothing can be written any more; guarded by mu

	rest     []byte // being written, encrypted if tls is set
	unsealed error  // why TLS did not encrypt the rest
	try      attempt

	in     []byte        // bytes that were read; owned by the reader
	deaf   bool          // frames are no longer handled; owned by the reader
	resume chan struct{} // tells Run's goroutine that it reads again
	reader reader        // who reads; guarded by mu
	leader *pending      // call of the caller that reads; guarded by mu
	kicked bool          // the deadline of reads has passed; guarded by mu
	timed  bool          // there were calls with a limit recently; guarded by mu
	seen   uint64        // reads at the last look; guarded by mu
}

// pending is a call that waits for its answer.
type pending struct {
	done   chan struct{}
	until  uint64 // the look at which it times out; 0: no limit
	ctx    context.Context
	answer []byte
	err    error
}

// New returns a connection over nc, which it owns. A *TLS must have completed its
// handshake. Run starts the connection.
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
		c.nc, c.raw = socket.Of(nc), rawOf(nc)
		c.socket = c.nc
	}
	c.try.init()
	return c
}

// Run serves the connection until it or ctx ends, and returns the reason. After that all
// its goroutines have ended, no handler runs, and all calls have an answer or an error.
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

// Reads returns how often bytes arrived from the peer.
func (c *Conn) Reads() uint64 { return c.reads.Load() }

// Close tells the peer that this side leaves, and ends the connection; a peer that does
// not read gets a short time. Close does not wait for Run.
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

// fail ends the connection; the first reason counts. The peer is not told, because it has
// gone or does not read. Close is for a peer that may be alive.
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

// Send sends a message. If it is not urgent, it may wait up to Linger for other frames.
// The error is ErrSize or why the connection has ended.
func (c *Conn) Send(kind uint8, payload []byte, urgent bool) error {
	return c.put(message, kind, 0, payload, urgent)
}

// Answer answers a call of the peer. Outside of the handler, Flush must follow.
func (c *Conn) Answer(number uint32, payload []byte) error {
	return c.put(answer, 0, number, payload, false)
}

// Flush writes the frames that wait.
func (c *Conn) Flush() {
	c.mu.Lock()
	c.flush()
}

// Call sends a call and appends its answer to dst. It returns early if ctx ends (with its
// cause), the connection ends, or limit has passed (ErrLate; 0: no limit). A late answer
// is dropped.
func (c *Conn) Call(ctx context.Context, kind uint8, payload, dst []byte, limit time.Duration) ([]byte, error) {
	if len(payload) > MostFrame {
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
	behind := len(c.out) > mostWaiting
	c.flushSoon()
	if behind {
		c.Close(ErrBehind) // p hears of it
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

// forget removes a call that nobody waits for; nil: its answer has arrived.
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

// over returns why nothing can be sent; c.mu is held.
func (c *Conn) over() error {
	switch {
	case c.err != nil:
		return c.err
	case c.leaving != nil:
		return c.leaving
	}
	return c.lost
}
