package link

import (
	"errors"
	"net"
	"runtime"
	"time"
)

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
		c.Close(ErrBehind)
		return ErrBehind
	case urgent:
		c.flushSoon()
		return nil
	case what == message && !c.writing: // answers are flushed by who gives them
		c.look()
	}
	c.mu.Unlock()
	return nil
}

// flushSoon is flush. Under load it first lets other goroutines run that are about to send
// frames, so that one write carries them too: a write wakes the peer, and ends the
// writer's time slice if both share a core. If processors are idle, the pause would cost
// more than it saves. c.mu is held on entry and not on return.
func (c *Conn) flushSoon() {
	if c.single || len(c.calls) > 1 {
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
	}
	c.flush()
}

// flush writes what waits, unless another goroutine writes. c.mu is held on entry and not
// on return.
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
			left = !c.seal() || !c.tryWrite()
			c.mu.Lock()
		}
		if left {
			c.mu.Unlock()
			c.wake <- struct{}{} // has room: only who writes sends, and writeRests takes it before it lets go
			return
		}
		c.keep()
	}
	c.written()
}

// take makes the waiting frames the rest; c.mu is held.
func (c *Conn) take() { c.rest, c.out, c.spare = c.out, c.spare[:0], nil }

// seal encrypts the rest if the connection is over TLS. False: that failed, and there is
// no rest.
func (c *Conn) seal() bool {
	if c.tls == nil {
		return true
	}
	c.rest, c.unsealed = c.tls.seal(c.rest)
	if c.unsealed != nil {
		c.rest = nil
	}
	return c.unsealed == nil
}

// keep keeps the memory of the written rest; c.mu is held.
func (c *Conn) keep() {
	if cap(c.rest) <= keptBuffer {
		c.spare = c.rest[:0]
	}
	c.rest = nil
}

// written ends the writing after everything is written. c.mu is held on entry and not on
// return.
func (c *Conn) written() {
	c.writing = false
	leaving := c.leaving
	c.mu.Unlock()
	if leaving != nil {
		c.fail(leaving)
	}
}

// tryWrite writes as much of the rest as the socket accepts now. False: there is a rest,
// or the write failed, which the goroutine that waits for the socket will see too.
func (c *Conn) tryWrite() bool {
	done, rest := c.try.write(c.raw, c.rest)
	if !done {
		c.rest = rest
	}
	return done
}

// writeRests writes what senders leave to it, until the connection ends.
func (c *Conn) writeRests() {
	for {
		select {
		case <-c.ended:
			return
		case <-c.wake:
			c.writeRest()
		}
	}
}

// writeRest writes all that waits. The peer may take a limited time to read.
func (c *Conn) writeRest() {
	for {
		if c.unsealed != nil {
			c.lose(c.unsealed)
			return
		}
		if len(c.rest) > 0 {
			switch err := c.writeWhole(c.rest); {
			case err == ErrBehind:
				c.fail(err)
				return
			case err != nil:
				c.lose(err)
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
		c.seal()
	}
}

// lose notes that nothing can be written. The peer's last frames must still be read: it
// may have said that it leaves.
func (c *Conn) lose(why error) {
	c.mu.Lock()
	c.rest, c.out, c.lost = nil, nil, why
	leaving := c.leaving
	c.mu.Unlock()
	if leaving != nil {
		c.fail(leaving)
	}
}

func (c *Conn) writeWhole(b []byte) error {
	c.limitWrite(time.Now().Add(Silence * Beat))
	_, err := c.socket.Write(b)
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
