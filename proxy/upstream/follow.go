package upstream

import (
	"io"
	"time"
)

// secondLook is the time for which Each waits in the poller for the next piece before it
// reads the socket once more. If the peer's close arrives together with data, the poller
// wakes the reader only once. After this second read the poller reports every event.
const secondLook = time.Second

// Space lends the memory of the pieces that Each reads. Only the goroutine of Each calls
// its methods.
type Space interface {
	// Take returns the memory for the next piece, not empty. Until Free it returns the
	// same memory.
	Take() []byte
	// Free takes the memory back while Each waits for the engine. Each may call it several
	// times in a row.
	Free()
}

// Each reads the rest of the body into the memory of s, as Read does. It calls use with
// each piece, then with the error that ends the body, until use returns false. On a plain
// TCP socket Each waits for a piece without a read that finds the socket empty, which
// saves a system call, and without memory. Close and the end of the context tell the
// engine at once, but wait for a use in progress; use must not call Close. Each may return
// without a last call of Free.
func (r *Response) Each(s Space, use func(n int, err error) bool) { r.body.each(s, use) }

func (c *call) each(s Space, use func(n int, err error) bool) {
	for {
		if n, ok := c.follow(s, use); !ok || n > 0 && !use(n, nil) {
			return
		}
		if n, err := c.Read(s.Take()); !use(n, err) || err != nil {
			return
		}
	}
}

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
			if failed != nil || c.body.done() {
				return true
			}
			c.readAt = time.Now()
			c.client.calls.noteRead(&c.entry, c.readAt)
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
		case c.body.done():
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
	if !canFollow || cn == nil || c.err != nil || c.ended != nil || c.evicted || c.body.kind != byChunks ||
		cn.raw == nil || cn.secure() || cn.buffered() > 0 {
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
