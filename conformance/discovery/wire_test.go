package discovery

import (
	"io"
	"net"
	"sync"
	"testing"
)

// wire is what stands between the proxy and etcd: it can be cut, so that both
// live and one cannot reach the other.
type wire struct {
	listener net.Listener
	to       string
	wg       sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool // open ones, of both sides
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{listener: l, to: to, conns: map[net.Conn]bool{}}
	w.wg.Go(w.accept)
	t.Cleanup(func() {
		l.Close()
		w.set(true)
		w.wg.Wait()
	})
	return w
}

func (w *wire) addr() string { return w.listener.Addr().String() }

// set cuts the wire, or joins it.
func (w *wire) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	for c := range w.conns {
		if cut {
			c.Close()
		}
	}
}

func (w *wire) accept() {
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

// keep notes a pair of connections; a cut wire has none.
func (w *wire) keep(pair ...net.Conn) bool {
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

func (w *wire) copy(to, from net.Conn) {
	_, _ = io.Copy(to, from) // its end is all that counts
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range []net.Conn{to, from} {
		c.Close()
		delete(w.conns, c)
	}
}
