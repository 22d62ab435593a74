package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// reader is the goroutine that reads from the peer.
type reader uint8

const (
	ofRun    reader = iota // Run's goroutine
	aCaller                // a caller that waits for its answer
	ofNobody               // no goroutine; the next caller reads, or tend wakes Run's goroutine
)

// answered passes a call its answer.
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

// read handles incoming frames until the connection ends. While calls with a time limit
// follow each other, their callers read instead.
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
				<-c.resume // Run's goroutine has handled its frames
			}
			return c.Err()
		}
	}
}

// lead reads until the caller has its answer, and then returns true. False: another
// goroutine reads or read the answer, or tend stopped this reader, or the read failed.
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
	if err != nil && err != errKicked {
		c.fail(err) // before Run's goroutine reads again, because its next read fails for another reason
	}
	c.mu.Lock()
	c.leader, c.reader = nil, ofNobody
	if err != nil || len(c.calls) > 0 || c.err != nil {
		c.handBack()
	}
	c.mu.Unlock()
	return answered
}

// handBack makes Run's goroutine read again. No goroutine may be reading, and the caller
// holds c.mu.
func (c *Conn) handBack() {
	c.reader = ofRun
	c.resume <- struct{}{} // never blocks: resume is empty here, because Run's goroutine receives before it sets ofNobody again
}

// errKicked makes the reader check whether it should continue to read: tend set a read deadline in
// the past, or the reader handles no more frames.
var errKicked = errors.New("link: the reader must stop")

// readOnce reads once and handles the complete frames. If the handler returns an error,
// readOnce closes the connection with a bye frame and handles no more frames.
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

// gone adds the meaning to a read error. A running peer sends a bye frame before it
// closes, so an end without a bye frame means that the peer's process has died (ErrGone).
// There are two exceptions in which a running peer may be unable to send the bye frame:
// the peer had written a part of another frame, or this process was suspended and did not
// read.
func (c *Conn) gone(err error) error {
	ends := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
	switch {
	case ends && len(c.in) > 0, errors.Is(err, io.ErrUnexpectedEOF): // io.ErrUnexpectedEOF: the stream ended within a TLS record
		return fmt.Errorf("link: the connection ended within a frame: %w", err)
	case ends && !c.stopped():
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return err
}

// handle handles the complete frames of b and returns their total size in bytes. It stops
// when the connection has ended.
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

// Garbage returns an error that wraps ErrGarbage. what names the malformed part.
func Garbage(what string) error { return fmt.Errorf("%w: %s", ErrGarbage, what) }
