package access

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
)

// Queue passes connections of HTTP callers from the listeners to the HTTP server. Safe for concurrent use.
type Queue struct{ conns chan net.Conn }

// NewQueue returns a queue without connections.
func NewQueue() *Queue { return &Queue{conns: make(chan net.Conn)} }

// Offer passes on a connection of an HTTP caller. The server limits the connections that it
// accepts. Offer closes a connection that the server does not accept within GreetingLimit,
// because the number of connections of unauthenticated callers must stay bounded.
func (q *Queue) Offer(ctx context.Context, v *Visitor) {
	c := &httpConn{Conn: v.Conn, begun: v.Begun}
	if !v.Admit() {
		return
	}
	limit := time.NewTimer(GreetingLimit)
	defer limit.Stop()
	select {
	case q.conns <- c:
		return
	case <-limit.C:
	case <-ctx.Done():
	}
	c.Close()
}

// Listener returns a listener whose Accept returns the offered connections. Its Close
// ends only its Accept.
func (q *Queue) Listener(address net.Addr) net.Listener {
	return &listener{queue: q, address: address, closed: make(chan struct{})}
}

type listener struct {
	queue   *Queue
	address net.Addr
	once    sync.Once
	closed  chan struct{}
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return l.address }

// httpConn is a connection of an HTTP caller. The gate may have read its first bytes
// already.
type httpConn struct {
	net.Conn
	begun []byte
}

// Read implements net.Conn. It returns the bytes that the gate has read first.
func (c *httpConn) Read(p []byte) (int, error) {
	if len(c.begun) > 0 {
		n := copy(p, c.begun)
		c.begun = c.begun[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// Exposed reports whether a third host could read the connection: the connection is not
// encrypted, and its peer is another host.
func (c *httpConn) Exposed() bool {
	if _, secured := c.Conn.(*link.TLS); secured {
		return false
	}
	remote, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok || remote.IP.IsLoopback() {
		return false
	}
	local, ok := c.LocalAddr().(*net.TCPAddr)
	return !ok || !local.IP.Equal(remote.IP)
}

// Accept calls handle in a new goroutine for each connection of l, until ctx ends or l
// is closed. Then Accept closes l and waits until all calls of handle have returned.
func Accept(ctx context.Context, l net.Listener, log *slog.Logger, handle func(net.Conn)) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	var conns sync.WaitGroup
	defer conns.Wait()
	defer l.Close()
	for pause := time.Duration(0); ; {
		nc, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				nc.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept worker: %w", err)
		case err != nil: // the usual cause is a lack of file descriptors
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			log.Warn("accepting a worker failed", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			continue
		}
		pause = 0
		conns.Go(func() { handle(nc) })
	}
}
