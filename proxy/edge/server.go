// Package edge owns the sockets of clients and of operators. It accepts connections over
// TCP, TLS and QUIC, limits them, and serves HTTP/1.1 (package http1), HTTP/2 (net/http) and
// HTTP/3 (quic-go). It drains its connections or leaves its sockets to a successor. What
// the requests mean is the business of two http.Handlers.
//
// The decisions behind this package are in docs/design/edge.md.
package edge

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// Server is the open sockets of a process: public TCP, public QUIC, admin. It is a
// prometheus.Collector.
type Server struct {
	options Options
	log     *slog.Logger
	cfg     *config.Config
	public  net.Listener // nil: no clients are served
	admin   net.Listener // nil: no operators are served
	certs   *Certs
	quic    *quicListener // nil without HTTP/3
	servers []endpoint    // those of clients, then that of operators
	tls     *tlsListener  // nil without TLS

	base      context.Context // parent of every public request
	cancel    context.CancelCauseFunc
	stopping  atomic.Bool
	stopped   chan struct{} // closed by StopAccepting
	leaving   chan struct{} // closed when clients must open new connections
	left      sync.Once     // closes leaving
	unwatch   chan struct{} // see Unwatch
	unwatched sync.Once     // closes unwatch
	clients   clientConns
	notifying sync.WaitGroup // clients that get GOAWAY for a successor

	places    *connections // of clients, over TCP and QUIC
	operators *connections // of the admin address
	stall     stallLimits
	watchers  sync.WaitGroup
}

// Listen opens the sockets that cfg names and o.Sockets has not. It serves nothing yet.
// Errors name the configuration key.
func Listen(cfg *config.Config, o Options) (*Server, error) {
	s := newServer(cfg, o)
	var err error
	if s.public == nil && !o.Sockets.Only {
		if s.public, err = net.Listen("tcp", cfg.Server.Listen); err != nil {
			return nil, fmt.Errorf("server.listen: %w", err)
		}
	}
	if s.admin == nil && !o.Sockets.Only {
		if s.admin, err = net.Listen("tcp", cfg.Admin.Listen); err != nil {
			s.closeListeners()
			return nil, fmt.Errorf("admin.listen: %w", err)
		}
	}
	if s.public != nil && s.certs != nil && s.certs.acme != nil {
		if err = s.certs.acme.Listen(s.public.Addr()); err != nil {
			s.closeListeners()
			return nil, err
		}
	}
	if cfg.Server.HTTP3 != "" && s.public != nil {
		if s.quic, err = listenQUIC(cfg, o, s.base, s.places); err != nil {
			s.closeListeners()
			return nil, fmt.Errorf("server.http3: %w", err)
		}
	}
	return s, nil
}

func newServer(cfg *config.Config, o Options) *Server {
	s := &Server{
		options: o, log: o.Log, cfg: cfg, public: o.Sockets.Public, admin: o.Sockets.Admin, certs: o.Certs,
		stopped: make(chan struct{}), leaving: make(chan struct{}), unwatch: make(chan struct{}),
		stall: stallLimits{head: time.Duration(cfg.Server.ReadHeaderTimeout), write: time.Duration(cfg.Server.WriteTimeout)},
	}
	s.base, s.cancel = context.WithCancelCause(downstream.WithLeaving(context.Background(), s.leaving))
	d := descriptorShares()
	d.warnTooMany(o.Limits(), s.log)
	s.places = newConnections(func() (all, perAddress int) { return connectionLimits(o.Limits(), d) })
	s.places.balance = o.Balance
	s.operators = newConnections(func() (all, perAddress int) { return d.operators, 0 })
	return s
}

func (s *Server) closeListeners() {
	for _, l := range []net.Listener{s.public, s.admin} {
		if l != nil {
			l.Close()
		}
	}
}

// Handle sets the handlers of clients' and of operators' requests. Call it once, before
// Serve.
func (s *Server) Handle(public, admin http.Handler) {
	if s.quic != nil {
		s.quic.handle(public)
		public = s.quic.advertise(public)
	}
	s.prepare(public, admin)
}

// endpoint is a server of the connections of one listener.
type endpoint struct {
	server
	listener net.Listener
	// later: the listener also gets connections after StopAccepting.
	later bool
}

// server is what http.Server and http1.Server have.
type server interface {
	Serve(net.Listener) error
	Shutdown(context.Context) error
	Close() error
}

// prepare makes the HTTP servers of the TCP listeners.
func (s *Server) prepare(public, admin http.Handler) {
	netHTTP := s.cfg.Server.HTTP1 == config.HTTP1NetHTTP
	switch {
	case s.public == nil:
	case s.certs != nil:
		s.tls = newTLSListener(tcpListener{s.public, s.places, false}, s.certs.Config("h2", "http/1.1"), s.stall.head)
		if netHTTP {
			s.addNetHTTP(public, s.tls.h1, &s.clients, true, false)
		} else {
			s.addHTTP1(public, s.tls.h1, s.base, nil)
		}
		s.addNetHTTP(public, s.tls.h2, &s.clients, false, true) // the TLS listener has removed TLS
	case netHTTP:
		s.addNetHTTP(public, tcpListener{s.public, s.places, true}, &s.clients, true, true)
	default:
		h2 := newHandoffListener(s.public.Addr())
		s.addHTTP1(public, tcpListener{s.public, s.places, true}, s.base, func(c net.Conn) {
			if !h2.put(c) {
				c.Close()
			}
		})
		s.addNetHTTP(public, h2, &s.clients, false, true)
		s.servers[1].later = true
	}
	switch l := (tcpListener{s.admin, s.operators, true}); {
	case s.admin == nil:
	case netHTTP:
		s.addNetHTTP(admin, l, new(clientConns), true, false)
	default:
		s.addHTTP1(admin, l, context.Background(), nil)
	}
}

// Unwatch returns a channel that is closed when answers without an end at the admin address
// must end: a successor has the address, or the server shuts down.
func (s *Server) Unwatch() <-chan struct{} { return s.unwatch }

// leave tells the handlers of connections that they have taken over to end them.
func (s *Server) leave() { s.left.Do(func() { close(s.leaving) }) }

func (s *Server) endWatches() { s.unwatched.Do(func() { close(s.unwatch) }) }

// addNetHTTP adds a server of net/http.
func (s *Server) addNetHTTP(h http.Handler, l net.Listener, conns *clientConns, http1, http2 bool) {
	var p http.Protocols
	p.SetHTTP1(http1)
	p.SetUnencryptedHTTP2(http2)
	s.servers = append(s.servers, endpoint{listener: framingListener{l, conns, int(s.cfg.Server.MaxHeader)}, server: &http.Server{
		Handler:           tcpHandler{s, h},
		Protocols:         &p,
		ReadHeaderTimeout: s.stall.head,
		IdleTimeout:       time.Duration(s.cfg.Server.IdleTimeout),
		MaxHeaderBytes:    libraryHeads * int(s.cfg.Server.MaxHeader),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          streamsPerConn,
			MaxReceiveBufferPerConnection: receiveWindow,
			MaxReceiveBufferPerStream:     receiveWindow,
			MaxReadFrameSize:              16 << 10, // net/http allocates a whole frame when its head has come
		},
		BaseContext: func(net.Listener) context.Context {
			if conns == &s.clients {
				return s.base
			}
			return context.Background()
		},
		ConnContext: connContext,
		ConnState:   connState,
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}})
}

// Addr is the public TCP address, nil without one.
func (s *Server) Addr() net.Addr { return addrOf(s.public) }

// AdminAddr is the admin address, nil without one.
func (s *Server) AdminAddr() net.Addr { return addrOf(s.admin) }

func addrOf(l net.Listener) net.Addr {
	if l == nil {
		return nil
	}
	return l.Addr()
}

// HTTP3Addr is the public UDP address, nil without HTTP/3.
func (s *Server) HTTP3Addr() net.Addr {
	if s.quic == nil {
		return nil
	}
	return s.quic.conn.LocalAddr()
}

// Opened returns the TCP sockets of the server, for a successor.
func (s *Server) Opened() Sockets { return Sockets{Public: s.public, Admin: s.admin} }

// Close closes the sockets of a server that does not serve.
func (s *Server) Close() {
	s.endWatches()
	s.closeListeners()
	s.quic.close()
}
