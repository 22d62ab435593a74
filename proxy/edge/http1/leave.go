package http1

import (
	"crypto/tls"
	"net"
	"sync/atomic"
	"syscall"
	"time"
)

// leaving is how the server notices that the client of a connection leaves while a handler runs. A
// socket of Linux is watched by the kernel. On other connections a goroutine reads the first byte of
// the next request.
type leaving struct {
	socket syscall.RawConn // nil: not watched by the kernel
	secure bool            // the bytes of the socket are TLS records
	id     uint64          // in the watcher
	closed atomic.Bool     // the client has closed its side, perhaps behind bytes that have not been read
	whole  atomic.Bool     // the handler has read the whole request

	background chan struct{} // closed at the end of the goroutine; nil: none runs
	next       [1]byte
	got        int // bytes in next, valid after background was closed
}

// descriptor returns the socket below c, and whether TLS is between them. nil: there is none.
func descriptor(c net.Conn) (socket syscall.RawConn, secure bool) {
	for {
		if s, ok := c.(syscall.Conn); ok {
			raw, err := s.SyscallConn()
			if err != nil {
				return nil, false
			}
			return raw, secure
		}
		below, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil, false
		}
		if _, ok := c.(*tls.Conn); ok {
			secure = true
		}
		c = below.NetConn()
	}
}

// register begins to watch the socket of the connection.
func (c *conn) register() {
	socket, secure := descriptor(c.nc)
	c.watched.secure = secure
	if socket != nil {
		c.server.watcher.add(c, socket)
	}
}

// unregister ends the watching.
func (c *conn) unregister() {
	if c.watched.socket != nil {
		c.server.watcher.remove(c)
	}
}

// watch is called when the handler has the whole request: from now on an end of the connection means
// that the client has left. A handler that answers before it reads the body may so answer a client
// that has closed its side, as with net/http.
func (c *conn) watch() {
	l := &c.watched
	if l.socket != nil {
		l.whole.Store(true)
		if l.closed.Load() && (l.secure || atEnd(l.socket)) {
			c.leave()
		}
		return
	}
	done := make(chan struct{})
	l.background = done
	go func() {
		defer close(done)
		var err error
		if l.got, err = c.nc.Read(l.next[:]); err != nil && !isTimeout(err) {
			c.leave()
		}
	}()
}

// unwatch ends watch. The caller is the only user of the connection.
func (c *conn) unwatch() {
	l := &c.watched
	l.whole.Store(false)
	if l.background == nil {
		return
	}
	if c.nc.SetReadDeadline(past) == nil {
		<-l.background
		_ = c.nc.SetReadDeadline(time.Time{})
	} else {
		<-l.background // the connection is closed
	}
	l.background = nil
	if l.got > 0 {
		l.got = 0
		c.push(l.next[0])
	}
}

// push adds a byte that was read to the buffer.
func (c *conn) push(b byte) {
	c.grow()
	c.buf[c.w] = b
	c.w++
}

// hungUp is called by the watcher when the client has closed its side of the connection. As with
// net/http, a client with a further request in the socket has not left yet.
func (c *conn) hungUp() {
	l := &c.watched
	l.closed.Store(true) // first, because watch looks at it
	if l.whole.Load() && (l.secure || atEnd(l.socket)) {
		c.leave()
	}
}
