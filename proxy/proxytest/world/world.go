// Package world is a proxy with fake engines, for the tests of the packages that it consists of: a
// test gives the bytes of each engine and sees the bytes that the client gets. All connections
// are in memory, so that most tests run in a bubble of synctest.
//
// The decisions behind this package are in docs/design/edge.md.
package world

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Setup configures a world. The zero value has one engine that sends no answer.
type Setup struct {
	Engines []*Engine
	Config  func(*config.Config)
	Keys    string               // lines of a keys file; "": no key is required
	Certs   *edge.Certs          // nil: no TLS
	Tracer  *telemetry.Tracer    // nil: no spans
	Options func(*proxy.Options) // nil: the default decisions
	Needs   abi.Needs            // of the policies
	Known   coordinator.State    // nothing, unless a test sets it
	Sockets bool                 // real ones on the loopback instead of pipes
	// Clients changes the client of the named engine; nil: no change.
	Clients func(name string, c upstream.Client) upstream.Client
}

// World is a server with its listeners and with fake engines. All connections are in
// memory, so a world can run in a bubble of synctest.
type World struct {
	*proxy.Server
	T           *testing.T
	Registry    *engine.Registry
	Local       *coordinator.Local
	Decider     *Decider
	Prometheus  *prometheus.Registry
	Policies    *fakePolicies
	Metrics     *telemetry.Metrics
	Memory      *buffer.Budget
	Config      *config.Config  // that is in force
	Keys        *admission.Keys // that are in force
	inner       http.Handler    // of the public endpoints, behind the filters
	Front       *edge.Server
	Public      *proxytest.PipeListener // nil with sockets
	Admin       *proxytest.PipeListener // nil with sockets
	Logged      *logBuffer
	Client      *http.Client       // of the public side, HTTP/1.1
	AdminClient *http.Client       // of the admin side
	End         context.CancelFunc // begins the drain
	Over        chan error         // has the result of the drain at its end
	Stopped     atomic.Bool        // the end of the test does not stop the world

	placeable sync.Map // *engine.Instance: the registry has published it as ready
}

// New starts a world. The end of the test stops the world and asserts that no lease,
// no exchange and no place in a queue is left.
func New(t *testing.T, o Setup) *World {
	t.Helper()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Health.Interval = config.Duration(time.Hour)
	cfg.Server.ExposePlacement = true
	if o.Config != nil {
		o.Config(&cfg)
	}
	w := &World{T: t, Prometheus: prometheus.NewRegistry(), Policies: &fakePolicies{}, Logged: &logBuffer{}, Memory: new(buffer.Budget), Over: make(chan error, 1)}
	log := slog.New(slog.NewTextHandler(w.Logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	byHost := make(map[string]*Engine)
	for _, e := range o.Engines {
		e.t = t
		byHost[e.Host()] = e
	}
	w.Registry = engine.New(engine.Options{
		Index:  o.Known.Index,
		Health: cfg.Health, Circuit: cfg.Circuit, Pairs: cfg.Pairs, Log: log,
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(spec config.Engine) (upstream.Client, error) {
			u, err := url.Parse(spec.URL)
			e := byHost[u.Host]
			switch {
			case e == nil:
				return upstream.New(upstream.Options{URL: u}), err
			case o.Clients != nil:
				return o.Clients(e.Name, upstream.New(upstream.Options{URL: u, Dial: e.dial})), nil
			}
			return upstream.New(upstream.Options{URL: u, Dial: e.dial}), nil
		},
		NewProbe: func(config.Engine) (http.RoundTripper, error) { return Probes(byHost), nil },
		OnState: func(i *engine.Instance, s engine.State) {
			if s == engine.Ready {
				w.placeable.Store(i, true)
			}
		},
		APIKey: func(spec config.Engine) (string, error) { return spec.APIKeyFile, nil },
	})
	for _, e := range o.Engines {
		if !e.Remote {
			cfg.Engines = append(cfg.Engines, e.Spec())
		}
	}
	if err := w.Registry.Apply(engine.SourceStatic, cfg.Instances(), 0); err != nil {
		t.Fatal(err)
	}
	for _, i := range w.Registry.Snapshot().Instances {
		if i.Spec.KVEvents != "" { // as if an event had arrived
			i.SetBlockTokens(i.Spec.BlockTokens)
		}
	}
	ids, err := disaggid.New(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.Metrics = telemetry.New(w.Prometheus)
	w.Decider = &Decider{needs: o.Needs}
	w.Local = coordinator.NewLocal(w.Registry, w.Decider, w.Decider, o.Known, ids, w.Metrics)
	if o.Keys != "" {
		cfg.Server.Auth.KeysFile = "keys"
		if w.Keys, err = admission.ParseKeys([]byte(o.Keys)); err != nil {
			t.Fatal(err)
		}
	}
	options := proxy.Options{
		Registry: w.Registry, Coordinator: w.Local, Metrics: w.Metrics, Memory: w.Memory, Gatherer: w.Prometheus,
		Policies: w.Policies, Tracer: o.Tracer, Log: log, Version: "1.2.3",
	}
	if o.Options != nil {
		o.Options(&options)
	}
	filters := options.Wrap
	options.Wrap = func(h http.Handler) http.Handler {
		if w.inner = h; filters != nil {
			return filters(h)
		}
		return h
	}
	w.Config, w.Server = &cfg, proxy.New(&cfg, w.Keys, options)
	w.open(&cfg, o)
	w.start(&cfg, o.Engines)
	return w
}

// open opens the listeners: pipes, or sockets as in production.
func (w *World) open(cfg *config.Config, o Setup) {
	w.T.Helper()
	given := edge.Sockets{}
	if !o.Sockets {
		w.Public, w.Admin = proxytest.NewPipeListener(), proxytest.NewPipeListener()
		given = edge.Sockets{Public: w.Public, Admin: w.Admin}
	}
	var err error
	if w.Front, err = w.Listen(cfg, o.Certs, admin.Token{Text: AdminToken}, given); err != nil {
		w.T.Fatal(err)
	}
	w.Client = &http.Client{Transport: w.transport(new(http.Protocols), nil)}
	w.AdminClient = &http.Client{Transport: &http.Transport{DialContext: w.dialAdmin, DisableCompression: true}}
}

// transport returns a client's transport to the public address. Without a protocol it
// uses HTTP/1.1.
func (w *World) transport(p *http.Protocols, conf *tls.Config) *http.Transport {
	if *p == (http.Protocols{}) {
		p.SetHTTP1(true)
	}
	return &http.Transport{DialContext: w.DialPublic, Protocols: p, TLSClientConfig: conf, DisableCompression: true}
}

// DialPublic opens a connection to the public address.
func (w *World) DialPublic(ctx context.Context, _, _ string) (net.Conn, error) {
	if w.Public != nil {
		return w.Public.Dial()
	}
	return new(net.Dialer).DialContext(ctx, "tcp", w.Front.Addr().String())
}

func (w *World) dialAdmin(ctx context.Context, _, _ string) (net.Conn, error) {
	if w.Admin != nil {
		return w.Admin.Dial()
	}
	return new(net.Dialer).DialContext(ctx, "tcp", w.Front.AdminAddr().String())
}

func (w *World) start(cfg *config.Config, engines []*Engine) {
	ctx, cancel := context.WithCancel(context.Background())
	probing, stopProbes := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { w.Registry.Run(probing) })
	w.End = cancel
	go func() {
		err := w.Front.Serve(ctx, edge.Limits{
			Drain:     func() time.Duration { return time.Duration(cfg.Server.DrainTimeout) },
			Remaining: func() time.Duration { return time.Duration(cfg.Server.TakeoverTimeout) },
		})
		w.Wait()
		w.Over <- err
	}()
	w.T.Cleanup(func() {
		if err := w.Stop(); err != nil {
			w.T.Errorf("got %v, want a drain without cut exchanges", err)
		}
		stopProbes()
		wg.Wait()
		w.Registry.Close()
		for _, e := range engines {
			e.Wait()
		}
		w.Settled()
		w.queueIsFree()
	})
	// An engine's state changes before the snapshot that contains this state is published.
	for _, i := range w.Registry.Snapshot().Instances {
		for _, ok := w.placeable.Load(i); !ok; _, ok = w.placeable.Load(i) {
			time.Sleep(time.Millisecond)
		}
	}
}

// Stop drains the server. A second call does nothing.
func (w *World) Stop() error {
	if w.Stopped.Swap(true) {
		return nil
	}
	w.Client.CloseIdleConnections()
	w.AdminClient.CloseIdleConnections()
	w.End()
	return <-w.Over
}

// Reload is Server.Reload. cfg and keys keep what is in force.
func (w *World) Reload(cfg *config.Config, keys *admission.Keys) {
	w.Config, w.Keys = cfg, keys
	w.Server.Reload(cfg, keys)
}

// AdminToken is the token of the admin address.
const AdminToken = "operators-only"

// Post sends one request over HTTP/1.1 and reads the whole answer. header has pairs of
// name and value.
func (w *World) Post(path, body string, header ...string) Answer {
	return Ask(context.Background(), w.Client, "POST", "http://proxy"+path, body, header...)
}

// Get sends one request with GET.
func (w *World) Get(path string) Answer {
	return Ask(context.Background(), w.Client, "GET", "http://proxy"+path, "")
}

// Operate sends one request with the token to the admin address.
func (w *World) Operate(method, path, body string, header ...string) Answer {
	header = append([]string{"Authorization", "Bearer " + AdminToken, "Content-Type", "application/json"}, header...)
	return Ask(context.Background(), w.AdminClient, method, "http://127.0.0.1:9090"+path, body, header...)
}

// Streams requests a stream and returns after the first bytes. The client leaves when ctx
// ends.
func (w *World) Streams(ctx context.Context) *http.Response {
	w.T.Helper()
	return Open(w.T, ctx, w.Client, Completions(true))
}
