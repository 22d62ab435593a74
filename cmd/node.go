package cmd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/loads"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Node is one proxy process: everything that run and demo wire together, for
// tests and embedders too.
type Node struct {
	cfg       atomic.Pointer[config.Config]
	log       *slog.Logger
	part      Part
	metrics   *telemetry.Metrics
	registry  *engine.Registry
	local     *coordinator.Local // places, in a worker only while no coordinator does
	tokens    *tokens.Tokenizer
	recorder  *proxy.Recorder // nil: nothing is recorded here
	plugins   *plugins.Set
	memory    *buffer.Budget // of requests and answers
	server    *proxy.Server
	leading   *leading   // a coordinator's workers; else nil
	following *following // a worker's coordinator; else nil

	// Of who finds the engines itself: nil in a worker.
	ids       *idstore.Keeper // nil: nothing keeps the mark of the ids
	knowledge *knowledge
	loads     *loads.Poller
	discovery *discovery.Manager
	registrar *moriio.Registrar  // nil: no engine registers
	storage   *discovery.Storage // nil: no TensorRT-LLM worker registers here
	reloads   []chan struct{}    // one for each way to register: another configuration is there
	routes    *fleetRoutes       // nil: no fleet.listen

	front      *proxy.Front
	certs      *proxy.Certs // nil without TLS
	tracer     *telemetry.Tracer
	ready      func()            // called once when a request could first be served; may be nil
	started    *config.Config    // with which the sockets were opened
	serving    func()            // called when connections are accepted; may be nil
	succession *succession       // nil: nobody takes over from the node
	token      *admintoken.Token // of the admin address, made by this process; nil: it is configured
}

// NewNode builds a node that does a part, and opens the sockets that it was not
// given; it starts nothing. After an error the caller closes those.
func NewNode(cfg *config.Config, log *slog.Logger, part Part) (*Node, error) {
	f, err := loadFiles(cfg, log)
	if err != nil {
		return nil, err
	}
	n := &Node{log: log, part: part, started: cfg, memory: new(buffer.Budget)}
	if part.Role != RoleCoordinator {
		n.certs = f.certs
	}
	cfg = part.share(cfg, cfg.Fleet.Workers)
	n.cfg.Store(cfg)
	prom := prometheus.NewRegistry()
	prom.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	n.metrics = telemetry.New(prom)
	if n.tracer, err = telemetry.NewTracer(context.Background()); err != nil {
		return nil, failed(fmt.Errorf("start tracing: %w", err))
	}
	if part.Role == RoleWorker {
		n.mirrorEngines(cfg)
	} else if err := n.knowEngines(cfg); err != nil {
		return nil, err
	}
	if n.plugins, err = newPlugins(cfg, prom, n.metrics, n.state().Conversations, n.askLegs, log); err != nil {
		return nil, failed(err)
	}
	if part.Role != RoleWorker {
		if err := n.findEngines(cfg, f.workerToken); err != nil {
			return nil, errors.Join(err, n.plugins.Close(context.Background()))
		}
	}
	if err := n.serveWith(cfg, f, prom); err != nil {
		return nil, errors.Join(err, n.closeRegistrar(), n.plugins.Close(context.Background()))
	}
	return n, nil
}

// engineOptions is what every registry of this process stands on.
func (n *Node) engineOptions(cfg *config.Config) engine.Options {
	return engine.Options{
		Health: cfg.Health, Circuit: cfg.Circuit, Pairs: cfg.Pairs,
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(spec config.Engine) (upstream.Client, error) {
			return newClient(n.cfg.Load(), n.part.shareEngine(spec, n.started.Fleet.Workers))
		},
		NewProbe: newProbe,
		Log:      n.log,
	}
}

// knowEngines makes the registry that probes the engines, and who learns of them.
func (n *Node) knowEngines(cfg *config.Config) error {
	n.knowledge = newKnowledge(cfg, n.metrics, n.log)
	o := n.engineOptions(cfg)
	o.APIKey = func(spec config.Engine) (string, error) { return readSecret(spec.APIKeyFile) }
	o.Resolve = resolve
	o.SyncClocks = func() bool { return n.cfg.Load().TRTLLM.PerfMetrics }
	o.Index = n.knowledge.state.Index
	o.OnState = n.knowledge.ready
	o.OnRestart = func(i *engine.Instance) {
		n.metrics.Restart(i.Spec.Name)
		n.knowledge.restarted(i)
	}
	o.OnGone = n.knowledge.gone
	n.registry = engine.New(o)
	return n.registry.Apply(engine.SourceStatic, cfg.AllEngines(), 0)
}

// state is what is known here of the engines' KV; a worker knows nothing.
func (n *Node) state() coordinator.State {
	if n.knowledge == nil {
		return coordinator.State{}
	}
	return n.knowledge.state
}

// serveWith loads the plugins, builds what decides and serves, and opens the
// sockets.
func (n *Node) serveWith(cfg *config.Config, f *files, prom *prometheus.Registry) error {
	if err := applyPlugins(n.plugins, cfg, n.part.Role, n.memory); err != nil {
		return err
	}
	fallback, err := policies.NewNative(policies.Names{Plan: "auto", Place: "least_load", Mint: "snowflake"})
	if err != nil {
		return failed(err)
	}
	ids, err := n.openIDs(cfg)
	if err != nil {
		return err
	}
	n.local = coordinator.NewLocal(n.registry, n.plugins, fallback, n.state(), ids, n.metrics)
	if n.tokens, err = newTokenizer(cfg, f.tokenizers, n.registry, n.memory); err != nil {
		return err
	}
	if n.part.Role != RoleWorker {
		n.knowledge.tokens = n.tokens
		n.loads = loads.New(n.registry, cfg.Health, n.log)
		watch(prom, n.registry, n.local, n.knowledge.state.Index)
	}
	placer, err := n.placer(cfg, f, ids)
	if err != nil {
		return err
	}
	exchanges, err := n.openRecording(cfg)
	if err != nil {
		return err
	}
	spread := n.joinWorkers()
	var workers proxy.Workers
	var turns *coordinator.Client
	switch {
	case n.leading != nil:
		workers = proxy.NewWorkers(n.leading.workers)
	case n.following != nil:
		turns = n.following.client
	}
	n.server = proxy.New(cfg, f.keys, proxy.Deps{
		Registry: n.registry, Coordinator: placer, Metrics: n.metrics, Gatherer: prom, Turns: turns, Workers: workers,
		Policies: policySet{n.plugins}, Wrap: n.plugins.Wrap, Tracer: n.tracer, Tokens: n.tokens, Recorder: exchanges, Lanes: n.part.Dir, Balance: spread, Memory: n.memory, Log: n.log, Version: readVersion().Version,
	})
	n.server.SetTRTLLM(f.trtllm)
	n.askLegs()
	if err := n.open(cfg, f); err != nil {
		return err
	}
	prom.MustRegister(n.front)
	return nil
}

// joinWorkers makes this process one of the workers that share the public socket; nil
// if it shares none.
func (n *Node) joinWorkers() *balance.Worker {
	if n.part.Role != RoleWorker || n.part.Sockets.Public == nil {
		return nil
	}
	w, l, err := balance.Join(n.part.Dir, n.part.Slot, n.part.Sockets.Public)
	if err != nil {
		n.log.Warn("connections may spread unevenly over the workers", "error", err)
		return nil
	}
	n.part.Sockets.Public = l
	return w
}

// openRecording begins the recording that the configuration asks for, and returns
// who records the exchanges of this process. All workers' are in the file of their
// coordinator.
func (n *Node) openRecording(cfg *config.Config) (*proxy.Recorder, error) {
	if cfg.Recording.Path == "" {
		return nil, nil
	}
	if n.part.Role == RoleWorker {
		n.recorder = proxy.NewForwarder(cfg.Recording.BlockTokens, func(line []byte) bool {
			return n.following.client.Report(append([]byte{reportRequest}, line...))
		})
		return n.recorder, nil
	}
	var err error
	if n.recorder, err = proxy.NewRecorder(cfg.Recording.Path, cfg.Recording.BlockTokens); err != nil {
		return nil, config.Problems{cfg.Problem("recording.path", err.Error())}
	}
	if n.part.Role == RoleCoordinator {
		return nil, nil
	}
	return n.recorder, nil
}

// placer is who places the requests of this process.
func (n *Node) placer(cfg *config.Config, f *files, ids *disaggid.Source) (coordinator.Coordinator, error) {
	switch n.part.Role {
	case RoleCoordinator:
		return n.lead(f.fleet), nil
	case RoleWorker:
		return n.follow(cfg, f.fleet, ids)
	}
	return n.local, nil
}

// open opens the sockets of the part that were not given.
func (n *Node) open(cfg *config.Config, f *files) (err error) {
	given := n.part.Sockets
	given.Only = n.part.Role != RoleSingle
	if n.part.Role == RoleWorker {
		if given.Public == nil {
			given.Public, err = net.Listen("tcp", cfg.Server.Listen)
		}
	} else if given.Admin == nil {
		if given.Admin, err = net.Listen("tcp", cfg.Admin.Listen); err != nil {
			return failed(fmt.Errorf("admin.listen: %w", err))
		}
	}
	if err == nil && n.part.Role != RoleWorker {
		err = n.listenFleet(cfg, f.fleet, n.part.Fleet)
	}
	if err == nil && n.part.Role == RoleCoordinator {
		err = n.leading.open(cfg, n.part, n.routes.opened())
	}
	if err == nil {
		n.front, err = n.server.Listen(cfg, n.certs, n.adminToken(f.token, given.Admin), given)
	}
	if err != nil {
		if given.Admin != nil {
			given.Admin.Close()
		}
		return failed(errors.Join(err, n.token.Close()))
	}
	return nil
}

// askLegs makes the server ask the leg and finish hooks, if a plugin has them.
func (n *Node) askLegs() {
	switch {
	case n.server == nil: // not built yet
	case n.plugins.HasLegs():
		n.server.SetLegs(n.plugins)
	default:
		n.server.SetLegs(nil)
	}
}

// AdminURL is where operators reach the node.
func (n *Node) AdminURL() string { return "http://" + n.front.AdminAddr().String() }

// HTTP3Addr is the UDP address of HTTP/3, nil without it.
func (n *Node) HTTP3Addr() net.Addr { return n.front.HTTP3Addr() }

// URL is where clients reach the node.
func (n *Node) URL() string {
	scheme := "http"
	if n.certs != nil {
		scheme = "https"
	}
	return scheme + "://" + n.front.Addr().String()
}

// where is the address that the node serves: of a coordinator its operators'.
func (n *Node) where() string {
	if n.part.Role == RoleCoordinator {
		return n.AdminURL()
	}
	return n.URL()
}

// Reload makes new exchanges use next: engines, policies, limits, keys and
// certificates. Nothing changes when any part of it cannot be used. What needs
// new sockets stays as it is, and that is said.
func (n *Node) Reload(next *config.Config) error {
	f, err := loadFiles(next, n.log)
	if err != nil {
		return err
	}
	old := n.cfg.Load()
	for _, moved := range []struct {
		key     string
		changed bool
	}{
		{"server.listen", old.Server.Listen != next.Server.Listen},
		{"server.http3", old.Server.HTTP3 != next.Server.HTTP3},
		{"server.tls", old.Server.TLS != next.Server.TLS},
		{"admin.listen", old.Admin.Listen != next.Admin.Listen},
		{"admin.token_file", old.Admin.TokenFile != next.Admin.TokenFile},
		{"admin.allowed_hosts", !slices.Equal(old.Admin.AllowedHosts, next.Admin.AllowedHosts)},
		{"discovery", !reflect.DeepEqual(old.Discovery, next.Discovery)},
		{"fleet", !reflect.DeepEqual(old.Fleet, next.Fleet)},
		{"kv_index", old.KVIndex != next.KVIndex},
		{"tokens", !reflect.DeepEqual(old.Tokens, next.Tokens)},
		{"recording", old.Recording != next.Recording},
		{"conversation.capacity", old.Conversation.Capacity != next.Conversation.Capacity},
	} {
		if moved.changed {
			n.log.Warn("this key is read at start only; it stays until a restart", "key", moved.key)
		}
	}
	next = n.part.share(next, n.started.Fleet.Workers)
	if err := applyPlugins(n.plugins, next, n.part.Role, n.memory); err != nil {
		return err
	}
	n.cfg.Store(next) // the clients of new engines are built by it
	if n.part.Role != RoleWorker {
		if err := n.registry.Apply(engine.SourceStatic, next.AllEngines(), time.Duration(next.Server.DrainTimeout)); err != nil {
			n.cfg.Store(old)
			return errors.Join(err, applyPlugins(n.plugins, old, n.part.Role, n.memory))
		}
		n.tellRegistrations()
		n.loads.Configure(next.Health)
	}
	n.registry.Configure(next.Health, next.Circuit, next.Pairs)
	n.server.Reload(next, f.keys)
	n.server.SetTRTLLM(f.trtllm)
	if n.certs != nil {
		return n.certs.Reload()
	}
	return nil
}

// newClient makes the pooled client of one engine.
func newClient(cfg *config.Config, spec config.Engine) (upstream.Client, error) {
	u, err := url.Parse(spec.URL)
	if err != nil {
		return nil, err
	}
	tlsConfig, err := engineTLS(spec)
	if err != nil {
		return nil, err
	}
	opts := upstream.Options{
		URL: u, TLS: tlsConfig, MaxConns: spec.MaxConns, MaxIdle: cfg.Transport.MaxIdle,
		IdleTimeout: time.Duration(cfg.Transport.IdleTimeout), DialTimeout: time.Duration(cfg.Timeouts.Dial),
	}
	if spec.Connector == config.ConnectorTRTLLM && cfg.TRTLLM.PerfMetrics {
		opts.MaxHeadBytes = 64<<10 + connector.MaxTiming
	}
	if cfg.Transport.Client == "nethttp" {
		return upstream.NewStd(opts), nil
	}
	return upstream.New(opts), nil
}

// newProbe makes the transport of one engine's probes.
func newProbe(spec config.Engine) (http.RoundTripper, error) {
	tlsConfig, err := engineTLS(spec)
	if err != nil {
		return nil, err
	}
	return &http.Transport{TLSClientConfig: tlsConfig, MaxIdleConnsPerHost: 1, IdleConnTimeout: 4 * time.Second, DisableCompression: true}, nil
}

// engineTLS is how one engine's certificate is checked; nil for the default.
func engineTLS(spec config.Engine) (*tls.Config, error) {
	if spec.CA == "" && !spec.InsecureSkipVerify {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: spec.InsecureSkipVerify}
	if spec.CA == "" {
		return c, nil
	}
	pem, err := os.ReadFile(spec.CA)
	if err != nil {
		return nil, err
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, errors.New("ca: no certificate in the file")
	}
	return c, nil
}
