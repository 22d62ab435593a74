package coordinator

import (
	"context"
	"net"
	"sync"
	"time"
)

// begunConn is a connection of which the first bytes have been read.
type begunConn struct {
	net.Conn
	begun []byte
}

// Read gives what has been read before first.
func (c *begunConn) Read(p []byte) (int, error) {
	if len(c.begun) > 0 {
		n := copy(p, c.begun)
		c.begun = c.begun[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// Others is a listener of the connections that come to the listeners of Serve and
// do not begin as a worker's: those of HTTP clients. They wait for somebody to
// accept them as long as a greeting may take; Close does not end those of Serve.
func (s *Server) Others(address net.Addr) net.Listener {
	return &others{conns: s.others, address: address, closed: make(chan struct{})}
}

type others struct {
	conns   chan net.Conn
	address net.Addr
	once    sync.Once
	closed  chan struct{}
}

// Accept implements net.Listener.
func (o *others) Accept() (net.Conn, error) {
	select {
	case c := <-o.conns:
		return c, nil
	case <-o.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (o *others) Close() error {
	o.once.Do(func() { close(o.closed) })
	return nil
}

// Addr implements net.Listener.
func (o *others) Addr() net.Addr { return o.address }

// pass hands over a connection that is no worker's. One that nobody accepts is
// closed: strangers must not pile up.
func (s *Server) pass(ctx context.Context, nc net.Conn) {
	limit := time.NewTimer(greetingLimit)
	defer limit.Stop()
	select {
	case s.others <- nc:
		return
	case <-limit.C:
	case <-ctx.Done():
	}
	nc.Close()
}
