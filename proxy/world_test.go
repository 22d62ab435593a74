package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// setup configures a world. The zero value has one engine that sends no answer.
type setup struct {
	engines []*fakeEngine
	config  func(*config.Config)
	keys    string            // lines of a keys file; "": no key is required
	certs   *edge.Certs       // nil: no TLS
	tracer  *telemetry.Tracer // nil: no spans
	options func(*Options)    // nil: the default decisions
	needs   abi.Needs         // of the policies
	known   coordinator.State // nothing, unless a test sets it
	sockets bool              // real ones on the loopback instead of pipes
	// clients changes the client of the named engine; nil: no change.
	clients func(name string, c upstream.Client) upstream.Client
}

// world is a server with its listeners and with fake engines. All connections are in
// memory, so a world can run in a bubble of synctest.
type world struct {
	*Server
	t        *testing.T
	registry *engine.Registry
	local    *coordinator.Local
	decider  *nativeDecider
	prom     *prometheus.Registry
	policies *fakePolicies
	front    *edge.Server
	public   *proxytest.PipeListener // nil with sockets
	admin    *proxytest.PipeListener // nil with sockets
	logged   *logBuffer
	client   *http.Client // of the public side, HTTP/1.1
	ops      *http.Client // of the admin side
	end      context.CancelFunc
	ended    chan error
	stopped  atomic.Bool

	placeable sync.Map // *engine.Instance: the registry has published it as ready
}

// newWorld starts a world. The end of the test stops the world and asserts that no lease,
// no exchange and no place in a queue is left.
func newWorld(t *testing.T, o setup) *world {
	t.Helper()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Health.Interval = config.Duration(time.Hour)
	cfg.Server.ExposePlacement = true
	if o.config != nil {
		o.config(&cfg)
	}
	w := &world{t: t, prom: prometheus.NewRegistry(), policies: &fakePolicies{}, logged: &logBuffer{}, ended: make(chan error, 1)}
	log := slog.New(slog.NewTextHandler(w.logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	byHost := make(map[string]*fakeEngine)
	for _, e := range o.engines {
		e.t = t
		byHost[e.host()] = e
	}
	w.registry = engine.New(engine.Options{
		Index:  o.known.Index,
		Health: cfg.Health, Circuit: cfg.Circuit, Pairs: cfg.Pairs, Log: log,
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(spec config.Engine) (upstream.Client, error) {
			u, err := url.Parse(spec.URL)
			e := byHost[u.Host]
			switch {
			case e == nil:
				return upstream.New(upstream.Options{URL: u}), err
			case o.clients != nil:
				return o.clients(e.name, upstream.New(upstream.Options{URL: u, Dial: e.dial})), nil
			}
			return upstream.New(upstream.Options{URL: u, Dial: e.dial}), nil
		},
		NewProbe: func(config.Engine) (http.RoundTripper, error) { return probes(byHost), nil },
		OnState: func(i *engine.Instance, s engine.State) {
			if s == engine.Ready {
				w.placeable.Store(i, true)
			}
		},
		APIKey: func(spec config.Engine) (string, error) { return spec.APIKeyFile, nil },
	})
	for _, e := range o.engines {
		if !e.remote {
			cfg.Engines = append(cfg.Engines, e.spec())
		}
	}
	if err := w.registry.Apply(engine.SourceStatic, cfg.Instances(), 0); err != nil {
		t.Fatal(err)
	}
	for _, i := range w.registry.Snapshot().Instances {
		if i.Spec.KVEvents != "" { // as if an event had arrived
			i.SetBlockTokens(i.Spec.BlockTokens)
		}
	}
	ids, err := disaggid.New(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	metrics := telemetry.New(w.prom)
	w.decider = &nativeDecider{needs: o.needs}
	w.local = coordinator.NewLocal(w.registry, w.decider, w.decider, o.known, ids, metrics)
	var keys *admission.Keys
	if o.keys != "" {
		cfg.Server.Auth.KeysFile = "keys"
		if keys, err = admission.ParseKeys([]byte(o.keys)); err != nil {
			t.Fatal(err)
		}
	}
	options := Options{
		Registry: w.registry, Coordinator: w.local, Metrics: metrics, Gatherer: w.prom,
		Policies: w.policies, Tracer: o.tracer, Log: log, Version: "1.2.3",
	}
	if o.options != nil {
		o.options(&options)
	}
	w.Server = New(&cfg, keys, options)
	w.open(&cfg, o)
	w.start(&cfg, o.engines)
	return w
}

// open opens the listeners: pipes, or sockets as in production.
func (w *world) open(cfg *config.Config, o setup) {
	w.t.Helper()
	given := edge.Sockets{}
	if !o.sockets {
		w.public, w.admin = proxytest.NewPipeListener(), proxytest.NewPipeListener()
		given = edge.Sockets{Public: w.public, Admin: w.admin}
	}
	var err error
	if w.front, err = w.Listen(cfg, o.certs, admin.Token{Text: adminToken}, given); err != nil {
		w.t.Fatal(err)
	}
	w.client = &http.Client{Transport: w.transport(new(http.Protocols), nil)}
	w.ops = &http.Client{Transport: &http.Transport{DialContext: w.dialAdmin, DisableCompression: true}}
}

// transport returns a client's transport to the public address. Without a protocol it
// uses HTTP/1.1.
func (w *world) transport(p *http.Protocols, conf *tls.Config) *http.Transport {
	if *p == (http.Protocols{}) {
		p.SetHTTP1(true)
	}
	return &http.Transport{DialContext: w.dialPublic, Protocols: p, TLSClientConfig: conf, DisableCompression: true}
}

func (w *world) dialPublic(ctx context.Context, _, _ string) (net.Conn, error) {
	if w.public != nil {
		return w.public.Dial()
	}
	return new(net.Dialer).DialContext(ctx, "tcp", w.front.Addr().String())
}

func (w *world) dialAdmin(ctx context.Context, _, _ string) (net.Conn, error) {
	if w.admin != nil {
		return w.admin.Dial()
	}
	return new(net.Dialer).DialContext(ctx, "tcp", w.front.AdminAddr().String())
}

func (w *world) start(cfg *config.Config, engines []*fakeEngine) {
	ctx, cancel := context.WithCancel(context.Background())
	probing, stopProbes := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { w.registry.Run(probing) })
	w.end = cancel
	go func() {
		err := w.front.Serve(ctx, edge.Limits{
			Drain:     func() time.Duration { return time.Duration(cfg.Server.DrainTimeout) },
			Remaining: func() time.Duration { return time.Duration(cfg.Server.TakeoverTimeout) },
		})
		w.Wait()
		w.ended <- err
	}()
	w.t.Cleanup(func() {
		if err := w.stop(); err != nil {
			w.t.Errorf("got %v, want a drain without cut exchanges", err)
		}
		stopProbes()
		wg.Wait()
		w.registry.Close()
		for _, e := range engines {
			e.wg.Wait()
		}
		w.settled()
	})
	// An engine's state changes before the snapshot that contains this state is published.
	for _, i := range w.registry.Snapshot().Instances {
		for _, ok := w.placeable.Load(i); !ok; _, ok = w.placeable.Load(i) {
			time.Sleep(time.Millisecond)
		}
	}
}

// stop drains the server. A second call does nothing.
func (w *world) stop() error {
	if w.stopped.Swap(true) {
		return nil
	}
	w.client.CloseIdleConnections()
	w.ops.CloseIdleConnections()
	w.end()
	return <-w.ended
}

// settled asserts that no exchange has left anything.
func (w *world) settled() {
	w.t.Helper()
	if n := w.local.Open(); n != 0 {
		w.t.Errorf("got %d open leases", n)
	}
	if n := w.books.Running.Len(); n != 0 {
		w.t.Errorf("got %d live exchanges", n)
	}
	if n := w.bodies.Reading(); n != 0 {
		w.t.Errorf("got %d bodies in progress", n)
	}
	if n := w.memory.Used(); n != 0 {
		w.t.Errorf("got %d bytes of requests and answers", n)
	}
	for _, client := range []string{"pipe", "127.0.0.1"} { // as the only request in total, and of its client
		cfg := config.Default()
		class, _ := cfg.PriorityClass("")
		place, err := w.queue.Enter(context.Background(), admission.Claim{Client: client, Class: class}, config.Limits{MaxExchanges: 1, PerClient: 1})
		if err != nil {
			w.t.Errorf("a request did not free its place in the queue: %v", err)
			continue
		}
		place.Leave(0)
	}
}

// completions is a minimal request.
func completions(stream bool) string {
	return fmt.Sprintf(`{"model":"m","prompt":"hi","max_tokens":5,"stream":%t}`, stream)
}

const completionsPath = "/v1/completions"

// answer is the answer that a client received.
type answer struct {
	status int
	header http.Header
	body   string
	err    error // the body is incomplete, or there is no answer
}

// post sends one request over HTTP/1.1 and reads the whole answer. header has pairs of
// name and value.
func (w *world) post(path, body string, header ...string) answer {
	return ask(context.Background(), w.client, "POST", "http://proxy"+path, body, header...)
}

// streams requests a stream and returns after the first bytes. The client leaves when ctx
// ends.
func (w *world) streams(ctx context.Context) *http.Response {
	w.t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://proxy"+completionsPath, strings.NewReader(completions(true)))
	if err != nil {
		w.t.Fatal(err)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp
}

func (w *world) get(path string) answer {
	return ask(context.Background(), w.client, "GET", "http://proxy"+path, "")
}

// adminToken is the token of the admin address.
const adminToken = "operators-only"

// operate sends one request with the token to the admin address.
func (w *world) operate(method, path, body string, header ...string) answer {
	header = append([]string{"Authorization", "Bearer " + adminToken, "Content-Type", "application/json"}, header...)
	return ask(context.Background(), w.ops, method, "http://127.0.0.1:9090"+path, body, header...)
}

func ask(ctx context.Context, c *http.Client, method, url, body string, header ...string) answer {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(data), err}
}

// metric sums the series of a counter or gauge, or the counts of a histogram,
// whose label values contain all of those given.
func (w *world) metric(name string, labels ...string) float64 {
	w.t.Helper()
	families, err := w.prom.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	var sum float64
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			values := make(map[string]bool)
			for _, l := range m.GetLabel() {
				values[l.GetValue()] = true
			}
			all := true
			for _, l := range labels {
				all = all && values[l]
			}
			if all {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// explained returns the explanation of the only ended exchange.
func (w *world) explained() journal.Explanation {
	w.t.Helper()
	rows := w.books.Ended.PerfRows()
	if len(rows) != 1 {
		w.t.Fatalf("got %d ended exchanges, want 1", len(rows))
	}
	e, _ := w.books.Ended.Get(rows[0].RequestID)
	return e
}

// outcome asserts the outcome of the only ended exchange.
func (w *world) outcome(want telemetry.Outcome) {
	w.t.Helper()
	if e := w.explained(); e.Outcome != want.String() {
		w.t.Errorf("got outcome %q, want %q", e.Outcome, want)
	}
	if n := w.metric("pdproxy_exchanges_total", want.String()); n != 1 {
		w.t.Errorf("got %v exchanges counted as %s, want 1", n, want)
	}
}

// nativeDecider plans two legs if possible, and leaves the placement to the native rule.
type nativeDecider struct {
	ids   atomic.Uint64
	needs abi.Needs
	asked atomic.Value                                          // abi.RequestFacts of the last plan
	hold  func(*abi.PlanFacts) (hold bool, limit time.Duration) // nil: no request is held
}

func (d *nativeDecider) Plan(_ context.Context, f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	d.asked.Store(f.Request)
	if d.hold != nil {
		if hold, limit := d.hold(f); hold {
			return abi.PlanAnswer{Decision: abi.PlanHold, LimitMillis: uint32(limit.Milliseconds())}, "pairs", true
		}
	}
	switch {
	case f.PrefillTargets > 0:
		return abi.PlanAnswer{Decision: abi.PlanDisaggregate}, "pairs", true
	case f.BothTargets > 0:
		return abi.PlanAnswer{Decision: abi.PlanAggregate}, "pairs", true
	}
	return abi.PlanAnswer{Decision: abi.PlanReject}, "pairs", true
}

func (*nativeDecider) Place(context.Context, *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
	return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
}

func (d *nativeDecider) Needs() abi.Needs { return d.needs }

func (*nativeDecider) Headers() []string { return []string{"x-tier", "x-region"} }

func (d *nativeDecider) Mint(context.Context, *abi.MintFacts) (uint64, string, bool) {
	return abi.MinDisaggID + d.ids.Add(1), "counter", true
}

// fakePolicies is the list of policies for the admin address.
type fakePolicies struct{ reloaded []string }

func (p *fakePolicies) List() []admin.PolicyRow {
	return []admin.PolicyRow{{Name: "auto", Phase: "plan", Runtime: "native", State: "active", Calls: 3, MeanUS: 0.5, P99US: 2}}
}

func (p *fakePolicies) Reload(name string) error {
	if name != "auto" {
		return fmt.Errorf("reload %q: %w", name, admin.ErrUnknownPolicy)
	}
	p.reloaded = append(p.reloaded, name)
	return nil
}

// logBuffer holds the log of the server.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// fakeEngine is an engine whose answers are bytes of the test. Each write waits until the
// proxy has read it, so each write is one read.
type fakeEngine struct {
	name      string        // "": "e"
	at        string        // host and port; "": NAME.test:80
	role      string        // "": both
	connector string        // "": none
	key       string        // Authorization that the proxy should send
	models    string        // models of GET /v1/models; "": m
	cards     string        // further members of the first model of GET /v1/models
	ranks     int           // 0: 1
	refuse    bool          // the engine accepts no connection
	remote    bool          // a [[remote]] of the configuration has the address of the engine
	dialing   error         // error of a dial for a leg; nil: the dial succeeds
	blocks    int           // tokens of a KV block in its events; 0: it has no events
	priority  string        // order of priorities in the engine; "": none
	kvHosts   string        // other hosts of the engine; "": the proxy trusts the host in its answers
	kvLease   time.Duration // kv_lease_duration
	labels    config.Labels // "": none

	bidirectional bool
	serve         func(c *engineConn, nth int)

	t     *testing.T
	mu    sync.Mutex
	wg    sync.WaitGroup
	legs  []seenLeg     // guarded by mu
	still chan struct{} // guarded by mu; closed when the engine resumes; nil: the engine is not stopped
	ended bool          // guarded by mu; the process has ended
}

// end makes the host of the engine refuse connections.
func (e *fakeEngine) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
}

// begin makes the engine serve again after end.
func (e *fakeEngine) begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = false
}

// stop makes the engine answer nothing, until the caller calls the returned function.
func (e *fakeEngine) stop() (proceed func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	still := make(chan struct{})
	e.still = still
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.still = nil
		close(still)
	}
}

// stopped returns a channel that is closed while the engine is not stopped.
func (e *fakeEngine) stopped() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.still != nil {
		return e.still
	}
	runs := make(chan struct{})
	close(runs)
	return runs
}

// seenLeg is one request that an engine received.
type seenLeg struct {
	method string
	path   string
	query  string
	header http.Header
	body   string
}

func (e *fakeEngine) host() string { return or(e.at, or(e.name, "e")+".test:80") }

func (e *fakeEngine) spec() config.Engine {
	s := config.DefaultEngine()
	s.Name, s.Role, s.Connector, s.APIKeyFile = or(e.name, "e"), or(e.role, "both"), or(e.connector, "none"), e.key
	s.URL, s.Ranks, s.Bidirectional = "http://"+e.host(), max(e.ranks, 1), e.bidirectional
	s.Priority, s.Labels = e.priority, e.labels
	s.KVHosts, s.KVLeaseDuration = e.kvHosts, config.Duration(e.kvLease)
	if s.MoRIIO() {
		s.KVAddress = "host:10.0.0.5,handshake:6301,notify:61005"
	}
	if s.Pushes() {
		s.EngineID, s.SideChannel = "push", "10.0.0.5:5600"
	}
	if s.BlockTokens = e.blocks; e.blocks > 0 {
		s.KVEvents = "tcp://" + e.host()
	}
	return s
}

func or(s, instead string) string {
	if s == "" {
		return instead
	}
	return s
}

func (e *fakeEngine) dial(context.Context, string, string) (net.Conn, error) {
	e.mu.Lock()
	ended := e.ended
	e.mu.Unlock()
	switch {
	case ended:
		return nil, syscall.ECONNREFUSED
	case e.refuse:
		return nil, errors.New("connection refused")
	}
	if e.dialing != nil {
		return nil, e.dialing
	}
	client, server := net.Pipe()
	e.wg.Go(func() {
		defer server.Close()
		c := &engineConn{Conn: server, br: bufio.NewReader(server), e: e}
		for c.next() && e.serve != nil {
			e.mu.Lock()
			nth := len(e.legs)
			e.mu.Unlock()
			if e.serve(c, nth); c.over {
				return
			}
		}
	})
	return client, nil
}

// seen returns the received requests.
func (e *fakeEngine) seen() []seenLeg {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]seenLeg(nil), e.legs...)
}

// engineConn is the engine's end of one connection.
type engineConn struct {
	net.Conn
	br   *bufio.Reader
	e    *fakeEngine
	leg  seenLeg
	over bool // the engine closes the connection
}

// next reads one whole request. It returns false if the proxy has closed the connection.
func (c *engineConn) next() bool {
	r, err := http.ReadRequest(c.br)
	if err != nil {
		return false
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return false
	}
	c.leg = seenLeg{r.Method, r.URL.Path, r.URL.RawQuery, r.Header, string(body)}
	c.e.mu.Lock()
	c.e.legs = append(c.e.legs, c.leg)
	c.e.mu.Unlock()
	return true
}

// send writes pieces. Each piece is one read of the proxy.
func (c *engineConn) send(pieces ...string) {
	for _, p := range pieces {
		if p != "" { // a write of 0 bytes to a pipe would wait for a reader
			io.WriteString(c, p)
		}
	}
}

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

// chunks writes each piece as one chunk and one read.
func (c *engineConn) chunks(pieces ...string) {
	for _, p := range pieces {
		c.send(fmt.Sprintf("%x\r\n%s\r\n", len(p), p))
	}
}

// stream sends a whole stream.
func (c *engineConn) stream(pieces ...string) {
	c.send(streamHead)
	c.chunks(pieces...)
	c.send("0\r\n\r\n")
}

// json sends a JSON answer.
func (c *engineConn) json(status int, body string) {
	c.send(fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, http.StatusText(status), len(body), body))
}

// hangUp closes the connection.
func (c *engineConn) hangUp() { c.over = true }

// hold sends nothing until the proxy closes the connection.
func (c *engineConn) hold() {
	io.Copy(io.Discard, c)
	c.over = true
}

// probes answers the probes of all engines.
type probes map[string]*fakeEngine

func (p probes) RoundTrip(r *http.Request) (*http.Response, error) {
	e := p[r.URL.Hostname()+":80"] // for any port: a bootstrap server belongs to the same engine
	if e == nil {
		return nil, errors.New("connection refused")
	}
	e.mu.Lock()
	ended := e.ended
	e.mu.Unlock()
	if ended {
		return nil, syscall.ECONNREFUSED
	}
	select {
	case <-e.stopped():
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	resp := &http.Response{StatusCode: 404, Header: http.Header{}, Body: http.NoBody, Request: r}
	switch r.URL.Path {
	case "/health":
		resp.StatusCode = 200
	case "/v1/models":
		resp.StatusCode = 200
		var list []string
		for m := range strings.SplitSeq(or(e.models, "m"), ",") {
			list = append(list, fmt.Sprintf(`{"id":%q}`, m))
		}
		if e.cards != "" {
			list[0] = strings.Replace(list[0], "}", ","+e.cards+"}", 1)
		}
		resp.Body = io.NopCloser(strings.NewReader(`{"data":[` + strings.Join(list, ",") + `]}`))
	}
	return resp, nil
}
