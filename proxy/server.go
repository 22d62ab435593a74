// Package proxy is the data path: it takes clients' requests on its listeners,
// runs each as one exchange with its legs on engines, and shows operators what
// it does. Who decides where a leg runs is behind coordinator.Coordinator, how
// it is shaped behind connector.Connector.
package proxy

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/exchange"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// Deps is what a Server stands on. All fields but those that may be nil are
// needed.
type Deps struct {
	Registry    *engine.Registry
	Coordinator coordinator.Coordinator
	Metrics     *telemetry.Metrics
	Gatherer    prometheus.Gatherer // what GET /metrics shows
	Policies    admin.Policies
	Tracer      *telemetry.Tracer // nil: no spans
	Tokens      *tokens.Tokenizer // nil: only the client has token ids
	// Wrap puts filters around the handler of the public endpoints but /health,
	// before routing, for all protocols; it is called once. nil: none. A wrapper ends a
	// client's connection or stream by panicking with http.ErrAbortHandler.
	Wrap func(http.Handler) http.Handler
	// Turns has what decode engines keep for the next turns; nil: this process has it.
	Turns    *fleet.Client
	Workers  admin.Workers       // of a coordinator, whose answers to operators are theirs too; nil: there are none
	Hooks    attempt.Hooks       // nil: no leg or finish hook; SetHooks replaces it
	Recorder *recording.Recorder // nil: nothing is recorded
	// QUICDir is the directory of the processes that share the UDP port of HTTP/3: the
	// processes of a fleet, or a process and its successor. nil: this process has the
	// port alone.
	QUICDir *privatedir.Dir
	// Balance is the part of a worker whose public socket other workers have, too. nil: no
	// others have it.
	Balance *balance.Worker
	Memory  *buffer.Budget // counts what is held of requests and answers; nil: the server makes one
	Log     *slog.Logger
	Version string
}

// Server serves the public and the admin endpoints. Its methods are safe for
// concurrent use.
type Server struct {
	deps       Deps
	log        *slog.Logger
	cfg        atomic.Pointer[config.Config]  // replaced as a whole by Reload
	keys       atomic.Pointer[admission.Keys] // nil: everybody may call
	connectors map[string]connector.Connector
	queue      admission.Queue
	cleanups   *cleanup.Runner
	books      *journal.Books
	exchanges  *exchange.Runner
	draining   atomic.Bool
	prompts    *prompt.Matcher
	sidecar    atomic.Pointer[sidecar.Sidecar] // nil: no engine is beside the proxy
	retained   retained.Store
	memory     *buffer.Budget // of the bodies and answers that are held
	bodies     *downstream.Bodies
}

// New returns a server with that configuration; keys is nil when none are asked
// for. It starts nothing.
func New(cfg *config.Config, keys *admission.Keys, deps Deps) *Server {
	s := &Server{
		deps:       deps,
		log:        deps.Log,
		connectors: make(map[string]connector.Connector),
		books:      journal.NewBooks(deps.Metrics, deps.Tracer, deps.Log, deps.Balance),
		prompts:    prompt.New(prompt.Options{Coordinator: deps.Coordinator, Registry: deps.Registry, Metrics: deps.Metrics, Log: deps.Log, Tokens: deps.Tokens}),
		memory:     deps.Memory,
	}
	if s.memory == nil {
		s.memory = new(buffer.Budget)
	}
	s.bodies = downstream.NewBodies(s.memory, s.cfg.Load, admission.Client)
	deps.Metrics.WatchBuffers(s.memory.Used)
	s.cleanups = cleanup.New(cleanup.Options{Registry: deps.Registry, Memory: s.memory, Metrics: deps.Metrics, Log: deps.Log})
	free := retained.Freer{Registry: deps.Registry, Cleanups: s.cleanups}
	s.retained = retained.NewLocal(free)
	if deps.Turns != nil {
		s.retained = retained.NewFleet(free, deps.Turns)
	}
	for _, c := range connector.All() {
		s.connectors[c.Name()] = c
	}
	s.exchanges = exchange.New(exchange.Options{
		Config: s.cfg.Load, Keys: s.keys.Load, Sidecar: s.sidecar.Load, Queue: &s.queue, Registry: deps.Registry,
		Coordinator: deps.Coordinator, Connector: func(name string) connector.Connector { return s.connectors[name] },
		Memory: s.memory, Bodies: s.bodies, Books: s.books, Prompts: s.prompts, Cleanups: s.cleanups, Retained: s.retained,
		Recorder: deps.Recorder, Metrics: deps.Metrics, Log: deps.Log,
	})
	s.SetHooks(deps.Hooks)
	s.Reload(cfg, keys)
	return s
}

// Reload makes new exchanges use cfg and keys; those that run keep theirs. The
// listeners' addresses do not change.
func (s *Server) Reload(cfg *config.Config, keys *admission.Keys) {
	s.keys.Store(keys)
	c := &cfg.Conversation
	s.prompts.SetIDSources(openai.NewIDSources(c.Fields, c.Headers, c.LateFields))
	s.cfg.Store(cfg)
	limit := int64(cfg.Limits.BufferMemory)
	if limit == 0 {
		limit = buffer.DefaultLimit()
	}
	s.memory.SetLimit(limit)
	old := s.sidecar.Load()
	next := sidecar.New(cfg, s.deps.Registry, old)
	if s.sidecar.Store(next); next != old {
		old.Close()
	}
}

// SetHooks makes exchanges that open from now on ask h; nil: none.
func (s *Server) SetHooks(h attempt.Hooks) { s.exchanges.SetHooks(h) }

// SetTRTLLM makes attempts from now on ask o of the trtllm connector.
func (s *Server) SetTRTLLM(o connector.TRTLLM) { s.exchanges.SetTRTLLM(o) }

// Warm sends a request of one token through each new pair of engines: see
// exchange.Runner.Warm.
func (s *Server) Warm(ctx context.Context) { s.exchanges.Warm(ctx) }

// Drain makes /readyz and /health answer 503, so that balancers turn away.
func (s *Server) Drain() { s.draining.Store(true) }

// CleanUp makes the calls that another process of the same deployment gave to
// Lease.Owe before it died, in the background.
func (s *Server) CleanUp(job []byte) error { return s.cleanups.StartEncoded(job) }

// ForgetTurn makes the holder of KV that another process of the fleet knew free it, in
// the background: no request of the fleet will use it.
func (s *Server) ForgetTurn(t *fleet.KeptTurn) error {
	return retained.Freer{Registry: s.deps.Registry, Cleanups: s.cleanups}.FreeEncoded(t)
}

// Wait returns when no exchange runs any more, nor a clean-up of a dead one, each
// after timeouts.cleanup at most. Call it when nobody gives this server anything to
// do any more: after the listeners have ended, which cut what runs but do not wait for
// it, and, of a coordinator, after it has left its workers. Clean-ups that come when
// it has returned may be cut at once.
func (s *Server) Wait() {
	limit := time.Duration(s.cfg.Load().Timeouts.Cleanup)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s.books.Running.Wait(ctx)
	s.retained.Clear(time.Now())
	s.cleanups.Wait(limit)
	s.sidecar.Load().Close()
}

// Ready reports whether one request could be served now.
func (s *Server) Ready() bool {
	if sc := s.sidecar.Load(); sc != nil {
		return sc.Ready()
	}
	return s.deps.Coordinator.Ready()
}

// ServeHTTP is the public surface, the same for HTTP/1.1, HTTP/2 and HTTP/3.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// The deadline holds for handlers that read a part of the body, too. ReadBody
	// lifts it at the body's end.
	downstream.LimitBody(r, time.Duration(s.cfg.Load().Server.ReadTimeout))
	if !s.servePath(w, r) {
		w.Header().Set("X-Request-Id", downstream.RequestID(r))
		downstream.Error(w, &openai.Error{Status: 404, Code: "not_found", Message: "there is no such endpoint"})
	}
}

// servePath serves r if its path is one of the public endpoints.
func (s *Server) servePath(w http.ResponseWriter, r *http.Request) bool {
	api, ok := openai.APIFor(r.URL.Path)
	if ok && r.Method == http.MethodPost {
		s.exchanges.Serve(w, r, api)
		return true
	}
	downstream.LimitWrites(w, r, time.Duration(s.cfg.Load().Server.WriteTimeout))
	if ok {
		methodNotAllowed(w, r, "POST")
		return true
	}
	var serve func(http.ResponseWriter, *http.Request)
	switch path := r.URL.Path; {
	case path == modelsPath || strings.HasPrefix(path, modelsPath+"/"):
		serve = s.serveModels
	case path == healthPath:
		serve = s.serveHealth
	case path == "/version":
		serve = s.serveVersion
	default:
		return false
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		methodNotAllowed(w, r, "GET")
		return true
	}
	w.Header().Set("X-Request-Id", downstream.RequestID(r))
	serve(w, r)
	return true
}

func methodNotAllowed(w http.ResponseWriter, r *http.Request, allow string) {
	w.Header().Set("Allow", allow)
	w.Header().Set("X-Request-Id", downstream.RequestID(r))
	downstream.Error(w, &openai.Error{Status: 405, Code: "method_not_allowed", Message: "this endpoint takes " + allow})
}

const (
	modelsPath = "/v1/models"
	healthPath = "/health"
)

// model is one row of the list of models, in OpenAI's form.
type model struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	OwnedBy string `json:"owned_by"`
}

// serveModels lists the models of all engines that are ready, or shows the one
// that the path names.
func (s *Server) serveModels(w http.ResponseWriter, r *http.Request) {
	if _, err := s.keys.Load().Authenticate(r); err != nil {
		downstream.Error(w, exchange.PublicError(err))
		return
	}
	rows := []model{}
	for _, id := range s.deps.Registry.Snapshot().Models() {
		rows = append(rows, model{ID: id, Object: "model", OwnedBy: "pdproxy"})
	}
	name, one := strings.CutPrefix(r.URL.Path, modelsPath+"/")
	if !one {
		downstream.JSON(w, 200, struct {
			Object string  `json:"object"`
			Data   []model `json:"data"`
		}{"list", rows})
		return
	}
	i := slices.IndexFunc(rows, func(m model) bool { return m.ID == name })
	if i < 0 {
		downstream.Error(w, exchange.PublicError(coordinator.ErrUnknownModel))
		return
	}
	downstream.JSON(w, 200, rows[i])
}

// serveHealth answers 200 when one request could be served now.
func (s *Server) serveHealth(w http.ResponseWriter, _ *http.Request) {
	if s.draining.Load() || !s.Ready() {
		downstream.Error(w, &openai.Error{Status: 503, Type: "overloaded_error", Code: "no_target", Message: "no request could be served now"})
		return
	}
	downstream.JSON(w, 200, map[string]string{"status": "ok"})
}

func (s *Server) serveVersion(w http.ResponseWriter, _ *http.Request) {
	downstream.JSON(w, 200, map[string]string{"version": s.deps.Version})
}
