// Package node connects the parts of one process of the proxy: the registry of the
// engines, discovery, the plugins, the policies, the sockets and the server. A node is a
// complete proxy, or it has the role of a coordinator or a worker in a fleet.
//
// The decisions behind this package are in docs/design/fleet.md.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/loads"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/engine/sleepmode"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/idtoken"
	"github.com/pdproxy/pdproxy/proxy/poolobjects"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tenant"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Node is one process of the proxy.
type Node struct {
	cfg      atomic.Pointer[config.Config] // in force now
	started  *config.Config                // configuration with which the sockets were opened
	log      *slog.Logger
	options  Options
	prom     *prometheus.Registry
	metrics  *telemetry.Metrics
	registry *engine.Registry
	local    *coordinator.Local // places requests; in a worker only while it has no coordinator
	tokens   *tokens.Tokenizer
	recorder *recording.Recorder // nil: nothing is recorded
	access   *accesslog.Log
	plugins  *plugins.Set
	memory   *buffer.Budget // of the bodies of requests and answers
	server   *proxy.Server
	front    *edge.Server      // the public and the admin address
	certs    *edge.Certs       // nil without TLS
	verifier *idtoken.Verifier // of the configuration in force; nil without [[jwt]]
	eppCerts *edge.Certs       // of epp.listen; nil without TLS
	tracer   *telemetry.Tracer
	pusher   *telemetry.Pusher     // of metrics by OTLP; nil: none
	objects  *poolobjects.Follower // of epp.pool; nil: none
	ledger   *tenant.Ledger        // of the tenants' budgets
	token    *admintoken.Token     // made by this process for the admin address; nil: a token is configured
	leader   *leaderSide           // of a coordinator, else nil
	worker   *workerSide           // of a worker, else nil
	leaving  atomic.Bool           // another process decides about the engines, or none does soon

	// The following fields are nil in a worker, which receives the list of engines from its
	// coordinator.
	ids       *idstore.Keeper // nil: the range of the used ids is not kept
	knowledge *knowledge
	loads     *loads.Poller
	sleep     *sleepmode.Manager
	discovery *discovery.Manager
	registrar *moriio.Registrar  // nil: no engine registers
	storage   *discovery.Storage // nil: no TensorRT-LLM worker registers
	reloaded  []chan struct{}    // one channel for each source of registrations; signals a new configuration
	fleet     *fleetListener     // nil: no fleet.listen
	scrapes   *metricsListener   // nil: no metrics.listen
	picker    *pickerListener    // nil: no epp.listen
}

// New builds a node and opens the sockets that o does not hold. It starts nothing.
// After an error the caller closes the sockets of o. An error of type *exit.Error is a
// failure of the machine or the network; any other error is a fault of the
// configuration.
func New(cfg *config.Config, log *slog.Logger, o Options) (*Node, error) {
	f, err := loadFiles(cfg, log)
	if err != nil {
		return nil, err
	}
	n := &Node{log: log, options: o, started: cfg, memory: new(buffer.Budget)}
	if o.Role != RoleCoordinator {
		n.certs, n.eppCerts = f.certs, f.eppCerts
	}
	n.verifier = f.verifier
	cfg = o.share(cfg, cfg.Fleet.Workers)
	n.cfg.Store(cfg)
	prom := prometheus.NewRegistry()
	prom.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	n.prom, n.metrics = prom, telemetry.New(prom)
	n.metrics.Build(o.Version)
	if n.tracer, err = telemetry.NewTracer(context.Background(), o.identity()); err != nil {
		return nil, exit.Failed(fmt.Errorf("start tracing: %w", err))
	}
	if o.Role == RoleWorker {
		n.mirrorEngines(cfg)
	} else if err := n.probeEngines(cfg); err != nil {
		return nil, err
	}
	if n.plugins, err = newPlugins(cfg, prom, n.metrics, n.state().Conversations, n.askLegs, log); err != nil {
		return nil, exit.Failed(err)
	}
	if o.Role != RoleWorker {
		if err := n.findEngines(cfg, f.workerToken); err != nil {
			return nil, errors.Join(err, n.plugins.Close(context.Background()))
		}
	}
	if err := n.serveWith(cfg, f, prom); err != nil {
		return nil, errors.Join(err, n.closeRegistrar(), n.plugins.Close(context.Background()))
	}
	n.metrics.ConfigLoaded(true, time.Now())
	return n, nil
}

// Describe sends the description of every metric of the process, also of those that have no
// value yet. The reference of metrics is made from these descriptions.
func (n *Node) Describe(ch chan<- *prometheus.Desc) { n.prom.Describe(ch) }

// engineOptions returns the options that the registries of all roles have in common.
func (n *Node) engineOptions(cfg *config.Config) engine.Options {
	return engine.Options{
		Health: cfg.Health, Circuit: cfg.Circuit, Pairs: cfg.Pairs,
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(spec config.Engine) (upstream.Client, error) {
			return newClient(n.cfg.Load(), n.options.shareEngine(spec, n.started.Fleet.Workers))
		},
		NewProbe:  newProbe,
		Log:       n.log,
		MoveAfter: func() time.Duration { return time.Duration(n.cfg.Load().Retry.MoveAfter) },
	}
}

// probeEngines makes the registry that probes the engines. The registry reports to
// n.knowledge.
func (n *Node) probeEngines(cfg *config.Config) error {
	n.knowledge = newKnowledge(cfg, n.metrics, n.log)
	o := n.engineOptions(cfg)
	o.APIKey = func(spec config.Engine) (string, error) { return config.ReadSecret(spec.APIKeyFile) }
	o.Resolve = resolve
	o.SyncClocks = func() bool { return n.cfg.Load().TRTLLM.PerfMetrics }
	o.Index = n.knowledge.state.Index
	o.OnState = n.knowledge.engineChanged
	o.OnRestart = func(i *engine.Instance) {
		n.metrics.Restart(i.Spec.Name)
		n.knowledge.engineRestarted(i)
	}
	o.OnGone = n.knowledge.engineGone
	n.registry = engine.New(o)
	n.registry.Know(configuredModels(cfg))
	return n.registry.Apply(engine.SourceStatic, cfg.Instances(), 0)
}

// state returns this process's knowledge of the engines' KV. A worker's state is empty.
func (n *Node) state() coordinator.State {
	if n.knowledge == nil {
		return coordinator.State{}
	}
	return n.knowledge.state
}

// serveWith loads the plugins, builds the coordinator and the server, and opens the
// sockets.
func (n *Node) serveWith(cfg *config.Config, f *files, prom *prometheus.Registry) error {
	if err := applyPlugins(n.plugins, cfg, n.options.Role, n.memory); err != nil {
		return err
	}
	fallback, err := policies.NewNative(policies.Names{Plan: "auto", Place: "least_load", Mint: "snowflake"})
	if err != nil {
		return exit.Failed(err)
	}
	ids, err := n.openIDs(cfg)
	if err != nil {
		return err
	}
	n.registry.SetWakes(cfg.Sleep.Wake)
	n.local = coordinator.NewLocal(n.registry, n.plugins, fallback, n.state(), ids, n.metrics)
	if n.tokens, err = newTokenizer(cfg, f.tokenizers, n.registry, n.memory); err != nil {
		return err
	}
	if n.options.Role != RoleWorker {
		n.knowledge.tokens = n.tokens
		n.loads = loads.New(n.registry, cfg.Health, n.log)
		n.sleep = sleepmode.New(cfg.Sleep, sleepmode.Options{Registry: n.registry, Leads: n.leads, Woke: n.metrics.EngineWoken, Slept: n.metrics.EngineSlept, Log: n.log})
		n.local.SetWaker(n.sleep)
		registerGauges(prom, n.registry, n.local, n.knowledge.state.Index)
	}
	n.showAs(cfg, prom)
	n.ledger = n.newLedger(cfg)
	placer, err := n.placer(cfg, f, ids)
	if err != nil {
		return err
	}
	exchanges, err := n.openRecording(cfg)
	if err != nil {
		return err
	}
	if n.access, err = accesslog.Open(cfg.Server.AccessLog, cfg.Server.AccessLogFormat, n.log); err != nil {
		return config.Problems{cfg.Problem("server.access_log", err.Error())}
	}
	spread := n.joinWorkers()
	var workers admin.Workers
	var turns *fleet.Client
	switch {
	case n.leader != nil:
		workers = admin.NewWorkers(n.leader.workers)
	case n.worker != nil:
		turns = n.worker.client
	}
	n.server = proxy.New(cfg, f.keys, proxy.Options{
		Registry: n.registry, Coordinator: placer, Metrics: n.metrics, Gatherer: prom, Turns: turns, Retain: n.plugins.Retain, Evict: n.plugins.Evict, Workers: workers, Knowledge: n.state(),
		Policies: policyRows{n.plugins}, Wrap: n.plugins.Wrap, Filters: n.plugins.Filters(), Tracer: n.tracer, AccessLog: n.access, Tokens: n.tokens, Recorder: exchanges, Budgets: n.budgets(cfg), QUICDir: n.options.Dir, Balance: spread, Memory: n.memory, Log: n.log, Version: n.options.Version,
	})
	n.server.SetConnectors(connector.Configured(f.trtllm))
	n.askLegs()
	if err := n.followObjects(cfg); err != nil {
		return err
	}
	if err := n.pushMetrics(); err != nil {
		return err
	}
	if err := n.open(cfg, f); err != nil {
		return err
	}
	prom.MustRegister(n.front)
	return nil
}

// leads reports whether this process decides about the engines.
func (n *Node) leads() bool {
	return !n.leaving.Load() && (n.leader == nil || n.leader.member.Leads())
}

// joinWorkers makes this process one of the workers that share the public socket. The
// result is nil if this process shares no socket.
func (n *Node) joinWorkers() *balance.Worker {
	if n.options.Role != RoleWorker || n.options.Sockets.Public == nil {
		return nil
	}
	w, l, err := balance.Join(n.options.Dir, n.options.Slot, n.options.Sockets.Public)
	if err != nil {
		n.log.Warn("connections may spread unevenly over the workers", "error", err)
		return nil
	}
	n.options.Sockets.Public = l
	return w
}

// openRecording opens the configured recording. It returns the recorder for the exchanges
// of this process, nil without a recording. Workers send their lines to the coordinator,
// which writes the file.
func (n *Node) openRecording(cfg *config.Config) (*recording.Recorder, error) {
	if cfg.Recording.Path == "" {
		return nil, nil
	}
	if n.options.Role == RoleWorker {
		n.recorder = recording.NewForwarder(cfg.Recording.BlockTokens, func(line []byte) bool {
			return n.worker.client.Report(fleetpb.Append(nil, &fleetpb.Report{Recorded: line}))
		})
		return n.recorder, nil
	}
	var err error
	if n.recorder, err = recording.New(cfg.Recording.Path, cfg.Recording.BlockTokens); err != nil {
		return nil, config.Problems{cfg.Problem("recording.path", err.Error())}
	}
	if n.options.Role == RoleCoordinator {
		return nil, nil
	}
	return n.recorder, nil
}

// placer returns the coordinator that places the requests of this process.
func (n *Node) placer(cfg *config.Config, f *files, ids *disaggid.Source) (coordinator.Coordinator, error) {
	switch n.options.Role {
	case RoleCoordinator:
		return n.newLeaderSide(f.fleet), nil
	case RoleWorker:
		return n.connectWorker(cfg, f.fleet, ids)
	}
	return n.local, nil
}

// open opens the sockets of the role that were not given.
func (n *Node) open(cfg *config.Config, f *files) (err error) {
	given := n.options.Sockets
	given.Only = n.options.Role != RoleSingle
	if n.options.Role == RoleWorker {
		if given.Public == nil {
			given.Public, err = net.Listen("tcp", cfg.Server.Listen)
		}
	} else if given.Admin == nil {
		if given.Admin, err = net.Listen("tcp", cfg.Admin.Listen); err != nil {
			return exit.Failed(fmt.Errorf("admin.listen: %w", err))
		}
	}
	if err == nil && n.options.Role != RoleWorker {
		err = errors.Join(n.listenFleet(cfg, f.fleet, n.options.Fleet), n.listenMetrics(cfg, n.options.Metrics))
	}
	if err == nil {
		err = n.listenEPP(cfg, n.eppCerts, n.options.EPP)
	}
	if err == nil && n.options.Role == RoleCoordinator {
		err = n.leader.open(cfg, n.fleet.opened())
	}
	if err == nil {
		n.front, err = n.server.Listen(cfg, n.certs, n.openAdminToken(f.token, given.Admin), given)
	}
	if err != nil {
		n.scrapes.retire()
		if given.Admin != nil {
			given.Admin.Close()
		}
		return exit.Failed(errors.Join(err, n.token.Close()))
	}
	return nil
}

// askLegs makes the server call the leg and finish hooks if a plugin has them.
func (n *Node) askLegs() {
	switch {
	case n.server == nil: // not built yet
	case n.plugins.HasLegs():
		n.server.SetHooks(n.plugins)
	default:
		n.server.SetHooks(nil)
	}
}

// AdminURL returns the URL of the admin address.
func (n *Node) AdminURL() string { return "http://" + n.front.AdminAddr().String() }

// URL returns the URL of the public address.
func (n *Node) URL() string {
	scheme := "http"
	if n.certs != nil {
		scheme = "https"
	}
	return scheme + "://" + n.front.Addr().String()
}

// loggedURL returns the URL that log lines show: the public one, or the admin one of a
// coordinator, which serves no clients.
func (n *Node) loggedURL() string {
	if n.options.Role == RoleCoordinator {
		return n.AdminURL()
	}
	return n.URL()
}

// configuredModels returns the models that the configuration names, with their roles.
func configuredModels(cfg *config.Config) (list []engine.Known) {
	for _, e := range cfg.Serving() {
		if role, ok := abi.ParseRole(e.Role); ok && role != abi.RoleEncode && e.Model != "" {
			list = append(list, engine.Known{Model: e.Model, Roles: 1 << role})
		}
	}
	return list
}

// pushMetrics starts the export of metrics by OTLP, if environment variables enable it. A worker
// exports only its own measurements for OpenTelemetry's conventions: its coordinator exports the
// metrics of the whole fleet.
func (n *Node) pushMetrics() (err error) {
	gatherer := n.server.Gatherer()
	if n.options.Role == RoleWorker {
		gatherer = nil
	}
	if n.pusher, err = telemetry.NewPusher(context.Background(), n.options.identity(), gatherer); err != nil {
		return exit.Failed(fmt.Errorf("start the export of metrics: %w", err))
	}
	n.metrics.Pusher.Store(n.pusher)
	return nil
}

// identity names the process in exports.
func (o *Options) identity() telemetry.Identity {
	host, _ := os.Hostname() // may be empty: the rest still differs
	role := cmp.Or(string(o.Role), "single")
	return telemetry.Identity{Version: o.Version, Instance: fmt.Sprintf("%s/%s/%d", host, role, o.Slot)}
}
