// Package http1 is a server of HTTP/1.0 and HTTP/1.1 behind net/http's Handler.
//
// It accepts only requests that net/http and llhttp accept too, in one pass over the bytes. A
// connection has one goroutine. A request starts no timer and no goroutine, and the server notices
// from the socket when a client leaves. It leaves to its user what connections are counted, what a
// refusal looks like, and HTTP/2.
//
// The decisions behind this package are in docs/design/edge.md.
package http1

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Server serves the connections of listeners. Its fields are set before the first call. It must
// not be copied.
type Server struct {
	// Handler serves the requests. It may keep a request, its header and its context, but must not
	// use the http.ResponseWriter or the body after it has returned. All of net/http's
	// ResponseController works, and Hijack.
	Handler http.Handler
	// Base is the parent of the contexts of all requests; its end ends them.
	Base context.Context
	// ConnContext adds values to the context of the requests of a connection. nil: none. The
	// result must end with the parent.
	ConnContext func(parent context.Context, c net.Conn) context.Context
	// State is called with http.StateActive before a handler, and with http.StateIdle after it,
	// if another request may follow. nil: not called.
	State func(net.Conn, http.ConnState)
	// Refuse returns the whole answer to a request with a refused head. The server closes the
	// connection behind it.
	Refuse func(Refusal) []byte
	// HTTP2 takes over a connection that begins with the preface of HTTP/2 (RFC 9113 3.4). nil:
	// the preface is refused.
	HTTP2     func(net.Conn)
	HeadLimit int           // of the head of a request, in bytes; a line counts 32 bytes more
	HeadTime  time.Duration // for the head of a request; after a new connection, from its begin on
	IdleTime  time.Duration // between two requests
	Log       *slog.Logger

	mu        sync.Mutex
	listeners map[net.Listener]struct{} // guarded by mu
	conns     map[*conn]struct{}        // guarded by mu
	empty     chan struct{}             // closed when no connection is left; nil: nobody waits; guarded by mu
	started   bool                      // run runs; guarded by mu
	done      chan struct{}             // ends run and the watcher
	stopping  atomic.Bool
	retired   atomic.Bool
	tick      atomic.Int64
	date      atomic.Pointer[string] // the line
	watcher   watcher
	unbase    func() bool // ends the watching of Base
}

// acceptPause is the longest wait after an error of Accept that may pass.
const acceptPause = time.Second

// Serve accepts connections until Shutdown or Close, and returns http.ErrServerClosed then. Another
// error is one of the listener. Serve closes the listener.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	if !s.start(l) {
		return http.ErrServerClosed
	}
	pause := 5 * time.Millisecond
	for {
		nc, err := l.Accept()
		if err == nil {
			pause = 5 * time.Millisecond
			s.add(nc)
			continue
		}
		if s.stopping.Load() {
			return http.ErrServerClosed
		}
		//lint:ignore SA1019 the errors of accept that pass have no other mark; net/http uses it too
		if passing, ok := errors.AsType[net.Error](err); !ok || !passing.Temporary() { //nolint:staticcheck // as above
			return err
		}
		s.Log.Debug("accept failed", "error", err)
		time.Sleep(pause)
		pause = min(2*pause, acceptPause)
	}
}

// start adds a listener. It returns false after Shutdown or Close.
func (s *Server) start(l net.Listener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping.Load() {
		return false
	}
	if !s.started {
		s.started = true
		s.listeners, s.conns, s.done = make(map[net.Listener]struct{}), make(map[*conn]struct{}), make(chan struct{})
		s.tick.Store(1)
		s.setDate(time.Now())
		s.unbase = context.AfterFunc(s.Base, s.cancelAll)
		go s.run()
	}
	s.listeners[l] = struct{}{}
	return true
}

// newConn returns a connection that waits for a head.
func (s *Server) newConn(nc net.Conn) *conn {
	c := &conn{server: s, nc: nc, values: s.Base}
	if s.ConnContext != nil {
		c.values = s.ConnContext(s.Base, nc)
	}
	if tc, ok := nc.(*tls.Conn); ok {
		state := tc.ConnectionState()
		c.state = &state
	}
	if a := nc.RemoteAddr(); a != nil {
		c.remote = a.String()
	}
	c.waits.Store(waitMark(s.tick.Load(), waitHead))
	return c
}

// add serves a connection.
func (s *Server) add(nc net.Conn) {
	c := s.newConn(nc)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping.Load() {
		nc.Close()
		return
	}
	s.conns[c] = struct{}{}
	c.register()
	go c.serve()
}

// forget removes a connection that has ended or was given away.
func (s *Server) forget(c *conn) {
	c.unregister()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if len(s.conns) == 0 && s.empty != nil {
		close(s.empty)
		s.empty = nil
	}
}

// cancelAll ends the contexts of the running requests when Base has ended.
func (s *Server) cancelAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		if x := c.current.Load(); x != nil {
			x.cancel(context.Cause(s.Base))
		}
	}
}

// Retire makes each connection close behind its next answer, which says so.
func (s *Server) Retire() { s.retired.Store(true) }

// Shutdown closes the listeners and the connections without a request, and waits until the others
// have served theirs, or ctx ends. The answers say that their connection closes. It does not wait for
// connections that HTTP2 has taken over, nor for those of a handler that has taken one over and returned.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stop()
	s.mu.Lock()
	for c := range s.conns { // a connection that begins to rest now sees stopping
		if v := c.waits.Load(); v > 0 {
			c.cutWait(v)
		}
	}
	var empty chan struct{}
	if len(s.conns) > 0 {
		if s.empty == nil {
			s.empty = make(chan struct{})
		}
		empty = s.empty
	}
	s.mu.Unlock()
	if empty != nil {
		select {
		case <-empty:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.end()
	return nil
}

// Close closes the listeners and all connections for which Shutdown would wait.
func (s *Server) Close() error {
	s.stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.nc.Close()
	}
	if s.started {
		s.started = false
		s.finish()
	}
	return nil
}

// stop ends the accepting.
func (s *Server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping.Store(true)
	s.retired.Store(true)
	for l := range s.listeners {
		l.Close()
	}
	s.listeners = nil
}

// end ends the goroutines of the server.
func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started {
		s.started = false
		s.finish()
	}
}

// finish is end with mu held.
func (s *Server) finish() {
	close(s.done)
	s.unbase()
	s.watcher.close()
}
