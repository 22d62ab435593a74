package testbed

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Wire connects two processes. A test can cut the wire: both processes still run, and
// cannot reach each other. The wire ends with its test.
type Wire struct {
	listener net.Listener
	to       string
	wg       sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool // open connections, of both sides
}

// NewWire returns a wire to an address, host:port.
func NewWire(t *testing.T, to string) *Wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &Wire{listener: l, to: to, conns: map[net.Conn]bool{}}
	w.wg.Go(w.accept)
	t.Cleanup(func() {
		l.Close()
		w.Cut(true)
		w.wg.Wait()
	})
	return w
}

// Addr returns the address of the wire's entry, host:port.
func (w *Wire) Addr() string { return w.listener.Addr().String() }

// Cut cuts or joins the wire.
func (w *Wire) Cut(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	for c := range w.conns {
		if cut {
			c.Close()
		}
	}
}

func (w *Wire) accept() {
	for {
		near, err := w.listener.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", w.to)
		if err != nil {
			near.Close()
			continue
		}
		if !w.keep(near, far) {
			continue
		}
		w.wg.Go(func() { w.copy(near, far) })
		w.wg.Go(func() { w.copy(far, near) })
	}
}

// keep records a pair of connections. It returns false when the wire is cut.
func (w *Wire) keep(pair ...net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range pair {
		if w.cut {
			c.Close()
		} else {
			w.conns[c] = true
		}
	}
	return !w.cut
}

func (w *Wire) copy(to, from net.Conn) {
	_, _ = io.Copy(to, from) // only its end matters
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range []net.Conn{to, from} {
		c.Close()
		delete(w.conns, c)
	}
}
