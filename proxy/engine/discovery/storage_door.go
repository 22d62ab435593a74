package discovery

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// door is how a server is left without a request that nobody answers. Shutdown of
// net/http will not do: it drops those that are read while it runs.
type door struct {
	closing atomic.Bool

	mu   sync.Mutex
	busy map[net.Conn]bool // connections that have, or will at once have, a request; guarded by mu
}

// follow is the server's ConnState.
func (d *door) follow(c net.Conn, state http.ConnState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch state {
	case http.StateNew, http.StateActive:
		if d.busy == nil {
			d.busy = map[net.Conn]bool{}
		}
		d.busy[c] = true
	default:
		delete(d.busy, c)
	}
}

// lastAnswers makes answers the last ones of their connections when the door is
// closed.
func (d *door) lastAnswers(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if d.closing.Load() {
			w.Header().Set("Connection", "close")
		}
		h.ServeHTTP(w, r)
	})
}

// close waits until what has come is answered, or the limit is over. Nothing is
// accepted any more. What is left then is idle, and its clients know that such a
// connection may end at any time.
func (d *door) close(limit time.Duration) {
	d.closing.Store(true)
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		d.mu.Lock()
		n := len(d.busy)
		d.mu.Unlock()
		if n == 0 {
			return
		}
	}
}
