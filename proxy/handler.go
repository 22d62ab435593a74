package proxy

import (
	"errors"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
)

// cutGrace is how long exchanges have to tell their clients that they are cut. A prefill
// leg may first wait for the answer of its engine.
const cutGrace = cleanup.PrefillLinger + time.Second

// Listen opens the sockets that cfg names and given has not. certs is nil without TLS.
// token protects the admin endpoints.
func (s *Server) Listen(cfg *config.Config, certs *edge.Certs, token admin.Token, given edge.Sockets) (*edge.Server, error) {
	e, err := edge.Listen(cfg, edge.Options{
		Sockets: given, Certs: certs,
		Limits:  func() *config.Limits { return &s.cfg.Load().Limits },
		Running: s.books.Running.Len, OnDrain: s.Drain,
		CutGrace: cutGrace,
		QUICDir:  s.deps.QUICDir, Balance: s.deps.Balance, Log: s.log,
	})
	if err != nil {
		return nil, err
	}
	if e.AdminAddr() != nil && token.Text == "" {
		e.Close()
		return nil, errors.New("admin.listen: there is no token")
	}
	e.Handle(s.handler(), s.guard(s.bodies.LimitForOperators(admin.Guard(s.adminRoutes(), cfg, e.AdminAddr(), token, s.log))))
	return e, nil
}

// AdminHandler returns the routes of operators without a check of the caller, for the
// coordinator of this worker.
func (s *Server) AdminHandler() http.Handler { return s.guard(s.adminRoutes()) }

// adminRoutes returns the routes of operators.
func (s *Server) adminRoutes() http.Handler {
	return admin.Handler(admin.Options{
		Config: s.cfg.Load, Registry: s.deps.Registry, Gatherer: s.deps.Gatherer, Policies: s.deps.Policies, Workers: s.deps.Workers,
		Ready: s.serveHealth, Drain: s.Drain, Running: s.runningRows, Explain: s.explanation, Perf: s.perfRows, Sidecar: s.sidecar.Load,
		Log: s.log,
	})
}

// handler returns the public endpoints as every protocol serves them.
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

// guard logs panics of a handler, which the servers of the protocols log in different ways
// or not at all. The panic still ends the client's connection or stream.
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
