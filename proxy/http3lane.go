package proxy

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/pdproxy/pdproxy/proxy/edge/quicshare"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	// youngLeast is how long a draining lane waits at least for handshakes that
	// have begun: a first packet may lie in a queue of quic-go.
	youngLeast = 100 * time.Millisecond
	// youngMost is how long it waits at most: the second packet of a first flight
	// has been sent three times by then.
	youngMost = 3 * time.Second
	// lingerTime is how long connections without a request may stay after GOAWAY.
	// Clients close them by themselves when they have read what was sent.
	lingerTime = 5 * time.Second
)

// quicLane is this process's lane of a UDP port that processes share. Its order of
// draining lets no request fail:
//
//  1. New clients are handed to lanes that serve.
//  2. Handshakes that had begun go through, and their connections are taken.
//  3. All connections get GOAWAY. Requests below its limit are served; later ones
//     are refused as never begun (H3_REQUEST_REJECTED), so that clients send them
//     on a new connection, which is another lane's.
//  4. A connection ends when its client closes it, or when no request has run on
//     any for lingerTime.
type quicLane struct {
	conn      *quicshare.Conn
	transport *quic.Transport
	running   atomic.Int64 // requests
	draining  atomic.Bool
	inlet     sync.WaitGroup
	taken     chan struct{} // closed when no more connections are accepted
}

// openLane opens addr next to the other lanes of dir. From then on it forwards
// their packets, until close, once its transport listens; only conn.Serve makes it
// answer new clients.
func openLane(dir *privatedir.Dir, addr string) (*quicLane, error) {
	l := &quicLane{taken: make(chan struct{})}
	var err error
	if l.conn, err = quicshare.Listen(dir, addr); err != nil {
		return nil, err
	}
	if l.transport, err = l.conn.Transport(); err != nil {
		l.conn.Close()
		return nil, err
	}
	l.inlet.Go(l.conn.Run)
	return l, nil
}

// count counts the requests that run.
func (l *quicLane) count(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.running.Add(1)
		defer l.running.Add(-1)
		h.ServeHTTP(w, r)
	})
}

// shutdown drains, until ctx ends. Call it after serve. A second call only ends the
// first when its own ctx ends.
func (l *quicLane) shutdown(ctx context.Context, q *quicFront) error {
	if l.draining.Swap(true) {
		return q.conns.shutdown(ctx)
	}
	err := l.conn.Drain() // an error: others do not know, and clients still come
	waitYoung(ctx, &q.conns.young)
	_ = q.listener.Close() // never fails
	<-l.taken
	lingering, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		l.waitQuiet(lingering)
	})
	serr := q.conns.shutdown(lingering)
	if ctx.Err() == nil {
		serr = nil // at most idle connections were closed
	}
	cancel()
	wg.Wait()
	return errors.Join(err, serr)
}

// waitYoung waits until no handshake runs whose connection would be lost.
func waitYoung(ctx context.Context, young *atomic.Int64) {
	ctx, cancel := context.WithTimeout(ctx, youngMost)
	defer cancel()
	tick := time.NewTicker(youngLeast)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if young.Load() == 0 {
				return
			}
		}
	}
}

// waitQuiet waits until no request has run for lingerTime.
func (l *quicLane) waitQuiet(ctx context.Context) {
	const ticks = 10
	tick := time.NewTicker(lingerTime / ticks)
	defer tick.Stop()
	for quiet := 0; quiet < ticks; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if quiet++; l.running.Load() > 0 {
				quiet = 0
			}
		}
	}
}

// close gives the port and the lane back. The transport is closed.
func (l *quicLane) close() {
	l.conn.Close()
	l.inlet.Wait()
}
