// Package link is one connection between a worker and its coordinator: frames,
// calls of either side that wait for their answers beside each other, and
// messages that nobody answers, which arrive in the order in which they were
// sent, calls among them. It does not know what the frames say.
//
// Whoever has something urgent to send writes it to the socket himself if nobody
// else does, and leaves it to the one who does otherwise: alone a call costs one
// write, and under load many share one. No sender ever waits for the peer to
// read: what the socket does not take is left to a goroutine of the connection's.
// In the same way a caller who is alone reads his answer himself, so that nobody
// has to be woken to wake him.
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
	// Beat is how often a side gives a sign of life, and Silence after how many
	// beats without one the peer is taken for dead. Beats are counted, not time, so
	// that a process that was stopped does not take its peer for dead.
	Beat    = time.Second
	Silence = 3
	// Linger is how long a message that is not urgent waits for company at most, and
	// how exactly the limits of calls are kept. While there are any, a goroutine looks
	// after them so often: a timer for each would cost more.
	Linger = 2 * time.Millisecond
	// restful is how many such looks in vain are the last.
	restful = 50
	// MostFrame bounds the payload of one frame.
	MostFrame = 16 << 20
	// mostWaiting bounds what waits to be written.
	mostWaiting = 2 * MostFrame
	// mostRounds is how often in a row a sender writes what others leave to him.
	mostRounds = 4
	// usualBuffer is how much is read at once.
	usualBuffer = 64 << 10
	// keptBuffer is up to which size a buffer is kept for the next frames.
	keptBuffer = 256 << 10
	// farewell is how long a connection that is closed may take to write the rest.
	farewell = 200 * time.Millisecond
)

// Why a connection ended, or a call came to nothing.
var (
	ErrLeft   = errors.New("link: the peer has left")
	ErrGone   = errors.New("link: the peer has gone without a word") // it has died: one that lives says that it leaves
	ErrSilent = errors.New("link: the peer is silent")
	ErrBehind = errors.New("link: the peer does not read")
	ErrLate   = errors.New("link: no answer in time") // of a call; the connection stays
	ErrSize   = errors.New("link: frame too large")   // of what was to be sent; the connection stays
	// ErrGarbage is what every error of bytes that are no frames is.
	ErrGarbage = errors.New("link: garbage")
)

// Handler takes what the peer sends, one frame at a time; nothing else is read
// meanwhile. It is called by whoever reads, a caller who waits for his answer among
// them. A payload is good until the method returns. An error ends the connection.
type Handler interface {
	// Message is a message of the peer's.
	Message(kind uint8, payload []byte) error
	// Call is a call of the peer's. Conn.Answer answers it, from the handler (then
	// the answers to all frames that had come leave together) or later.
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
	resumed atomic.Int64 // the last one that came late, because this process was stopped; 0: none did

	mu      sync.Mutex
	out     []byte              // frames that wait; guarded by mu
	spare   []byte              // memory for the next out; guarded by mu
	writing bool                // somebody writes, and owns rest, unsealed and try; guarded by mu
	wrote   bool                // since the last beat; guarded by mu
	active  bool                // tend looks after things; guarded by mu
	looks   uint64              // that it has taken; guarded by mu
	vain    int                 // looks in vain in a row; guarded by mu
	calls   map[uint32]*pending // guarded by mu
	last    uint32              // number of the last call; guarded by mu
	err     error               // why it ended; guarded by mu
	leaving error               // why it is to end when all is written; guarded by mu
	lost    error               // why nothing can be written any more; guarded by mu

	rest     []byte // being written, encrypted if tls is set
	unsealed error  // why TLS did not encrypt the rest
	try      attempt

	in     []byte        // that has been read, of who reads
	deaf   bool          // nothing is handled any more, of who reads
	resume chan struct{} // tells Run's goroutine that it reads again
	reader reader        // who reads; guarded by mu
	leader *pending      // of the caller who reads; guarded by mu
	kicked bool          // the deadline of reads has passed; guarded by mu
	timed  bool          // there have been calls with a limit of late; guarded by mu
	seen   uint64        // the reads as of the last look; guarded by mu
}

// pending is a call that waits for its answer.
type pending struct {
	done   chan struct{}
	until  uint64 // the look at which it is late; 0: it has time
	ctx    context.Context
	answer []byte
	err    error
}

// New returns a connection over nc, which it owns. A *TLS must have completed its
// handshake. Nothing is read or written before Run.
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

// Run serves the connection until it ends, or ctx, and returns why. All its
// goroutines have ended then, nobody is in the Handler any more, and all calls have an
// answer or an error.
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

// Err is why the connection has ended; nil while it has not.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Reads counts the times that something came from the peer.
func (c *Conn) Reads() uint64 { return c.reads.Load() }

// Close tells the peer that this side leaves, and ends the connection, after a
// moment if the peer does not read. It does not wait for Run's end.
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

// fail ends the connection for a reason; the first one counts. The peer is not told:
// it has gone, or does not read. Whoever gives up one that may live calls Close.
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

// Send sends a message. Unless it is urgent it may wait for others, for Linger at
// most. An error says that the connection has ended, or ErrSize.
func (c *Conn) Send(kind uint8, payload []byte, urgent bool) error {
	return c.put(message, kind, 0, payload, urgent)
}

// Answer answers a call of the peer's. From elsewhere than the handler Flush has
// to follow.
func (c *Conn) Answer(number uint32, payload []byte) error {
	return c.put(answer, 0, number, payload, false)
}

// Flush writes what waits for others.
func (c *Conn) Flush() {
	c.mu.Lock()
	c.flush()
}

// Call sends a call and appends its answer to dst. It waits until the answer
// comes, ctx ends (its cause is the error then), the connection ends, or limit has
// passed (ErrLate; 0: there is none). What comes later is dropped.
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

// forget takes back a call that is waited for no longer; nil: it has its answer.
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

// over is why nothing can be sent any more; c.mu is held.
func (c *Conn) over() error {
	switch {
	case c.err != nil:
		return c.err
	case c.leaving != nil:
		return c.leaving
	}
	return c.lost
}
