package proxy

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/quiclane"
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
	conn      *quiclane.Conn
	transport *quic.Transport
	listener  *quic.EarlyListener
	young     atomic.Int64 // connections that the server has not taken yet
	running   atomic.Int64 // requests
	draining  atomic.Bool
	inlet     sync.WaitGroup
	taken     chan struct{} // closed when the server takes no more connections
}

// openLane opens addr next to the other lanes of dir. From then on it forwards
// their packets, until close; only serve makes it answer new clients.
func openLane(dir *privatedir.Dir, addr string, server *http3.Server) (*quicLane, error) {
	l := &quicLane{taken: make(chan struct{})}
	var err error
	if l.conn, err = quiclane.Listen(dir, addr); err != nil {
		return nil, err
	}
	if l.transport, err = l.conn.Transport(); err != nil {
		l.conn.Close()
		return nil, err
	}
	l.inlet.Go(l.conn.Run)
	l.transport.ConnContext = l.begin
	withConn := server.ConnContext
	server.ConnContext = func(ctx context.Context, c *quic.Conn) context.Context {
		if grown, ok := ctx.Value(grownKey{}).(func()); ok {
			grown()
		}
		return withConn(ctx, c)
	}
	server.Handler = l.count(server.Handler)
	if l.listener, err = l.transport.ListenEarly(server.TLSConfig, server.QUICConfig); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// grownKey finds, in the context of a connection, the function that counts it as
// taken.
type grownKey struct{}

// begin counts a connection as young until the server has taken it or it ends.
func (l *quicLane) begin(ctx context.Context, _ *quic.ClientInfo) (context.Context, error) {
	l.young.Add(1)
	grown := sync.OnceFunc(func() { l.young.Add(-1) })
	context.AfterFunc(ctx, grown)
	return context.WithValue(ctx, grownKey{}, grown), nil
}

// count counts the requests that run.
func (l *quicLane) count(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.running.Add(1)
		defer l.running.Add(-1)
		h.ServeHTTP(w, r)
	})
}

func (l *quicLane) serve(server *http3.Server) error {
	defer close(l.taken)
	if err := l.conn.Serve(); err != nil {
		return err
	}
	return server.ServeListener(l.listener)
}

// shutdown drains, until ctx ends. Call it after serve. A second call only ends the
// first when its own ctx ends.
func (l *quicLane) shutdown(ctx context.Context, server *http3.Server) error {
	if l.draining.Swap(true) {
		return server.Shutdown(ctx)
	}
	err := l.conn.Drain() // an error: others do not know, and clients still come
	l.waitYoung(ctx)
	_ = l.listener.Close() // never fails
	<-l.taken
	lingering, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		l.waitQuiet(lingering)
	})
	serr := server.Shutdown(lingering)
	if ctx.Err() == nil {
		serr = nil // at most idle connections were closed
	}
	cancel()
	wg.Wait()
	return errors.Join(err, serr)
}

// waitYoung waits until no handshake runs whose connection would be lost.
func (l *quicLane) waitYoung(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, youngMost)
	defer cancel()
	tick := time.NewTicker(youngLeast)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if l.young.Load() == 0 {
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

// close gives the port and the lane back. The server has closed its connections.
func (l *quicLane) close() {
	_ = l.transport.Close() // the socket stays open
	l.conn.Close()
	l.inlet.Wait()
}

var forwardedDesc = prometheus.NewDesc("pdproxy_http3_forwarded_packets_total",
	"QUIC packets that the kernel gave to another process than that of their connection, or of new clients that a process does not take any more: way out, in, or dropped.", []string{"way"}, nil)

// Describe implements prometheus.Collector: what a front counts of its sockets.
func (f *Front) Describe(ch chan<- *prometheus.Desc) { ch <- forwardedDesc }

// Collect implements prometheus.Collector.
func (f *Front) Collect(ch chan<- prometheus.Metric) {
	if f.quic == nil || f.quic.lane == nil {
		return
	}
	out, in, dropped := f.quic.lane.conn.Counts()
	for way, n := range map[string]uint64{"out": out, "in": in, "dropped": dropped} {
		ch <- prometheus.MustNewConstMetric(forwardedDesc, prometheus.CounterValue, float64(n), way)
	}
}
