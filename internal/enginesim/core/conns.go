package core

import (
	"net"
	"net/http"
	"sync"
)

// connSet holds the open HTTP connections of an engine. It is safe for
// concurrent use.
type connSet struct {
	mu    sync.Mutex
	conns map[net.Conn]struct{}
	ended bool // guarded by mu
}

func newConnSet() *connSet { return &connSet{conns: make(map[net.Conn]struct{})} }

// State is the server's ConnState hook.
func (c *connSet) State(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s {
	case http.StateNew:
		if c.ended { // accepted while the process ended
			conn.Close()
			return
		}
		c.conns[conn] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(c.conns, conn)
	}
}

func (c *connSet) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.conns)
}

// Close closes every connection, also those that come later; abrupt resets them.
func (c *connSet) Close(abrupt bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for conn := range c.conns {
		closeConn(conn, abrupt)
	}
}

// closeConn closes a connection, with RST instead of FIN when abrupt.
func closeConn(conn net.Conn, abrupt bool) {
	if tcp, ok := conn.(*net.TCPConn); ok && abrupt {
		tcp.SetLinger(0)
	}
	conn.Close()
}

// faultyListener accepts connections. If the engine's fault requires it, a connection
// hangs before it is read.
type faultyListener struct {
	net.Listener
	e *Engine
}

func (l *faultyListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil || !l.e.Faults.hanging(HangConnect) {
			return conn, err
		}
		l.e.Conns.State(conn, http.StateNew)
	}
}
