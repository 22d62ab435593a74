package upstream

import (
	"io"
	"time"
)

// framing finds the end of a body. The zero value stands for no body.
type framing struct {
	kind   framingKind
	left   int64 // byLength: bytes still to come
	chunks chunks
}

type framingKind uint8

const (
	byLength framingKind = iota
	byChunks
	byClose
)

func (f *framing) done() bool {
	switch f.kind {
	case byLength:
		return f.left == 0
	case byChunks:
		return f.chunks.done()
	}
	return false
}

// decode removes the framing from b in place, as chunks.decode does.
func (f *framing) decode(b []byte) (n, used int, err error) {
	switch f.kind {
	case byLength:
		n = int(min(f.left, int64(len(b))))
		f.left -= int64(n)
		return n, n, nil
	case byChunks:
		return f.chunks.decode(b)
	}
	return len(b), len(b), nil
}

// Read implements Response.Read.
func (c *call) Read(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	cn, err := c.begin()
	if err != nil {
		c.err = c.fail(cn, &Error{Op: OpBody, Err: err})
		return 0, c.err
	}
	n, err := c.fill(cn, p)
	switch {
	case err != nil:
		c.err = c.fail(cn, &Error{Op: OpBody, Err: err})
	case c.body.done():
		c.finish(cn)
	}
	if n > 0 {
		return n, nil
	}
	return 0, c.err
}

// tooEarly reports whether err is the timeout of a deadline that an earlier read had
// set, and sets the deadline of the present read. Moving the deadline at each event of
// a stream would cost more than reading the event.
func (c *call) tooEarly(err error) bool {
	if err == nil || !isTimeout(err) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	by := c.readAt.Add(c.idle)
	if c.conn == nil || c.evicted || c.idle == 0 || !c.lingerBy.IsZero() || !c.idleBy.Before(by) {
		return false
	}
	c.idleBy = by
	c.conn.readDeadline(by)
	return true
}

// Close implements Response.Close.
func (c *call) Close() error {
	if cn, _ := c.end(); cn != nil {
		c.mu.Lock()
		c.abort(cn)
		c.mu.Unlock()
		c.client.pool.drop()
	}
	return nil
}

// begin returns the connection with the deadline of one Read set. It returns nil after
// Close.
func (c *call) begin() (*conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cn := c.conn
	switch {
	case cn == nil:
		return nil, ErrClosed
	case c.ended != nil && c.lingerBy.IsZero():
		return cn, c.ended
	case c.evicted:
		return cn, ErrEvicted
	case cn.buffered() > 0:
		return cn, nil
	}
	by := c.lingerBy
	if c.idle > 0 {
		c.readAt = time.Now()
		if by.IsZero() && c.idleBy.Sub(c.readAt) >= c.idle-c.idle/16 {
			return cn, nil // the deadline of an earlier read stands; tooEarly corrects it
		}
		if idleBy := c.readAt.Add(c.idle); by.IsZero() || idleBy.Before(by) {
			by = idleBy
		}
	}
	c.idleBy = by
	cn.readDeadline(by)
	return cn, nil
}

// fill reads until it has a byte of data or the end of the body. It takes bytes that
// are buffered behind the head first, then reads straight into p, where decode removes
// the framing.
func (c *call) fill(cn *conn, p []byte) (n int, err error) {
	for n < len(p) && !c.body.done() {
		var k int
		var lostBy error
		if cn.buffered() > 0 {
			k = cn.take(p[n:])
		} else if n > 0 {
			return n, nil
		} else {
			c.client.freeBuffer(cn)
			if k, lostBy = cn.Read(p); k == 0 && c.tooEarly(lostBy) {
				k, lostBy = cn.Read(p)
			}
			if k > 0 {
				c.client.calls.noteRead(&c.entry, time.Now())
			}
		}
		m, used, err := c.body.decode(p[n : n+k])
		n += m
		if err != nil {
			return n, err
		}
		if used < k {
			c.reusable = false // the engine sent bytes after its answer
		}
		if lostBy != nil && !c.body.done() {
			return n, c.connectionEnded(lostBy)
		}
	}
	return n, nil
}

// connectionEnded interprets the end of the connection inside a body: the end of the
// connection is the regular end if the body has neither a length nor chunks.
func (c *call) connectionEnded(err error) error {
	switch {
	case err == io.EOF && c.body.kind == byClose:
		c.body = framing{}
		return nil
	case isTimeout(err):
		return err
	}
	return lost(err)
}
