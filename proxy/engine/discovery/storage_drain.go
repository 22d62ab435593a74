package discovery

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// drainer ends a server without leaving a received request unanswered. Shutdown of
// net/http is not sufficient: it drops requests that are being read when it runs.
type drainer struct {
	closing atomic.Bool

	mu   sync.Mutex
	busy map[net.Conn]bool // connections that have a request, or are about to; guarded by mu
}

// follow is the server's ConnState hook.
func (d *drainer) follow(c net.Conn, state http.ConnState) {
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

// closeAfterReply closes each connection after its current answer once draining has
// begun.
func (d *drainer) closeAfterReply(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if d.closing.Load() {
			w.Header().Set("Connection", "close")
		}
		h.ServeHTTP(w, r)
	})
}

// drain waits until the received requests are answered, or until the limit. The server
// accepts no more connections. The remaining connections are idle, and clients expect
// that an idle connection may close at any time.
func (d *drainer) drain(limit time.Duration) {
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
