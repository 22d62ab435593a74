package link

import (
	"errors"
	"net"
	"runtime"
	"time"
)

func (c *Conn) put(what class, kind uint8, number uint32, payload []byte, urgent bool) error {
	if len(payload) > MaxFrame {
		return ErrSize
	}
	c.mu.Lock()
	if err := c.over(); err != nil {
		c.mu.Unlock()
		return err
	}
	c.out = appendFrame(c.out, what, kind, number, payload)
	switch {
	case len(c.out) > maxWaiting:
		c.mu.Unlock()
		c.Close(ErrBehind)
		return ErrBehind
	case urgent:
		c.flushSoon()
		return nil
	case what == message && !c.writing: // the goroutine that gives an answer flushes it
		c.look()
	}
	c.mu.Unlock()
	return nil
}

// flushSoon is flush. With other open calls, or on one processor, flushSoon first yields
// to other goroutines. These may add frames, so that one write carries all of them. A
// write is expensive: it wakes the peer, and it ends the writer's time slice if both
// share a core. With a single call the pause would cost more than it saves. The caller
// holds c.mu; flushSoon releases it.
func (c *Conn) flushSoon() {
	if c.single || len(c.calls) > 1 {
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
	}
	c.flush()
}

// flush writes the waiting frames, unless another goroutine is writing. The caller holds
// c.mu; flush releases it.
func (c *Conn) flush() {
	if c.writing || c.err != nil || len(c.out) == 0 {
		c.mu.Unlock()
		return
	}
	c.writing, c.wrote = true, true
	for round := 0; len(c.out) > 0; round++ {
		left := c.raw == nil || round == maxRounds
		if !left {
			c.take()
			c.mu.Unlock()
			left = !c.seal() || !c.tryWrite()
			c.mu.Lock()
		}
		if left {
			c.mu.Unlock()
			c.wake <- struct{}{} // never blocks: only the writer sends on wake, and writeRests receives before it stops being the writer
			return
		}
		c.keep()
	}
	c.written()
}

// take moves the waiting frames to rest. The caller holds c.mu.
func (c *Conn) take() { c.rest, c.out, c.spare = c.out, c.spare[:0], nil }

// seal encrypts rest if the connection uses TLS. False: the encryption failed, and rest
// is nil.
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

// keep reuses the memory of the written rest for later frames. The caller holds c.mu.
func (c *Conn) keep() {
	if cap(c.rest) <= keptBuffer {
		c.spare = c.rest[:0]
	}
	c.rest = nil
}

// written marks that no goroutine writes, after all frames are written. If Close was
// called, written ends the connection. The caller holds c.mu; written releases it.
func (c *Conn) written() {
	c.writing = false
	leaving := c.leaving
	c.mu.Unlock()
	if leaving != nil {
		c.fail(leaving)
	}
}

// tryWrite writes as much of rest as the socket accepts now. False: bytes remain, or the
// write failed. In both cases writeRests writes again and sees the error.
func (c *Conn) tryWrite() bool {
	done, rest := c.try.write(c.raw, c.rest)
	if !done {
		c.rest = rest
	}
	return done
}

// writeRests writes the bytes that senders could not write at once, until the connection
// ends.
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

// writeRest writes all waiting bytes. Each write waits at most Silence beats for the peer
// to read.
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

// lose notes that the connection cannot write any more. The connection still reads the
// peer's last frames, because one of them may be a bye frame.
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
