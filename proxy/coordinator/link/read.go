package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// reader is who reads from the peer.
type reader uint8

const (
	ofRun    reader = iota // Run's goroutine
	aCaller                // one that waits for its answer
	ofNobody               // the next caller will, or tend has Run's do it
)

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

// read handles what comes, until the connection ends. While callers come one after
// the other it leaves the reading to them.
func (c *Conn) read() error {
	for {
		if err := c.readOnce(); err != nil && err != errKicked {
			return err
		}
		c.mu.Lock()
		rests := c.timed && len(c.calls) == 0 && c.err == nil
		if rests {
			c.reader = ofNobody
		}
		c.mu.Unlock()
		if !rests {
			continue
		}
		select {
		case <-c.resume:
		case <-c.ended:
			c.mu.Lock()
			led := c.reader == aCaller
			c.mu.Unlock()
			if led {
				<-c.resume // it has handled what it was at
			}
			return c.Err()
		}
	}
}

// lead has a caller read until it has its answer. False: somebody else reads, or
// it has been kicked, or its answer is there.
func (c *Conn) lead(number uint32, p *pending) (answered bool) {
	c.mu.Lock()
	leads := c.reader == ofNobody && c.calls[number] == p
	if leads {
		c.reader, c.leader = aCaller, p
	}
	c.mu.Unlock()
	if !leads {
		return false
	}
	var err error
	for err == nil && !answered {
		err = c.readOnce()
		select {
		case <-p.done:
			answered = true
		default:
		}
	}
	c.mu.Lock()
	c.leader, c.reader = nil, ofNobody
	if err != nil || len(c.calls) > 0 || c.err != nil {
		c.handBack()
	}
	c.mu.Unlock()
	if err != nil && err != errKicked {
		c.fail(err)
	}
	return answered
}

// handBack has Run's goroutine read again; nobody does, and c.mu is held.
func (c *Conn) handBack() {
	c.reader = ofRun
	c.resume <- struct{}{} // has room: it waits for this, and takes it before it lets nobody read again
}

// errKicked says that who reads is to see whether it still should: the deadline of
// reads has passed, or nothing is handled any more.
var errKicked = errors.New("link: somebody else is to read")

// readOnce reads once, and handles the frames that are whole then. After one that is
// refused the peer is told that this side leaves, and nothing is handled any more.
func (c *Conn) readOnce() error {
	if c.deaf {
		<-c.ended
		return c.Err()
	}
	n, err := c.nc.Read(c.in[len(c.in):cap(c.in)])
	if n > 0 {
		c.reads.Add(1)
		c.in = c.in[:len(c.in)+n]
		used, err := c.handle(c.in)
		c.Flush()
		switch {
		case errors.Is(err, ErrLeft):
			return err
		case err != nil:
			c.deaf = true
			c.Close(err)
			return errKicked
		}
		c.in = keepRest(c.in, used)
	}
	if err == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.kicked {
		return c.gone(err)
	}
	c.kicked = false
	c.nc.SetReadDeadline(time.Time{})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errKicked
	}
	return c.gone(err)
}

// gone is what the error of a read says of the peer. One that lives leaves with a
// word, unless it had begun a frame, or found no room for it because this process was
// stopped: then nobody can tell.
func (c *Conn) gone(err error) error {
	ends := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
	switch {
	case ends && len(c.in) > 0, errors.Is(err, io.ErrUnexpectedEOF): // the latter within a TLS record
		return fmt.Errorf("link: the peer has gone within a frame: %w", err)
	case ends && !c.stopped():
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return err
}

// handle handles the whole frames of b and returns how many bytes those were. It
// stops when the connection has ended.
func (c *Conn) handle(b []byte) (used int, err error) {
	for {
		select {
		case <-c.ended:
			return used, c.Err()
		default:
		}
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
