//go:build unix

package upstream

import (
	"io"
	"syscall"
	"time"
)

// look notes whether the socket has nothing to read: no unrequested data, no end of the
// stream, no error. It does not block.
func (c *conn) look(fd uintptr) {
	var b [1]byte
	for {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
		if err != syscall.EINTR {
			c.isQuiet = err == syscall.EAGAIN
			return
		}
	}
}

// secondLook is the time for which Each waits in the poller for the next piece before it
// reads the socket once more. If the peer's close arrives together with data, the poller
// wakes the reader only once. After this second read the poller reports every event.
const secondLook = time.Second

// follower is the state of follow on a connection. The connection keeps it, so that a stream
// allocates nothing for it.
type follower struct {
	once func(fd uintptr) bool // read; made by the first follow on the connection

	call    *call // this and the rest are empty while no follow runs
	sink    Sink
	n       int   // bytes of the last piece
	failed  error // of reading or decoding
	stopped bool  // Use returned false
	looked  bool  // the wait for the next piece is the one behind the second look
}

// follow gives s the pieces of a chunked body as they arrive on a plain TCP socket. The end of
// the body is left to Read, except the last n bytes. ok is false if Use returned false.
func (c *call) follow(s Sink) (n int, ok bool) {
	c.readAt = time.Now()
	cn := c.followed(false)
	if cn == nil {
		return 0, true
	}
	f := &cn.follower
	if f.once == nil {
		f.once = f.read
	}
	*f = follower{once: f.once, call: c, sink: s}
	for cn != nil {
		err := cn.raw.Read(f.once)
		late := f.failed == nil && isTimeout(err) && (c.idle == 0 || time.Since(c.readAt) < c.idle)
		if f.stopped || f.failed != nil || c.body.state == inEnd || err != nil && !late {
			return f.end(cn, err)
		}
		f.looked = late
		cn = c.followed(late)
	}
	*f = follower{once: f.once} // the call has ended, or Read waits for the end of the linger
	return 0, true
}

// end ends a follow after the last read, whose error is err. Afterwards the connection may have
// another call.
func (f *follower) end(cn *conn, err error) (n int, ok bool) {
	c, n, failed, stopped := f.call, f.n, f.failed, f.stopped
	*f = follower{once: f.once}
	switch {
	case stopped:
		return 0, false
	case c.body.state == inEnd:
		c.finish(cn)
		return n, true
	case failed == nil:
		failed = err
	case failed == io.EOF || isErrno(failed):
		failed = lost(failed)
	}
	c.err = c.fail(cn, &Error{Op: OpBody, Err: failed})
	return n, true
}

// read reads and uses pieces until the socket is empty. It returns false to wait for more.
func (f *follower) read(fd uintptr) bool {
	c := f.call
	for {
		p := f.sink.Take()
		k, again, err := readNow(fd, p)
		if again {
			f.sink.Free()
			return false
		}
		if err != nil {
			f.failed = err
			return true
		}
		var used int
		f.n, used, f.failed = c.body.decode(p[:k])
		if used < k {
			c.reusable = false // the engine sent bytes after its answer
		}
		if f.failed != nil || c.body.state == inEnd {
			return true
		}
		c.readAt = time.Now()
		c.noteRead(c.readAt)
		if f.n > 0 && !f.sink.Use(f.n, c.readAt, nil) {
			f.stopped = true
			return true
		}
		if f.n = 0; k < len(p) { // the socket is empty
			f.sink.Free()
			return f.looked // true: the caller sets the deadline of the second look
		}
	}
}

// followed returns the connection if its body can be followed, with a read deadline:
// that of the second look, or, after the second look, that of the next piece.
func (c *call) followed(looked bool) *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	cn := c.conn
	if cn == nil || c.err != nil || c.ended != nil || c.evicted || c.body.kind != byChunks ||
		cn.raw == nil || cn.secure || cn.r < cn.w {
		return nil
	}
	var by time.Time
	if c.idle > 0 {
		by = c.readAt.Add(c.idle)
	}
	if look := time.Now().Add(secondLook); !looked && (by.IsZero() || look.Before(by)) {
		by = look
	}
	c.client.freeBuffer(cn)
	c.follows = true
	c.idleBy = time.Time{} // the deadline is not the one that Read has set
	cn.readDeadline(by)
	return cn
}

// readNow reads the bytes that are there. again is true if there are none. The end is
// io.EOF.
func readNow(fd uintptr, p []byte) (n int, again bool, err error) {
	for {
		n, err = syscall.Read(int(fd), p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, true, nil
		case err != nil:
			return 0, false, err
		case n == 0:
			return 0, false, io.EOF
		default:
			return n, false, nil
		}
	}
}

func isErrno(err error) bool {
	_, ok := err.(syscall.Errno)
	return ok
}
