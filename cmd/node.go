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
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/loads"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Node is one proxy process: everything that run and demo wire together, for
// tests and embedders too.
type Node struct {
	cfg         atomic.Pointer[config.Config]
	log         *slog.Logger
	registry    *engine.Registry
	coordinator *coordinator.Local
	ids         *idstore.Keeper // nil: nothing keeps the mark of the ids
	knowledge   *knowledge
	loads       *loads.Poller
	discovery   *discovery.Manager
	registrar   *moriio.Registrar  // nil: no engine registers
	storage     *discovery.Storage // nil: no TensorRT-LLM worker registers here
	recorder    *proxy.Recorder    // nil: nothing is recorded
	routes      *fleetRoutes       // nil: no fleet.listen
	plugins     *plugins.Set
	server      *proxy.Server
	front       *proxy.Front
	certs       *proxy.Certs // nil without TLS
	tracer      *telemetry.Tracer
	ready       func()         // called once when a request could first be served; may be nil
	started     *config.Config // with which the sockets were opened
	succession  *succession    // nil: nobody takes over from the node
}

// NewNode builds a node that does a part, and opens the sockets that it was not
// given; it starts nothing. After an error the caller closes those.
func NewNode(cfg *config.Config, log *slog.Logger, part Part) (*Node, error) {
	f, err := loadFiles(cfg)
	if err != nil {
		return nil, err
	}
	n := &Node{log: log, certs: f.certs, started: cfg}
	n.cfg.Store(cfg)
	prom := prometheus.NewRegistry()
	prom.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	metrics := telemetry.New(prom)
	if n.tracer, err = telemetry.NewTracer(context.Background()); err != nil {
		return nil, failed(fmt.Errorf("start tracing: %w", err))
	}
	n.knowledge = newKnowledge(cfg, metrics, log)
	n.registry = engine.New(engine.Options{
		Health: cfg.Health, Circuit: cfg.Circuit, Pairs: cfg.Pairs,
		Protocols:  func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient:  func(spec config.Engine) (upstream.Client, error) { return newClient(n.cfg.Load(), spec) },
		NewProbe:   newProbe,
		APIKey:     func(spec config.Engine) (string, error) { return readSecret(spec.APIKeyFile) },
		Resolve:    resolve,
		Log:        log,
		SyncClocks: func() bool { return n.cfg.Load().TRTLLM.PerfMetrics },
		Index:      n.knowledge.state.Index,
		OnState:    n.knowledge.ready,
		OnRestart: func(i *engine.Instance) {
			metrics.Restart(i.Spec.Name)
			n.knowledge.restarted(i)
		},
		OnGone: n.knowledge.gone,
	})
	if err := n.registry.Apply(engine.SourceStatic, cfg.AllEngines(), 0); err != nil {
		return nil, err
	}
	if n.plugins, err = newPlugins(cfg, prom, metrics, n.knowledge.state.Conversations, n.askLegs, log); err != nil {
		return nil, failed(err)
	}
	if err := n.findEngines(cfg, f.workerToken); err != nil {
		return nil, errors.Join(err, n.plugins.Close(context.Background()))
	}
	if err := n.serveWith(cfg, f, prom, metrics, part); err != nil {
		return nil, errors.Join(err, n.closeRegistrar(), n.plugins.Close(context.Background()))
	}
	return n, nil
}

// serveWith loads the plugins, builds what decides and serves, and opens the
// sockets.
func (n *Node) serveWith(cfg *config.Config, f *files, prom *prometheus.Registry, metrics *telemetry.Metrics, part Part) error {
	if err := applyPlugins(n.plugins, cfg); err != nil {
		return err
	}
	fallback, err := policies.NewNative(policies.Names{Plan: "auto", Place: "least_load", Mint: "snowflake"})
	if err != nil {
		return failed(err)
	}
	ids, err := n.openIDs(cfg, string(part.Dir))
	if err != nil {
		return err
	}
	n.coordinator = coordinator.NewLocal(n.registry, n.plugins, fallback, n.knowledge.state, ids, metrics)
	n.loads = loads.New(n.registry, cfg.Health, n.log)
	if n.knowledge.tokens, err = newTokenizer(cfg, f.tokenizers, n.registry); err != nil {
		return err
	}
	watch(prom, n.registry, n.coordinator, n.knowledge.state.Index)
	if cfg.Recording.Path != "" {
		if n.recorder, err = proxy.NewRecorder(cfg.Recording.Path, cfg.Recording.BlockTokens); err != nil {
			return config.Problems{cfg.Problem("recording.path", err.Error())}
		}
	}
	n.server = proxy.New(cfg, f.keys, proxy.Deps{
		Registry: n.registry, Coordinator: n.coordinator, Metrics: metrics, Gatherer: prom,
		Policies: policySet{n.plugins}, Wrap: n.plugins.Wrap, Tracer: n.tracer, Tokens: n.knowledge.tokens, Recorder: n.recorder, Log: n.log, Version: readVersion().Version,
	})
	n.server.SetTRTLLM(f.trtllm)
	n.askLegs()
	if err := n.listenFleet(cfg, f.fleetToken, metrics, part.Fleet); err != nil {
		return failed(err)
	}
	if n.front, err = n.server.Listen(cfg, n.certs, f.token, part.Sockets); err != nil {
		return failed(err)
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

// Reload makes new exchanges use next: engines, policies, limits, keys and
// certificates. Nothing changes when any part of it cannot be used. What needs
// new sockets stays as it is, and that is said.
func (n *Node) Reload(next *config.Config) error {
	f, err := loadFiles(next)
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
		{"admin", old.Admin != next.Admin},
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
	if err := applyPlugins(n.plugins, next); err != nil {
		return err
	}
	n.cfg.Store(next) // the clients of new engines are built by it
	if err := n.registry.Apply(engine.SourceStatic, next.AllEngines(), time.Duration(next.Server.DrainTimeout)); err != nil {
		n.cfg.Store(old)
		return errors.Join(err, applyPlugins(n.plugins, old))
	}
	n.registry.Configure(next.Health, next.Circuit, next.Pairs)
	n.loads.Configure(next.Health)
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
