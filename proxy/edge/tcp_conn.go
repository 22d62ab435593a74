package edge

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// tcpListener counts the connections that it accepts, and refuses a connection for which
// there is no place. If the process has no descriptor left it closes an idle connection.
type tcpListener struct {
	net.Listener
	conns *connections
	plain bool // refused clients get an HTTP/1.1 answer
}

// Accept implements net.Listener.
func (l tcpListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if outOfDescriptors(err) && l.conns.spare() {
			time.Sleep(acceptPause) // until the kernel has closed it
			continue
		}
		if err != nil {
			return nil, err
		}
		if t := l.conns.adopt(c); t != nil {
			return t, nil
		}
		l.refuse(c)
	}
}

// acceptPause is the wait after a temporary error of Accept.
const acceptPause = 5 * time.Millisecond

func outOfDescriptors(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// errTooMany refuses a client for whose connection there is no place.
var errTooMany = openai.NewError(openai.CodeTooManyConnections, "too many connections are open")

// refuse answers and closes a connection. The write does not block, because the send
// buffer of a new connection is empty.
func (l tcpListener) refuse(c net.Conn) {
	if l.plain && c.SetWriteDeadline(time.Now().Add(acceptPause)) == nil {
		_, _ = c.Write(appendRefusal(nil, errTooMany)) // the client may be gone
	}
	c.Close()
}

// adopt counts an accepted connection. It returns nil if there is no place for it.
func (c *connections) adopt(nc net.Conn) *tcpConn {
	k := c.take(nc.RemoteAddr(), carriedByTCP)
	if k == nil {
		return nil
	}
	t := &tcpConn{Conn: nc, connection: k}
	c.sockets.Add()
	c.mu.Lock()
	c.tcp[t] = struct{}{}
	c.mu.Unlock()
	k.ready(func() { t.Close() })
	return t
}

// tcpConn is a client's connection over TCP, below TLS.
type tcpConn struct {
	net.Conn
	*connection
	// The tick at which the connection began to wait for the client; 0: it does not wait.
	writing atomic.Int64 // in a write
	head    atomic.Int64 // for the rest of a request head of HTTP/2
}

// Write implements net.Conn. One write runs at a time.
func (t *tcpConn) Write(p []byte) (int, error) {
	t.writing.Store(t.all.tick.Load())
	n, err := t.Conn.Write(p)
	t.writing.Store(0)
	return n, err
}

// Close implements net.Conn. The connection keeps its place until its descriptor is free.
func (t *tcpConn) Close() error {
	t.all.mu.Lock()
	_, open := t.all.tcp[t]
	delete(t.all.tcp, t)
	t.unlist()
	t.end = nil // the connection is never idle again
	t.all.mu.Unlock()
	if open {
		defer t.all.sockets.Done()
	}
	defer t.leave()
	return t.Conn.Close()
}

// closeAll closes all TCP connections.
func (c *connections) closeAll() {
	c.mu.Lock()
	open := slices.Collect(maps.Keys(c.tcp))
	c.mu.Unlock()
	for _, t := range open { // Close takes the lock
		t.Close()
	}
}

// NetConn returns the connection below.
func (t *tcpConn) NetConn() net.Conn { return t.Conn }

// abort closes the connection of a client that does not read. The kernel drops the unsent
// bytes; otherwise it would keep them until the client reads them.
func (t *tcpConn) abort() {
	if s, ok := t.Conn.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { // after an error the kernel keeps the bytes for some minutes
				_ = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
			})
		}
	}
	t.Close()
}

// CloseWrite closes the sending side. net/http and crypto/tls call it.
func (t *tcpConn) CloseWrite() error {
	if w, ok := t.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// tcpOf returns the tcpConn in or below c, which tcpListener has made.
func tcpOf(c net.Conn) *tcpConn {
	for {
		if t, ok := c.(*tcpConn); ok {
			return t
		}
		c = c.(interface{ NetConn() net.Conn }).NetConn()
	}
}

// stallLimits are the longest times that a client can make the proxy wait.
type stallLimits struct {
	head  time.Duration // for the head of a request over HTTP/2
	write time.Duration // in one write to a TCP connection
}

// Bounds of the time between two ticks.
const (
	tickLeast = 5 * time.Millisecond
	tickMost  = time.Second
)

// cutStalled closes the TCP connections whose client exceeds a limit, until ctx ends. A
// connection notes the tick at which a wait began, so a read or a write costs two stores and no
// timer. A connection closes at most two ticks late. A tick is an eighth of the shorter limit, but
// at most a second.
func (c *connections) cutStalled(ctx context.Context, limits stallLimits) {
	period := min(max(min(limits.head, limits.write)/8, tickLeast), tickMost)
	ticks := func(limit time.Duration) int64 { return int64((limit+period-1)/period) + 1 }
	heads, writes := ticks(limits.head), ticks(limits.write)
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := c.tick.Add(1)
		for _, t := range c.stalled(now-heads, now-writes) {
			t.abort()
		}
	}
}

// stalled returns the connections that have waited for a head, or in a write, since
// these ticks or earlier.
func (c *connections) stalled(head, write int64) (late []*tcpConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := range c.tcp {
		h, w := t.head.Load(), t.writing.Load()
		if h > 0 && h <= head || w > 0 && w <= write {
			late = append(late, t)
		}
	}
	return late
}
