package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/inflight"
	"github.com/pdproxy/pdproxy/proxy/socket"
)

// Sockets are listeners that are already open: a process that has been started
// by another is given them.
type Sockets struct {
	Public net.Listener // nil: opened at server.listen
	Admin  net.Listener // nil: opened at admin.listen
	// Only leaves unserved what is nil: a worker has no admin address, a
	// coordinator no public one.
	Only bool
}

// Front is the open sockets of a server: public TCP, public QUIC, admin.
type Front struct {
	s       *Server
	log     *slog.Logger
	public  net.Listener // nil: no clients are served
	admin   net.Listener // nil: no operators are served
	certs   *Certs
	quic    *quicFront // nil without HTTP/3
	servers []*http.Server
	tcp     net.Listener // public, and counted; nil with TLS
	demux   *demux       // nil without TLS

	base     context.Context // parent of every public request
	cancel   context.CancelCauseFunc
	retiring atomic.Bool
	retired  chan struct{}  // closed by Retire
	conns    inflight.Group // of clients, over TCP
	clients  clientConns
	telling  sync.WaitGroup // clients that it retires

	places    *connections // of clients, over TCP and QUIC
	operators *connections // of the admin address
	stall     stallLimits
	watchers  sync.WaitGroup
}

// Listen opens the sockets that the configuration names and given has not. certs
// is nil without TLS; token is what the admin endpoints ask for.
func (s *Server) Listen(cfg *config.Config, certs *Certs, token AdminToken, given Sockets) (*Front, error) {
	f := newFront(s, given.Public, given.Admin, certs)
	var err error
	if f.public == nil && !given.Only {
		if f.public, err = net.Listen("tcp", cfg.Server.Listen); err != nil {
			return nil, fmt.Errorf("server.listen: %w", err)
		}
	}
	if f.admin == nil && !given.Only {
		if f.admin, err = net.Listen("tcp", cfg.Admin.Listen); err != nil {
			f.closeListeners()
			return nil, fmt.Errorf("admin.listen: %w", err)
		}
	}
	if f.admin != nil && token.Token == "" {
		f.closeListeners()
		return nil, errors.New("admin.listen: there is no token")
	}
	handler := s.handler()
	if cfg.Server.HTTP3 != "" && f.public != nil {
		if f.quic, err = listenQUIC(cfg, certs, handler, f.base, s.deps.Lanes, f.places, s.log); err != nil {
			f.closeListeners()
			return nil, fmt.Errorf("server.http3: %w", err)
		}
		handler = f.quic.advertise(handler)
	}
	f.prepare(cfg, handler, token)
	return f, nil
}

func newFront(s *Server, public, admin net.Listener, certs *Certs) *Front {
	f := &Front{s: s, log: s.log, public: public, admin: admin, certs: certs, retired: make(chan struct{})}
	f.base, f.cancel = context.WithCancelCause(context.Background())
	d := descriptorShares()
	d.sayTooMany(&s.cfg.Load().Limits, s.log)
	f.places = newConnections(func() (all, perAddress int) { return connectionLimits(&s.cfg.Load().Limits, d) })
	f.places.shown = s.deps.Balance
	f.operators = newConnections(func() (all, perAddress int) { return d.operators, 0 })
	return f
}

func (f *Front) closeListeners() {
	for _, l := range []net.Listener{f.public, f.admin} {
		if l != nil {
			l.Close()
		}
	}
}

// handler is the public surface as every protocol serves it.
func (s *Server) handler() http.Handler {
	var h http.Handler = s
	if s.deps.Wrap != nil {
		h = s.healthFirst(s.deps.Wrap(h))
	}
	return s.guard(s.bodies.Limit(h))
}

// healthFirst answers health checks before filters see them. A filter that asks for
// a key, is parked or pauses would make an orchestrator stop a healthy proxy.
func (s *Server) healthFirst(filtered http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == healthPath {
			s.ServeHTTP(w, r)
			return
		}
		filtered.ServeHTTP(w, r)
	})
}

// guard makes a handler's fault visible, which the servers of the protocols tell
// each in its own way or not at all; it still ends the client's connection or
// stream.
func (s *Server) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if v != http.ErrAbortHandler {
				s.log.Error("panic in a handler", "method", r.Method, "panic", v, "stack", string(debug.Stack()))
			}
			panic(http.ErrAbortHandler)
		}()
		h.ServeHTTP(w, r)
	})
}

// prepare makes the HTTP servers of the TCP listeners: those of clients, then
// that of operators.
func (f *Front) prepare(cfg *config.Config, handler http.Handler, token AdminToken) {
	handler = f.lastAnswers(handler)
	switch {
	case f.public == nil:
	case f.certs == nil:
		f.tcp = tcpListener{socket.Listener(f.public), f.places, true}
		var protocols http.Protocols
		protocols.SetHTTP1(true)
		protocols.SetUnencryptedHTTP2(true)
		f.serve(f.httpServer(cfg, handler, &protocols))
	default:
		f.demux = newDemux(tcpListener{socket.Listener(f.public), f.places, false}, f.certs.config("h2", "http/1.1"), time.Duration(cfg.Server.ReadHeaderTimeout))
		var h1, h2 http.Protocols
		h1.SetHTTP1(true)
		h2.SetUnencryptedHTTP2(true) // demux has taken TLS off
		handler = withTLS(handler)
		f.serve(f.httpServer(cfg, handler, &h1))
		f.serve(f.httpServer(cfg, handler, &h2))
	}
	for _, srv := range f.servers {
		srv.ConnState = f.connState
	}
	f.stall = stallLimits{head: time.Duration(cfg.Server.ReadHeaderTimeout), write: time.Duration(cfg.Server.WriteTimeout)}
	admin := f.httpServer(cfg, f.lastAnswers(f.s.guard(f.s.bodies.LimitForOperators(f.s.adminHandler(cfg, addrOf(f.admin), token)))), nil)
	admin.BaseContext, admin.ConnState = nil, placeState
	f.serve(admin)
}

// connState follows the connections of clients over TCP.
func (f *Front) connState(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		f.conns.Add()
	case http.StateClosed, http.StateHijacked:
		f.conns.Done()
	}
	if fc, ok := c.(*framingConn); ok && fc.tcp != nil {
		placeState(fc.tcp, state)
	}
}

// placeState is the http.Server.ConnState of connections that are counted.
func placeState(c net.Conn, state http.ConnState) {
	t, ok := c.(*tcpConn)
	switch {
	case !ok:
	case state == http.StateActive:
		t.busy()
	case state == http.StateIdle:
		t.rest()
	}
}

func (f *Front) serve(srv *http.Server) { f.servers = append(f.servers, srv) }

func (f *Front) httpServer(cfg *config.Config, h http.Handler, p *http.Protocols) *http.Server {
	return &http.Server{
		Handler:           h,
		Protocols:         p,
		ReadHeaderTimeout: time.Duration(cfg.Server.ReadHeaderTimeout),
		IdleTimeout:       time.Duration(cfg.Server.IdleTimeout),
		MaxHeaderBytes:    int(cfg.Server.MaxHeader),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          streamsPerConn,
			MaxReceiveBufferPerConnection: receiveWindow,
			MaxReceiveBufferPerStream:     receiveWindow,
			MaxReadFrameSize:              16 << 10, // net/http takes the memory of a frame when its head is there
		},
		BaseContext: func(net.Listener) context.Context { return f.base },
		ConnContext: withConn,
		ErrorLog:    slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
	}
}

// Addr is the public TCP address, nil without one.
func (f *Front) Addr() net.Addr { return addrOf(f.public) }

// AdminAddr is the admin address, nil without one.
func (f *Front) AdminAddr() net.Addr { return addrOf(f.admin) }

func addrOf(l net.Listener) net.Addr {
	if l == nil {
		return nil
	}
	return l.Addr()
}

// HTTP3Addr is the public UDP address, nil without HTTP/3.
func (f *Front) HTTP3Addr() net.Addr {
	if f.quic == nil {
		return nil
	}
	return f.quic.conn.LocalAddr()
}

// Opened are the sockets that the front serves, for a successor.
func (f *Front) Opened() Sockets { return Sockets{Public: f.public, Admin: f.admin} }

// Close closes the sockets of a front that does not serve.
func (f *Front) Close() {
	f.closeListeners()
	f.quic.close()
}

// Limits are how long Serve may take to end. They are asked when they are needed.
type Limits struct {
	Drain  func() time.Duration // after its context has ended
	Retire func() time.Duration // after Retire
}

// Serve answers on all sockets until ctx ends; then it drains: no new
// connection, running exchanges may end within the limit, those that do not are
// told and cut. After Retire it goes on with the connections that it has. It
// returns when it serves no connection any more, and Server.Wait is due; the error is
// nil after a clean drain.
func (f *Front) Serve(ctx context.Context, limits Limits) error {
	var wg, accepting sync.WaitGroup
	watching, unwatch := context.WithCancel(context.Background())
	defer unwatch()
	for _, c := range []*connections{f.places, f.operators} {
		f.watchers.Go(func() { c.cutStalled(watching, f.stall) })
	}
	failed := make(chan error, len(f.servers)+1)
	for i, l := range f.listeners() {
		serve := func() {
			err := f.servers[i].Serve(l)
			if !errors.Is(err, http.ErrServerClosed) && !(f.retiring.Load() && errors.Is(err, net.ErrClosed)) {
				failed <- err
			}
		}
		switch {
		case l == nil:
		case i < len(f.servers)-1:
			accepting.Go(serve)
		default:
			wg.Go(serve)
		}
	}
	if f.demux != nil {
		wg.Go(f.demux.run)
	}
	if f.quic != nil {
		wg.Go(func() {
			if err := f.quic.serve(); err != nil {
				failed <- err
			}
		})
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	case <-f.retired:
		err = f.goOn(ctx, &wg, &accepting, failed, limits.Retire())
	}
	if errors.Is(err, errRetired) {
		err = f.shutdown(0, limits.Retire())
	} else {
		limit := limits.Drain()
		err = errors.Join(err, f.shutdown(limit, limit))
	}
	accepting.Wait()
	wg.Wait()
	f.telling.Wait()
	unwatch()
	f.watchers.Wait()
	return err
}

// listeners are those of the servers, in their order.
func (f *Front) listeners() []net.Listener {
	switch {
	case f.public == nil:
		return []net.Listener{f.adminListener()}
	case f.demux != nil:
		return []net.Listener{framingListener{f.demux.h1, &f.clients}, framingListener{f.demux.h2, &f.clients}, f.adminListener()}
	}
	return []net.Listener{framingListener{f.tcp, &f.clients}, f.adminListener()}
}

// adminListener is the listener of the operators' server, nil without one.
func (f *Front) adminListener() net.Listener {
	if f.admin == nil {
		return nil
	}
	return tcpListener{f.admin, f.operators, true}
}

// cutGrace is how long exchanges have to tell their clients that they are cut: a
// prefill leg may listen for its answer first.
const cutGrace = cleanup.PrefillLinger + time.Second

// shutdown drains within limit; they had waited so long in all when they are cut.
func (f *Front) shutdown(limit, waited time.Duration) error {
	f.s.Drain()
	ctx, cancel := context.WithTimeout(context.Background(), limit+cutGrace)
	defer cancel()
	var cut atomic.Int64
	timer := time.AfterFunc(limit, func() {
		cut.Store(int64(f.s.books.Running.Len()))
		f.cancel(downstream.ErrDraining)
	})
	err := f.shutdownAll(ctx)
	if err != nil {
		for _, srv := range f.servers {
			srv.Close()
		}
	}
	f.quic.close()
	if timer.Stop() || cut.Load() == 0 { // a connection without a request may have held it up
		return nil
	}
	return fmt.Errorf("drain: %d exchanges were cut after %s", cut.Load(), waited)
}

// shutdownAll waits until every server has gone quiet. The admin server, last
// in the list, stays up while the others drain.
func (f *Front) shutdownAll(ctx context.Context) error {
	var wg sync.WaitGroup
	last := len(f.servers) - 1
	errs := make([]error, last+2)
	for i, srv := range f.servers[:last] {
		wg.Go(func() { errs[i] = srv.Shutdown(ctx) })
	}
	wg.Go(func() { errs[last] = f.quic.shutdown(ctx) })
	if f.demux != nil {
		f.demux.close()
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return f.servers[last].Shutdown(ctx)
}
