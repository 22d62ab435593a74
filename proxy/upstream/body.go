package upstream

import (
	"io"
	"time"
)

// framing finds the end of a body. The zero value is that of no body.
type framing struct {
	kind   framingKind
	left   int64 // byLength: still to come
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

// decode takes the framing out of b in place, as chunks.decode does.
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

// Read implements io.Reader as Response.Read says.
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

// tooEarly reports that err ended a read before its time, by the deadline of an
// earlier one, and sets the right one. Moving a deadline at each event of a
// stream would cost more than reading it.
func (c *call) tooEarly(err error) bool {
	if err == nil || !isTimeout(err) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	by := c.readAt.Add(c.idle)
	if c.conn == nil || c.left || c.idle == 0 || !c.lingerBy.IsZero() || !c.idleBy.Before(by) {
		return false
	}
	c.idleBy = by
	c.conn.readDeadline(by)
	return true
}

// Close implements io.Closer as Response.Close says.
func (c *call) Close() error {
	if cn, _ := c.end(); cn != nil {
		c.mu.Lock()
		c.abort(cn)
		c.mu.Unlock()
		c.client.pool.drop()
	}
	return nil
}

// begin returns the connection, nil after Close, with the deadline of one Read
// set.
func (c *call) begin() (*conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cn := c.conn
	switch {
	case cn == nil:
		return nil, ErrClosed
	case c.ended != nil && c.lingerBy.IsZero():
		return cn, c.ended
	case c.left:
		return cn, ErrEvicted
	case cn.buffered() > 0:
		return cn, nil
	}
	by := c.lingerBy
	if c.idle > 0 {
		c.readAt = time.Now()
		if by.IsZero() && c.idleBy.Sub(c.readAt) >= c.idle-c.idle/16 {
			return cn, nil // the deadline of an earlier read: tooEarly puts it right
		}
		if idleBy := c.readAt.Add(c.idle); by.IsZero() || idleBy.Before(by) {
			by = idleBy
		}
	}
	c.idleBy = by
	cn.readDeadline(by)
	return cn, nil
}

// fill reads once more than it must for the first byte of data, or for the end:
// first what is buffered behind the head, then straight into p, where decode
// takes the framing out.
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
				c.client.calls.hear(&c.seat, time.Now())
			}
		}
		m, used, err := c.body.decode(p[n : n+k])
		n += m
		if err != nil {
			return n, err
		}
		if used < k {
			c.keep = false // the engine sent more than its answer
		}
		if lostBy != nil && !c.body.done() {
			return n, c.connectionEnded(lostBy)
		}
	}
	return n, nil
}

// connectionEnded says what the end of the connection means to the body: its
// regular end if nothing else marks it.
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
