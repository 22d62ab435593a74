package upstream

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"syscall"
	"time"
)

// conn is one connection to an engine. One call at a time uses it. Only abort may be
// called by other goroutines.
type conn struct {
	net.Conn                 // read and written by calls: the socket, or TLS on it
	socket   net.Conn        // abort closes it directly
	raw      syscall.RawConn // of the socket; nil if it has no descriptor
	peek     func(fd uintptr)
	isQuiet  bool // result of peek

	served    bool      // has carried an earlier call
	readTimed bool      // a read deadline is set
	idleSince time.Time // guarded by the pool's mu

	// buf[r:w] holds bytes that were read and not used yet. The buffer belongs to the
	// client's pool. An idle stream holds no buffer.
	buf  []byte
	r, w int

	vec   net.Buffers // the write in progress
	store [][]byte    // memory of vec
}

func newConn(socket net.Conn) *conn {
	c := &conn{Conn: socket, socket: socket}
	if s, ok := socket.(syscall.Conn); ok {
		c.raw, _ = s.SyscallConn()
	}
	c.peek = func(fd uintptr) { c.isQuiet = quiet(fd) }
	return c
}

// dial opens a connection, with TLS if cfg is not nil.
func dial(ctx context.Context, o *Options, cfg *tls.Config) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, o.DialTimeout)
	defer cancel()
	nc, err := o.Dial(ctx, "tcp", o.address())
	if err != nil {
		return nil, err
	}
	c := newConn(nc)
	if cfg == nil {
		return c, nil
	}
	t := tls.Client(c.socket, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, err
	}
	c.Conn = t
	return c, nil
}

func (c *conn) secure() bool { return c.Conn != c.socket }

// abort closes the connection at once, also during a blocked Read or Write. Closing TLS
// would first send an alert, and would block if the engine does not read.
func (c *conn) abort() { c.socket.Close() }

// discard is abort for an evicted call: the engine never receives bytes that it has not
// acknowledged yet. TCP would otherwise deliver the request when the link is back, and
// an engine that then reads KV by it would read another request's KV.
func (c *conn) discard() {
	if c.raw != nil {
		resetUnsent(c.raw)
	}
	c.abort()
}

// alive reports whether an idle connection can carry a request: the engine has not closed
// the connection and has sent no unrequested bytes. On a TLS connection a read deadline
// in the past is set afterwards.
func (c *conn) alive() bool {
	if c.raw != nil {
		c.isQuiet = false
		if err := c.raw.Control(c.peek); err != nil || !c.isQuiet {
			return false
		}
	}
	if !c.secure() {
		return true
	}
	// The socket does not show records that TLS has read ahead. A read of TLS returns
	// them whatever the deadline, and reads no further.
	c.readDeadline(time.Unix(1, 0))
	n, err := c.Read(make([]byte, 1))
	return n == 0 && isTimeout(err)
}

// deadlines sets the read and write deadlines. A zero read deadline means none.
func (c *conn) deadlines(read, write time.Time) {
	if !read.IsZero() && read.Equal(write) {
		c.readTimed = true
		c.SetDeadline(read)
		return
	}
	c.readDeadline(read)
	c.SetWriteDeadline(write)
}

func (c *conn) readDeadline(t time.Time) {
	if timed := !t.IsZero(); timed || c.readTimed {
		c.readTimed = timed
		c.SetReadDeadline(t)
	}
}

// send writes head and body in one write. On a TLS connection the bytes count as sent
// even if TLS reports none written.
func (c *conn) send(m *message) (sent bool, err error) {
	if len(m.rest) == 0 {
		n, err := c.Write(m.head)
		return n > 0 || c.secure(), err
	}
	c.store = append(append(c.store[:0], m.head), m.rest...)
	c.vec = c.store
	n, err := c.vec.WriteTo(c.Conn)
	clear(c.store)
	c.vec = nil
	return n > 0 || c.secure(), err
}

// fill reads once and appends to the buffered bytes.
func (c *conn) fill() error {
	for {
		n, err := c.Read(c.buf[c.w:])
		c.w += n
		if n > 0 {
			return nil // the next read returns the error again
		}
		if err != nil {
			return err
		}
	}
}

// take moves buffered bytes to p.
func (c *conn) take(p []byte) int {
	n := copy(p, c.buf[c.r:c.w])
	c.r += n
	return n
}

func (c *conn) buffered() int { return c.w - c.r }

// readHead reads until the buffer holds a whole head, and returns the head. answered: at
// least one byte arrived. Bytes after the head stay buffered.
func (c *conn) readHead(limit int) (raw string, answered bool, err error) {
	searched := c.r
	for {
		if n := headEnd(c.buf[c.r:c.w], searched-c.r); n > limit {
			return "", true, errBigHead
		} else if n > 0 {
			raw = string(c.buf[c.r : c.r+n])
			c.r += n
			return raw, true, nil
		}
		searched = c.w
		if c.buffered() >= limit {
			return "", true, errBigHead
		}
		if c.w == len(c.buf) {
			searched -= c.r
			c.grow(limit)
		}
		if err := c.fill(); err != nil {
			if answered = c.buffered() > 0; answered && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return "", answered, err
		}
	}
}

// grow makes room after the buffered bytes.
func (c *conn) grow(limit int) {
	b := c.buf
	if c.r == 0 {
		b = make([]byte, min(2*len(c.buf), max(limit, len(c.buf)+1)))
	}
	c.w = copy(b, c.buf[c.r:c.w])
	c.r, c.buf = 0, b
}
