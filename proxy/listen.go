package proxy

import (
	"errors"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/epp"
)

// cutGrace is the time in which exchanges inform their clients that the stream ends early. A
// prefill leg may first wait for the answer of its engine.
const cutGrace = cleanup.PrefillLinger + time.Second

// Listen opens the sockets that cfg names and given has not. certs is nil without TLS.
// token protects the admin endpoints.
func (s *Server) Listen(cfg *config.Config, certs *edge.Certs, token admin.Token, given edge.Sockets) (*edge.Server, error) {
	e, err := edge.Listen(cfg, edge.Options{
		Sockets: given, Certs: certs,
		Limits:  func() *config.Limits { return &s.cfg.Load().Limits },
		Running: s.books.Running.Len, OnDrain: s.Drain,
		CutGrace: cutGrace,
		QUICDir:  s.options.QUICDir, Balance: s.options.Balance, Log: s.log,
	})
	if err != nil {
		return nil, err
	}
	if e.AdminAddr() != nil && token.Text == "" {
		e.Close()
		return nil, errors.New("admin.listen: there is no token")
	}
	var unwatch <-chan struct{}
	if e.AdminAddr() != nil {
		unwatch = e.Unwatch()
	}
	e.Handle(s.handler(), s.guard(s.bodies.LimitForOperators(admin.Guard(s.adminRoutes(unwatch), cfg, e.AdminAddr(), token, s.log))))
	return e, nil
}

// EPP returns the endpoint picker for gateways. certs is nil without TLS. Requests that gateways
// send pass no filters: the gateway has its own.
func (s *Server) EPP(certs *edge.Certs) *epp.Server {
	cfg := s.cfg.Load()
	o := epp.Options{
		Registry: s.options.Registry, Log: s.log, MaxBody: int(cfg.Server.MaxBody), MaxHeader: int(cfg.Server.MaxHeader), Memory: s.memory,
		MaxExchanges: cfg.Limits.MaxExchanges + cfg.Limits.Queue, HeadTimeout: time.Duration(cfg.Server.ReadHeaderTimeout), Prefix: s.prefixOf,
		Metadata: func() string { return s.cfg.Load().EPP.Metadata }, TrustPD: func() bool { return s.cfg.Load().Server.TrustPDFields },
		Ready: func() bool { return s.Ready() && !s.draining.Load() },
		Handle: func(w http.ResponseWriter, r *http.Request, g attempt.Gateway) {
			s.bodies.Limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, g) })).ServeHTTP(w, r)
		},
	}
	if certs != nil {
		o.TLS = certs.Config("h2")
	}
	return epp.New(o)
}

// AdminHandler returns the routes of operators without a check of the caller, for the
// coordinator of this worker.
func (s *Server) AdminHandler() http.Handler { return s.guard(s.adminRoutes(nil)) }

// Gatherer returns the metrics of this process and of its workers.
func (s *Server) Gatherer() prometheus.Gatherer { return s.gatherer }

// MetricsHandler answers GET /metrics alone, without a check of the caller.
func (s *Server) MetricsHandler() http.Handler {
	return s.guard(admin.Metrics(s.gatherer, s.log))
}

// waitingRequests returns how many requests wait for a place or for an engine.
func (s *Server) waitingRequests() int { return s.queue.Waiting() + s.waiting.Len() }

// adminRoutes returns the routes of operators. unwatch is closed when viewers must leave; nil: the
// process has no admin address.
func (s *Server) adminRoutes(unwatch <-chan struct{}) http.Handler {
	return admin.Handler(admin.Options{
		Config: s.cfg.Load, Registry: s.options.Registry, Gatherer: s.gatherer, Policies: s.options.Policies, Workers: s.options.Workers,
		Ready: s.serveHealth, Drain: s.Drain, Running: &s.books.Running, Ended: &s.books.Ended, Sidecar: s.sidecar.Load,
		Metrics: s.options.Metrics, Waiting: s.waitingRequests, Knowledge: s.options.Knowledge, Version: s.options.Version, Unwatch: unwatch,
		Log: s.log,
	})
}
