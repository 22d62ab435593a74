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

// follow calls use for the pieces of a chunked body as they arrive on a plain TCP
// socket. The end of the body is left to Read, except the last n bytes. ok is false if
// use returned false.
func (c *call) follow(s Space, use func(n int, err error) bool) (n int, ok bool) {
	var failed error // error of reading or decoding
	stopped, looked := false, false
	read := func(fd uintptr) bool {
		for {
			p := s.Take()
			k, again, err := readNow(fd, p)
			if again {
				s.Free()
				return false
			}
			if err != nil {
				failed = err
				return true
			}
			var used int
			n, used, failed = c.body.decode(p[:k])
			if used < k {
				c.reusable = false // the engine sent bytes after its answer
			}
			if failed != nil || c.body.state == inEnd {
				return true
			}
			c.readAt = time.Now()
			c.noteRead(c.readAt)
			if n > 0 && !use(n, nil) {
				stopped = true
				return true
			}
			if n = 0; k < len(p) { // the socket is empty
				s.Free()
				return looked // true: the caller sets the deadline of the second look
			}
		}
	}
	c.readAt = time.Now()
	for {
		cn := c.followed(looked)
		if cn == nil {
			return 0, true
		}
		err := cn.raw.Read(read)
		switch {
		case stopped:
			return 0, false
		case c.body.state == inEnd:
			c.finish(cn)
			return n, true
		case failed == nil && err == nil:
			looked = false
			continue
		case failed == nil && isTimeout(err) && (c.idle == 0 || time.Since(c.readAt) < c.idle):
			looked = true
			continue
		case failed == nil:
			failed = err
		case failed == io.EOF || isErrno(failed):
			failed = lost(failed)
		}
		c.err = c.fail(cn, &Error{Op: OpBody, Err: failed})
		return n, true
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
