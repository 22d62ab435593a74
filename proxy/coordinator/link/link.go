// Package link is one connection between a worker and its coordinator: frames,
// calls of either side that wait for their answers beside each other, and
// messages that nobody answers, which arrive in the order in which they were
// sent, calls among them. It does not know what the frames say.
//
// Whoever has something urgent to send writes it to the socket himself if nobody
// else does, and leaves it to the one who does otherwise: alone a call costs one
// write, and under load many share one. No sender ever waits for the peer to
// read: what the socket does not take is left to the connection's own goroutine.
package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// Beat is how often a side gives a sign of life, and Silence after how many
	// beats without one the peer is taken for dead. Beats are counted, not time, so
	// that a process that was stopped does not take its peer for dead.
	Beat    = time.Second
	Silence = 3
	// Linger is how long a message that is not urgent waits for company at most, and
	// how exactly the limits of calls are kept. While there are any, the connection's
	// goroutine looks after them so often: a timer for each would cost more.
	Linger = 2 * time.Millisecond
	// restful is how many such looks in vain are the last.
	restful = 50
	// MostFrame bounds the payload of one frame.
	MostFrame = 16 << 20
	// mostWaiting bounds what waits to be written.
	mostWaiting = 2 * MostFrame
	// mostRounds is how often in a row a sender writes what others leave to him.
	mostRounds = 4
	// keptBuffer is up to which size a buffer is kept for the next frames.
	keptBuffer = 256 << 10
	// farewell is how long a connection that is closed may take to write the rest.
	farewell = 200 * time.Millisecond
)

// Why a connection ended, or a call came to nothing.
var (
	ErrLeft   = errors.New("link: the peer has left")
	ErrSilent = errors.New("link: the peer is silent")
	ErrBehind = errors.New("link: the peer does not read")
	ErrLate   = errors.New("link: no answer in time") // of a call; the connection stays
	ErrSize   = errors.New("link: frame too large")   // of what was to be sent; the connection stays
	// ErrGarbage is what every error of bytes that are no frames is.
	ErrGarbage = errors.New("link: garbage")
)

// Handler takes what the peer sends, one frame at a time, in the connection's
// reader: nothing else is read meanwhile. A payload is good until the method
// returns. An error ends the connection.
type Handler interface {
	// Message is a message of the peer's.
	Message(kind uint8, payload []byte) error
	// Call is a call of the peer's. Conn.Answer answers it, from the handler (then
	// the answers to all frames that had come leave together) or later.
	Call(number uint32, kind uint8, payload []byte) error
}

// Conn is a connection. Its methods are safe for concurrent use.
type Conn struct {
	nc      net.Conn
	handler Handler
	raw     syscall.RawConn // nil: only its own goroutine writes
	reads   atomic.Uint64
	wake    chan struct{} // tells tend that it writes now
	stir    chan struct{} // tells tend that there is something to look after
	ended   chan struct{} // closed with err
	pool    sync.Pool     // of *pending

	mu      sync.Mutex
	out     []byte              // frames that wait; guarded by mu
	spare   []byte              // memory for the next out; guarded by mu
	writing bool                // somebody writes, and owns rest and try; guarded by mu
	wrote   bool                // since the last beat; guarded by mu
	active  bool                // tend looks after things; guarded by mu
	looks   uint64              // that it has taken; guarded by mu
	vain    int                 // looks in vain in a row; guarded by mu
	calls   map[uint32]*pending // guarded by mu
	last    uint32              // number of the last call; guarded by mu
	err     error               // why it ended; guarded by mu
	leaving error               // why it is to end when all is written; guarded by mu

	rest []byte // being written
	try  attempt
}

// pending is a call that waits for its answer.
type pending struct {
	done   chan struct{}
	until  uint64 // the look at which it is late; 0: it has time
	answer []byte
	err    error
}

// New returns a connection over nc, which it owns. Nothing is read or written
// before Run.
func New(nc net.Conn, h Handler) *Conn {
	c := &Conn{
		nc: nc, handler: h,
		wake: make(chan struct{}, 1), stir: make(chan struct{}, 1), ended: make(chan struct{}),
		calls: make(map[uint32]*pending),
	}
	c.pool.New = func() any { return &pending{done: make(chan struct{}, 1)} }
	if s, ok := nc.(syscall.Conn); ok && canTry {
		c.raw, _ = s.SyscallConn()
	}
	c.try.init()
	return c
}

// Run serves the connection until it ends, or ctx, and returns why. All its
// goroutines have ended then, and all calls have an answer or an error.
func (c *Conn) Run(ctx context.Context) error {
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		c.Close(context.Cause(ctx))
	})
	var tended sync.WaitGroup
	tended.Go(c.tend)
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

// Close tells the peer that this side leaves, and ends the connection. It does
// not wait for Run's end.
func (c *Conn) Close(reason error) {
	c.mu.Lock()
	if c.err != nil || c.leaving != nil {
		c.mu.Unlock()
		return
	}
	c.leaving = reason
	c.nc.SetWriteDeadline(time.Now().Add(farewell))
	c.out = appendFrame(c.out, bye, 0, 0, nil)
	c.flush()
}

// fail ends the connection for a reason; the first one counts.
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
// to follow, else it waits for others as a message does.
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
	p.answer, p.err, p.until = dst, nil, 0
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
		c.look()
	}
	c.out = appendFrame(c.out, call, kind, number, payload)
	behind := len(c.out) > mostWaiting
	c.flush()
	if behind {
		c.fail(ErrBehind) // p hears of it
	}

	var err error
	select {
	case <-p.done:
	case <-ctx.Done():
		err = c.forget(number, p, context.Cause(ctx))
	}
	if err == nil {
		dst, err = p.answer, p.err
	}
	p.answer = nil
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

// answered gives a call its answer.
func (c *Conn) answered(number uint32, payload []byte) {
	c.mu.Lock()
	p := c.calls[number]
	delete(c.calls, number)
	c.mu.Unlock()
	if p != nil {
		p.answer = append(p.answer, payload...)
		p.done <- struct{}{}
	}
}

// over is why nothing can be sent any more; c.mu is held.
func (c *Conn) over() error {
	if c.err != nil {
		return c.err
	}
	return c.leaving
}

func (c *Conn) put(what class, kind uint8, number uint32, payload []byte, urgent bool) error {
	if len(payload) > MostFrame {
		return ErrSize
	}
	c.mu.Lock()
	if err := c.over(); err != nil {
		c.mu.Unlock()
		return err
	}
	c.out = appendFrame(c.out, what, kind, number, payload)
	switch {
	case len(c.out) > mostWaiting:
		c.mu.Unlock()
		c.fail(ErrBehind)
		return ErrBehind
	case urgent:
		c.flush()
		return nil
	case !c.writing:
		c.look()
	}
	c.mu.Unlock()
	return nil
}

// flush writes what waits unless somebody does. c.mu is held, and is not any more
// when it returns.
func (c *Conn) flush() {
	if c.writing || c.err != nil || len(c.out) == 0 {
		c.mu.Unlock()
		return
	}
	c.writing, c.wrote = true, true
	for round := 0; len(c.out) > 0; round++ {
		left := c.raw == nil || round == mostRounds
		if !left {
			c.take()
			c.mu.Unlock()
			left = !c.tryWrite()
			c.mu.Lock()
		}
		if left {
			c.mu.Unlock()
			c.wake <- struct{}{} // has room: only who writes sends, and tend takes it before it lets go
			return
		}
		c.keep()
	}
	c.written()
}

// take makes what waits the rest to be written; c.mu is held.
func (c *Conn) take() { c.rest, c.out, c.spare = c.out, c.spare[:0], nil }

// keep keeps the memory of a rest that is written; c.mu is held.
func (c *Conn) keep() {
	if cap(c.rest) <= keptBuffer {
		c.spare = c.rest[:0]
	}
	c.rest = nil
}

// written ends the writing of who has written everything. c.mu is held, and is not
// any more when it returns.
func (c *Conn) written() {
	c.writing = false
	leaving := c.leaving
	c.mu.Unlock()
	if leaving != nil {
		c.fail(leaving)
	}
}

// tryWrite writes the rest as far as the socket takes it now; false: something is
// left, or it failed, which whoever waits for the socket finds out too.
func (c *Conn) tryWrite() bool {
	done, rest := c.try.write(c.raw, c.rest)
	if !done {
		c.rest = rest
	}
	return done
}

// tend writes what senders leave to it, and watches over the peer, until the
// connection ends.
func (c *Conn) tend() {
	beats, looks := time.NewTicker(Beat), time.NewTicker(Linger)
	defer beats.Stop()
	defer looks.Stop()
	looks.Stop()
	var heard uint64
	silent := 0
	for {
		select {
		case <-c.ended:
			return
		case <-c.wake:
			c.writeRest()
		case <-c.stir:
			looks.Reset(Linger)
		case <-looks.C:
			if !c.lookAfter() {
				looks.Stop()
			}
		case <-beats.C:
			if n := c.reads.Load(); n != heard {
				heard, silent = n, 0
			} else if silent++; silent >= Silence {
				c.fail(ErrSilent)
			}
			c.beat()
		}
	}
}

// look has tend look after what waits; c.mu is held.
func (c *Conn) look() {
	c.vain = 0
	if !c.active {
		c.active = true
		c.stir <- struct{}{} // has room: tend takes it before it lets active go
	}
}

// lookAfter ends calls that are late, and writes what waits. False: there has been
// nothing of the kind for a while, and it need not be called again.
func (c *Conn) lookAfter() bool {
	c.mu.Lock()
	c.looks++
	for number, p := range c.calls {
		if p.until != 0 && p.until <= c.looks {
			delete(c.calls, number)
			p.err = ErrLate
			p.done <- struct{}{}
		}
	}
	if c.vain++; c.vain > restful && len(c.calls) == 0 && len(c.out) == 0 {
		c.active = false
	}
	goesOn := c.active
	c.flush()
	return goesOn
}

// beat gives a sign of life if nothing else did.
func (c *Conn) beat() {
	c.mu.Lock()
	if c.err == nil && !c.wrote {
		c.out = appendFrame(c.out, beat, 0, 0, nil)
	}
	c.wrote = false
	c.flush()
}

// writeRest writes all that waits, however long the peer takes to read, within
// bounds.
func (c *Conn) writeRest() {
	for {
		if len(c.rest) > 0 {
			if err := c.writeWhole(c.rest); err != nil {
				c.fail(err)
				return
			}
		}
		c.mu.Lock()
		if c.rest != nil {
			c.keep()
		}
		if c.err != nil {
			c.mu.Unlock()
			return
		}
		if len(c.out) == 0 {
			c.written()
			return
		}
		c.take()
		c.mu.Unlock()
	}
}

func (c *Conn) writeWhole(b []byte) error {
	c.limitWrite(time.Now().Add(Silence * Beat))
	_, err := c.nc.Write(b)
	c.limitWrite(time.Time{})
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return ErrBehind
	}
	return err
}

// limitWrite sets the deadline of writes, unless Close has set it.
func (c *Conn) limitWrite(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving == nil {
		c.nc.SetWriteDeadline(t)
	}
}

// read handles what comes, until the connection ends.
func (c *Conn) read() error {
	in := make([]byte, 0, 64<<10)
	for {
		n, err := c.nc.Read(in[len(in):cap(in)])
		if n > 0 {
			c.reads.Add(1)
			in = in[:len(in)+n]
			used, err := c.handle(in)
			c.Flush()
			if err != nil {
				return err
			}
			in = keepRest(in, used)
		}
		if err != nil {
			return err
		}
	}
}

// handle handles the whole frames of b and returns how many bytes those were.
func (c *Conn) handle(b []byte) (used int, err error) {
	for {
		f, size, err := parse(b[used:])
		if size == 0 || err != nil {
			return used, err
		}
		used += size
		switch f.class {
		case message:
			err = c.handler.Message(f.kind, f.payload)
		case call:
			err = c.handler.Call(f.number, f.kind, f.payload)
		case answer:
			c.answered(f.number, f.payload)
		case bye:
			err = ErrLeft
		}
		if err != nil {
			return used, err
		}
	}
}

// Garbage is the error of bytes that are not what they should be.
func Garbage(what string) error { return fmt.Errorf("%w: %s", ErrGarbage, what) }
