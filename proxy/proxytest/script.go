package proxytest

import (
	"bytes"
	"io"
	"net"
	"sync"
	"time"
)

// Script is a connection without a descriptor. Its reads return the pieces of a text, then the end. It
// stores the written bytes.
type Script struct {
	mu     sync.Mutex
	pieces [][]byte     // that are not yet read; guarded by mu
	out    bytes.Buffer // guarded by mu
	closed chan struct{}
	once   sync.Once
}

// NewScript returns a connection whose pieces end at the cuts.
func NewScript(all string, cuts ...int) *Script {
	c := &Script{closed: make(chan struct{})}
	last := 0
	for _, cut := range append(cuts, len(all)) {
		if cut = min(cut, len(all)); cut > last {
			c.pieces = append(c.pieces, []byte(all[last:cut]))
			last = cut
		}
	}
	return c
}

// Sent returns the written bytes.
func (c *Script) Sent() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.String()
}

// Closed is closed with the connection.
func (c *Script) Closed() <-chan struct{} { return c.closed }

// Read implements net.Conn.
func (c *Script) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pieces) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.pieces[0])
	if c.pieces[0] = c.pieces[0][n:]; len(c.pieces[0]) == 0 {
		c.pieces = c.pieces[1:]
	}
	return n, nil
}

// Write implements net.Conn.
func (c *Script) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.Write(p)
}

// Close implements net.Conn.
func (c *Script) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// LocalAddr implements net.Conn.
func (c *Script) LocalAddr() net.Addr { return &net.TCPAddr{} }

// RemoteAddr implements net.Conn.
func (c *Script) RemoteAddr() net.Addr { return &net.TCPAddr{} }

// SetDeadline implements net.Conn.
func (c *Script) SetDeadline(time.Time) error { return nil }

// SetReadDeadline implements net.Conn.
func (c *Script) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements net.Conn.
func (c *Script) SetWriteDeadline(time.Time) error { return nil }

// oneConn is a listener that returns one connection.
type oneConn struct {
	conn net.Conn
	done chan struct{}
	once sync.Once
}

// OneConn returns a listener that returns conn, unless conn is nil, and then waits for its own end.
func OneConn(conn net.Conn) net.Listener {
	return &oneConn{conn: conn, done: make(chan struct{})}
}

func (l *oneConn) Accept() (net.Conn, error) {
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *oneConn) Addr() net.Addr { return &net.TCPAddr{} }
