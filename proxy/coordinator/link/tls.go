package link

import (
	"crypto/tls"
	"net"
	"sync"
	"syscall"
)

// TLS is a TLS connection of either side. A Conn over a TLS never waits for the socket
// while it encrypts: the encrypted bytes go to memory first.
type TLS struct {
	*tls.Conn
	under *transport
}

// Client returns the client side of TLS over nc. The caller runs the handshake.
func Client(nc net.Conn, config *tls.Config) *TLS {
	t := &transport{Conn: nc, raw: rawOf(nc)}
	return &TLS{Conn: tls.Client(t, config), under: t}
}

// Server returns the server side of TLS over nc. begun has the bytes that the caller has
// already read from nc. The caller runs the handshake.
func Server(nc net.Conn, begun []byte, config *tls.Config) *TLS {
	t := &transport{Conn: nc, raw: rawOf(nc), begun: begun}
	return &TLS{Conn: tls.Server(t, config), under: t}
}

// rawOf returns the descriptor of a socket, nil for any other connection.
func rawOf(nc net.Conn) syscall.RawConn {
	s, ok := nc.(syscall.Conn)
	if !ok || !canTry {
		return nil
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}

// seal encrypts plain and returns the TLS records. seal reuses the memory of plain for
// later records.
func (t *TLS) seal(plain []byte) ([]byte, error) {
	_, err := t.Write(plain)
	sealed := t.under.take(plain)
	return sealed, err
}

// transport is the connection under a tls.Conn. Reads come from the socket. Writes go to
// the socket, or to memory after hold.
type transport struct {
	net.Conn
	raw   syscall.RawConn // nil: Conn is no socket
	begun []byte          // bytes that the caller of Server has already read; owned by the reader

	mu   sync.Mutex
	held bool   // writes go to out; guarded by mu
	out  []byte // guarded by mu
}

// hold redirects all later writes to memory.
func (t *transport) hold() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.held = true
}

// take returns the written bytes and uses spare's memory for later writes.
func (t *transport) take(spare []byte) []byte {
	if cap(spare) > keptBuffer {
		spare = nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	written := t.out
	t.out = spare[:0]
	return written
}

// Read implements net.Conn.
func (t *transport) Read(p []byte) (int, error) {
	if len(t.begun) > 0 {
		n := copy(p, t.begun)
		t.begun = t.begun[n:]
		return n, nil
	}
	return t.Conn.Read(p)
}

// Write implements net.Conn.
func (t *transport) Write(p []byte) (int, error) {
	t.mu.Lock()
	if t.held {
		defer t.mu.Unlock()
		t.out = append(t.out, p...)
		return len(p), nil
	}
	t.mu.Unlock()
	return t.Conn.Write(p)
}
