// Package grpcserver serves gRPC over HTTP/2. It knows connections, streams and messages as bytes. The
// frames and the compression of header lines are those of golang.org/x/net/http2.
//
// One goroutine reads each connection. A stream has a goroutine from its first whole message to its
// end, and no other. No goroutine writes: the goroutine that has something to write while no other
// one writes also writes what is added meanwhile.
//
// Sources: RFC 9113, RFC 7541, and doc/PROTOCOL-HTTP2.md of github.com/grpc/grpc.
//
// The decisions behind this package are in docs/design/gateway.md.
package grpcserver

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
)

// Method serves the streams of one path.
type Method struct {
	// Serve serves a stream whose first message has arrived, or that has no memory for it. The error
	// is the status of the stream.
	Serve func(*Stream) error
	// Request: the first message begins a request, which has limits of its own, and which ends when
	// the client ends its side of the stream. A stream of another method counts as one without a
	// message until its end.
	Request bool
}

// Options are the parts and the limits of a Server.
type Options struct {
	Methods    map[string]Method // by path
	MaxMessage int               // bytes
	MaxStreams int               // open streams of one connection
	// FirstMessage bounds the time from the begin of a stream to its first message. A stream ends up
	// to one second later.
	FirstMessage time.Duration
	Memory       *buffer.Budget // counts the messages
	TLS          *tls.Config    // nil: no TLS
	Log          *slog.Logger
}

// Server is a gRPC server. Safe for concurrent use.
type Server struct {
	options Options
	memory  memory
	unused  unused
	workers workers
	running context.Context // ends when the streams must end
	cut     context.CancelCauseFunc
	open    sync.WaitGroup // connections and handlers

	draining atomic.Bool
	drained  chan struct{} // closed when the drain begins
	mu       sync.Mutex
	listener net.Listener       // nil before Serve; guarded by mu
	conns    map[*conn]struct{} // open connections; guarded by mu
}

// New returns a server. It starts nothing.
func New(o Options) *Server {
	s := &Server{options: o, drained: make(chan struct{}), conns: make(map[*conn]struct{})}
	s.memory = memory{budget: o.Memory, least: 2 * int64(o.MaxMessage), server: s}
	s.running, s.cut = context.WithCancelCause(context.Background())
	return s
}

// acceptPause is the longest wait after an error of Accept that may pass.
const acceptPause = time.Second

// Serve serves l until Drain, and closes l. It returns when no connection is open and no handler runs.
// Call it once. The error is one of l.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	ticked := make(chan struct{})
	over := make(chan struct{})
	go func() { // ends with Serve
		defer close(ticked)
		s.tick(over)
	}()
	err := s.accept(l)
	if err != nil {
		s.Drain()
	}
	s.open.Wait()
	s.workers.stop()
	close(over)
	<-ticked
	return err
}

// accept accepts connections until Drain.
func (s *Server) accept(l net.Listener) error {
	s.mu.Lock()
	s.listener = l
	s.mu.Unlock()
	limit := connlimit.New()
	pause := 5 * time.Millisecond
	for !s.draining.Load() {
		nc, err := l.Accept()
		if err == nil {
			pause = 5 * time.Millisecond
			s.add(nc, limit)
			continue
		}
		if s.draining.Load() {
			return nil
		}
		//lint:ignore SA1019 the errors of accept that pass have no other mark; net/http uses it too
		if passing, ok := errors.AsType[net.Error](err); !ok || !passing.Temporary() { //nolint:staticcheck // as above
			return err
		}
		s.options.Log.Debug("accept failed", "error", err)
		time.Sleep(pause)
		pause = min(2*pause, acceptPause)
	}
	return nil
}

// add serves a new connection.
func (s *Server) add(nc net.Conn, limit *connlimit.Limit) {
	place := limit.Enter(nc)
	if place == nil {
		nc.Close()
		return
	}
	c := newConn(s, nc, place)
	s.mu.Lock()
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	s.open.Go(c.serve)
}

// leave ends the counting of a connection that is closed.
func (s *Server) leave(c *conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	c.place.Leave()
}

// all returns the open connections.
func (s *Server) all() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		list = append(list, c)
	}
	return list
}

// Connected reports whether a connection is open.
func (s *Server) Connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns) > 0
}

// Drain ends the service: it closes the listener, and lets open streams go on. Serve returns when the
// streams have ended.
func (s *Server) Drain() {
	if s.draining.Swap(true) {
		return
	}
	close(s.drained)
	s.mu.Lock()
	l := s.listener
	s.mu.Unlock()
	if l != nil {
		l.Close()
	}
	for _, c := range s.all() {
		c.drain()
	}
}

// Draining is closed when the drain begins.
func (s *Server) Draining() <-chan struct{} { return s.drained }

// Cut ends all streams, the present ones and later ones. cause is the cause of the end of their contexts.
func (s *Server) Cut(cause error) {
	s.cut(cause)
	for _, c := range s.all() {
		c.cutUnused()
	}
}

// period is the time between two looks at all connections.
const period = time.Second

// tick looks at all connections from time to time, until over is closed.
func (s *Server) tick(over <-chan struct{}) {
	t := time.NewTicker(period)
	defer t.Stop()
	for {
		select {
		case <-over:
			return
		case now := <-t.C:
			for _, c := range s.all() {
				c.look(now)
			}
		}
	}
}

// idleWorkers is the number of goroutines that wait for the next stream, so that a short request
// needs no new stack. Further streams get goroutines of their own.
const idleWorkers = 32

// workers are the goroutines of streams. Safe for concurrent use.
type workers struct {
	mu      sync.Mutex
	idle    []chan *Stream // the last one has the warmest memory; guarded by mu
	stopped bool           // guarded by mu
}

// run serves a stream in a goroutine.
func (w *workers) run(s *Stream) {
	w.mu.Lock()
	if n := len(w.idle); n > 0 {
		next := w.idle[n-1]
		w.idle = w.idle[:n-1]
		w.mu.Unlock()
		next <- s
		return
	}
	w.mu.Unlock()
	go w.work(s) // ends with the stream, or with stop
}

// work serves s and later streams.
func (w *workers) work(s *Stream) {
	next := make(chan *Stream, 1)
	for s != nil {
		s.serve()
		w.mu.Lock()
		if w.stopped || len(w.idle) >= idleWorkers {
			w.mu.Unlock()
			return
		}
		w.idle = append(w.idle, next)
		w.mu.Unlock()
		s = <-next
	}
}

// stop ends the goroutines that wait.
func (w *workers) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	for _, next := range w.idle {
		close(next)
	}
	w.idle = nil
}
