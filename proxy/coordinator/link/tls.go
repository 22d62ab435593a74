package link

import (
	"crypto/tls"
	"net"
	"sync"
	"syscall"

	"github.com/pdproxy/pdproxy/proxy/socket"
)

// TLS is a TLS connection of either side. A Conn over it never waits for the socket
// when it writes: the encrypted bytes stay in memory until the socket takes them.
type TLS struct {
	*tls.Conn
	under *transport
}

// Client returns the client side of TLS over nc. The caller runs the handshake.
func Client(nc net.Conn, config *tls.Config) *TLS {
	t := &transport{Conn: socket.Of(nc), raw: rawOf(nc)}
	return &TLS{Conn: tls.Client(t, config), under: t}
}

// Server returns the server side of TLS over nc, of which the bytes begun have been
// read already. The caller runs the handshake.
func Server(nc net.Conn, begun []byte, config *tls.Config) *TLS {
	t := &transport{Conn: socket.Of(nc), raw: rawOf(nc), begun: begun}
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

// seal encrypts plain, whose memory it takes over, and returns the TLS records.
func (t *TLS) seal(plain []byte) ([]byte, error) {
	_, err := t.Write(plain)
	sealed := t.under.take(plain)
	return sealed, err
}

// transport is the connection under a tls.Conn: the socket, or memory once a Conn does the
// writing.
type transport struct {
	net.Conn
	raw   syscall.RawConn // nil: Conn is no socket
	begun []byte          // has been read already; of who reads

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
