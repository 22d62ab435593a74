package upstream

import (
	"io"
	"time"
)

// lookAgain is how long a body that is followed may be silent before its socket
// is read once more unasked: the end of a connection that comes together with
// data wakes nobody a second time. What comes after that look does.
const lookAgain = time.Second

// Each reads what is left of the body into p, as Read does, and calls use with
// each piece, then with the error that ends them, until use returns false. On a
// bare socket it waits for a piece without looking first whether it is there,
// which saves a system call. Close and the end of the context tell the engine at
// once, but wait for a use under way; use must not call Close.
func (r *Response) Each(p []byte, use func(n int, err error) bool) { r.body.each(p, use) }

func (c *netHTTPCall) each(p []byte, use func(n int, err error) bool) {
	for {
		if n, err := c.Read(p); !use(n, err) || err != nil {
			return
		}
	}
}

func (c *call) each(p []byte, use func(n int, err error) bool) {
	for {
		n, err := c.Read(p)
		if !use(n, err) || err != nil {
			return
		}
		if n, ok := c.follow(p, use); !ok || n > 0 && !use(n, nil) {
			return
		}
	}
}

// follow calls use for the pieces of a chunked body as they come on a bare
// socket. What ends the body is left to Read, but for the n last bytes of it;
// not ok: use wants no more.
func (c *call) follow(p []byte, use func(n int, err error) bool) (n int, ok bool) {
	var failed error // to read or to decode
	stopped, looked := false, false
	read := func(fd uintptr) bool {
		for {
			k, again, err := readNow(fd, p)
			if again {
				return false
			}
			if err != nil {
				failed = err
				return true
			}
			var used int
			n, used, failed = c.body.decode(p[:k])
			if used < k {
				c.keep = false // the engine sent more than its answer
			}
			if failed != nil || c.body.done() {
				return true
			}
			c.readAt = time.Now()
			c.client.calls.hear(&c.seat, c.readAt)
			if n > 0 && !use(n, nil) {
				stopped = true
				return true
			}
			if n = 0; k < len(p) { // nothing more is there
				return looked // then the next look is to be set
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

// followed returns the connection if its body can be followed, with the deadline
// set: that of the next look, once looked that of the next piece.
func (c *call) followed(looked bool) *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	cn := c.conn
	if !canFollow || cn == nil || c.err != nil || c.ended != nil || c.body.kind != byChunks ||
		cn.raw == nil || cn.secure() || cn.buffered() > 0 {
		return nil
	}
	var by time.Time
	if c.idle > 0 {
		by = c.readAt.Add(c.idle)
	}
	if look := time.Now().Add(lookAgain); !looked && (by.IsZero() || look.Before(by)) {
		by = look
	}
	c.follows = true
	c.idleBy = time.Time{} // not the one that Read has set
	cn.readDeadline(by)
	return cn
}
