// Package proxy assembles the data path from the packages below it: edge accepts the
// requests of clients, each request runs as one exchange with legs on engines, and admin
// shows operators what the proxy does. coordinator.Coordinator decides on which engine a
// leg runs, connector.Connector decides how the leg looks.
//
// The decisions behind this package are in docs/design/edge.md.
package proxy

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/accesslog"
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
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/saturation"
	"github.com/pdproxy/pdproxy/proxy/exchange"
	"github.com/pdproxy/pdproxy/proxy/inflight"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/models"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/poolobjects"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tenant"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// Options are the parts that a Server uses. The comment of a field states if the field may be nil.
type Options struct {
	Registry    *engine.Registry
	Coordinator coordinator.Coordinator
	Metrics     *telemetry.Metrics
	Gatherer    prometheus.Gatherer // of this process
	Policies    admin.Policies
	Tracer      *telemetry.Tracer // nil: no spans
	AccessLog   *accesslog.Log    // nil: no access log
	Tokens      *tokens.Tokenizer // nil: the proxy computes no token ids
	// Wrap puts filters around the handler of the public endpoints, except /health. It is
	// called once, and filters see all protocols. nil: no filters. A filter ends a client's
	// connection or stream with a panic of http.ErrAbortHandler.
	Wrap    func(http.Handler) http.Handler
	Filters *atomic.Bool // false: there are no filters now, and requests skip the handler of Wrap; nil: they never skip it
	// Turns connects to the coordinator, which stores the KV that decode engines retain for
	// the next turns of the fleet. nil: this process stores it.
	Turns *fleet.Client
	// Retain is the policy that decides how long KV of turns is retained, in a process that stores it.
	Retain turns.Decide
	// Evict asks the policy that ends running requests for waiting ones; nil: no policy is configured.
	Evict   admission.Evict
	Workers admin.Workers // of a coordinator, which also answers operators for them; nil: none
	// Knowledge is the data of this process about the engines' KV, for operators. Its fields are
	// nil in a worker.
	Knowledge coordinator.State
	Hooks     attempt.Hooks       // nil: no leg or finish hook; SetHooks replaces it
	Recorder  *recording.Recorder // nil: no recording
	// QUICDir is the directory of the processes that share the UDP port of HTTP/3: the
	// processes of a fleet, or a process and its successor. nil: this process has the
	// port alone.
	QUICDir *privatedir.Dir
	// Balance spreads the connections of the public socket over the workers that share
	// it. nil: this process shares no socket.
	Balance *balance.Worker
	// Budgets are those of the tenants. nil: this process counts them in its memory.
	Budgets tenant.Budgets
	Memory  *buffer.Budget // limits the memory of requests and answers; nil: the server makes one
	Log     *slog.Logger
	Version string
}

// Server serves the public and the admin endpoints. Safe for concurrent use.
type Server struct {
	options    Options
	log        *slog.Logger
	cfg        atomic.Pointer[config.Config]  // replaced as a whole by Reload
	keys       atomic.Pointer[admission.Keys] // nil: clients need no key
	connectors atomic.Pointer[map[string]connector.Connector]
	queue      admission.Queue
	waiting    admission.WaitingRoom // for engines
	cleanups   *cleanup.Runner
	books      *journal.Books
	exchanges  *exchange.Runner
	sockets    inflight.Group // WebSockets
	draining   atomic.Bool
	prompts    *prompt.Matcher
	sidecar    atomic.Pointer[sidecar.Sidecar]      // nil: the process is no sidecar
	picker     atomic.Pointer[sidecar.PickerClient] // nil: no ext_proc picker
	retained   retained.Store
	memory     *buffer.Budget // of bodies and answers
	bodies     *downstream.Bodies
	started    time.Time
	gatherer   prometheus.Gatherer // of the whole fleet
	proxies    atomic.Pointer[admission.Proxies]
	objects    atomic.Pointer[poolobjects.Objects] // of epp.pool; never nil
	mapping    sync.Mutex                          // held while names and objectives are made
	names      atomic.Pointer[models.Table]        // nil without [[model]] and rewrites
	objectives atomic.Pointer[map[string]admission.Objective]
	origins    atomic.Pointer[allowedOrigins] // never nil after New
}

// New returns a server with that configuration. keys is nil if clients need no API key. New
// starts nothing.
func New(cfg *config.Config, keys *admission.Keys, options Options) *Server {
	s := &Server{
		options:  options,
		log:      options.Log,
		books:    journal.NewBooks(options.Metrics, options.Tracer, options.AccessLog, options.Log, options.Balance),
		prompts:  prompt.New(prompt.Options{Coordinator: options.Coordinator, Registry: options.Registry, Metrics: options.Metrics, Log: options.Log, Tokens: options.Tokens}),
		memory:   options.Memory,
		started:  time.Now(),
		gatherer: admin.WholeFleet(options.Gatherer, options.Workers),
	}
	if s.memory == nil {
		s.memory = new(buffer.Budget)
	}
	s.objects.Store(new(poolobjects.Objects))
	s.bodies = downstream.NewBodies(s.memory, s.cfg.Load, s.clientOf)
	options.Metrics.WatchBuffers(s.memory.Used)
	options.Metrics.ModelsServed(func(name string) bool {
		_, served := options.Registry.Snapshot().Pool(name)
		return served
	})
	s.cleanups = cleanup.New(cleanup.Options{Registry: options.Registry, Memory: s.memory, Metrics: options.Metrics, Log: options.Log})
	free := retained.Freer{Registry: options.Registry, Cleanups: s.cleanups}
	s.retained = retained.NewLocal(free, options.Retain, options.Metrics)
	if options.Turns != nil {
		s.retained = retained.NewFleet(free, options.Turns)
	}
	s.SetConnectors(connector.All())
	budgets := options.Budgets
	if budgets == nil {
		budgets = tenant.NewLedger(nil, options.Log, nil)
	}
	services := attempt.NewServices(attempt.Options{
		Registry: options.Registry, Coordinator: options.Coordinator, Connector: s.connector, Memory: s.memory,
		Cleanups: s.cleanups, Retained: s.retained, Prompts: s.prompts, Log: options.Log,
	})
	s.exchanges = exchange.New(services, exchange.Options{
		Config: s.cfg.Load, Keys: s.keys.Load, Proxies: s.proxies.Load, Sidecar: s.sidecar.Load, Picker: s.picker.Load, Models: s.names.Load, Objectives: func() map[string]admission.Objective { return *s.objectives.Load() },
		Queue: &s.queue, Waiting: &s.waiting, Bodies: s.bodies, Books: s.books, Recorder: options.Recorder, Budgets: budgets, Metrics: options.Metrics,
	})
	s.queue.Saturated, s.queue.Evict = s.saturated, options.Evict
	s.SetHooks(options.Hooks)
	s.Reload(cfg, keys)
	return s
}

// Reload makes later exchanges use cfg and keys. Running exchanges keep the old ones. The
// addresses of the listeners do not change.
func (s *Server) Reload(cfg *config.Config, keys *admission.Keys) {
	s.keys.Store(keys)
	c := &cfg.Conversation
	s.prompts.SetIDSources(openai.NewIDSources(c.Fields, c.Headers, c.LateFields, c.ParentHeaders))
	proxies := admission.Proxies(cfg.Server.ProxyNetworks())
	s.proxies.Store(&proxies)
	origins := allowedOrigins(cfg.Server.CORSOrigins)
	s.origins.Store(&origins)
	s.cfg.Store(cfg)
	s.mapObjects()
	limit := int64(cfg.Limits.BufferMemory)
	if limit == 0 {
		limit = buffer.DefaultLimit()
	}
	s.memory.SetLimit(limit)
	s.sidecar.Store(sidecar.New(cfg, s.options.Registry, s.sidecar.Load()))
	before := s.picker.Load()
	after := sidecar.NewPickerClient(cfg, s.options.Registry, before, s.log)
	if s.picker.Store(after); after != before {
		before.Close()
	}
}

// SetObjects makes later exchanges use other objects of epp.pool.
func (s *Server) SetObjects(o *poolobjects.Objects) {
	s.objects.Store(o)
	s.mapObjects()
}

// mapObjects applies the present objects of epp.pool by the present configuration.
func (s *Server) mapObjects() {
	s.mapping.Lock()
	defer s.mapping.Unlock()
	cfg, o := s.cfg.Load(), s.objects.Load()
	s.names.Store(models.NewTable(cfg, o.Rewrites))
	objectives := admission.Objectives(cfg, o.Priorities)
	s.objectives.Store(&objectives)
}

// saturated implements admission.Saturated by the present configuration.
func (s *Server) saturated(model string, further int) (delay, each time.Duration, saturated bool) {
	l := &s.cfg.Load().Limits
	limits := saturation.Limits{QueueDepth: l.SaturationQueueDepth, KVUsage: l.SaturationKVUsage}
	return saturation.Of(s.options.Registry.Snapshot(), model, further, limits, time.Now())
}

// clientOf returns the name of the client of r for limits.
func (s *Server) clientOf(r *http.Request) string { return s.proxies.Load().Client(r) }

// SetHooks makes later exchanges call h; nil: none.
func (s *Server) SetHooks(h attempt.Hooks) { s.exchanges.SetHooks(h) }

// SetConnectors makes later attempts use these connectors, which have other settings of the operator.
func (s *Server) SetConnectors(list []connector.Connector) {
	byName := map[string]connector.Connector{connector.Remote().Name(): connector.Remote()}
	for _, c := range list {
		byName[c.Name()] = c
	}
	s.connectors.Store(&byName)
}

// connector returns the connector of a name that the configuration has.
func (s *Server) connector(name string) connector.Connector { return (*s.connectors.Load())[name] }

// Warm sends a request of one token through each broken pair of engines, and through each new
// one if configured: see exchange.Runner.Warm.
func (s *Server) Warm(ctx context.Context) { s.exchanges.Warm(ctx) }

// Drain makes /readyz and /health answer 503, so that balancers send no more requests.
// Requests that wait for an engine get 503, because another proxy may have one.
func (s *Server) Drain() {
	s.draining.Store(true)
	s.waiting.Close()
}

// CleanUp makes the calls that another process of the same deployment gave to
// Lease.SetOrphanCleanup before it died, in the background.
func (s *Server) CleanUp(job []byte) error { return s.cleanups.StartEncoded(job) }

// ForgetTurn makes the holder of KV that another process of the fleet knew free it, in
// the background: no request of the fleet will use it.
func (s *Server) ForgetTurn(t *fleet.RetainedKV) error {
	return retained.Freer{Registry: s.options.Registry, Cleanups: s.cleanups}.FreeEncoded(t)
}

// Wait waits until no exchange, no WebSocket and no clean-up is left, each for timeouts.cleanup
// at most.
// Call it when no new work can come: after edge.Server.Serve has returned, which cancels
// running exchanges but does not wait for them, and in a coordinator after it has left its
// workers. A clean-up that starts after Wait has returned may be cancelled at once.
func (s *Server) Wait() {
	limit := time.Duration(s.cfg.Load().Timeouts.Cleanup)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s.books.Running.Wait(ctx)
	select { // a WebSocket frees its last message after its connection has ended
	case <-s.sockets.Idle():
	case <-ctx.Done():
	}
	s.retained.Clear(time.Now())
	s.cleanups.Wait(limit)
	s.picker.Load().Close()
}

// Ready reports whether a request could be served now.
func (s *Server) Ready() bool {
	if sc := s.sidecar.Load(); sc != nil {
		return s.options.Registry.Settled() && sc.Ready()
	}
	return s.options.Coordinator.Ready()
}
