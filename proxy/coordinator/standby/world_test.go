package standby

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// protocol is a connector of two legs. Every engine is healthy and serves model m.
type protocol struct{}

func (protocol) Flow() abi.Flow                      { return abi.FlowConcurrent }
func (protocol) HealthPath(abi.Role) (string, bool)  { return "/health", false }
func (protocol) FactPaths(abi.Role) []string         { return []string{"/facts"} }
func (protocol) BothPairs() bool                     { return true }
func (protocol) Tokenizes() tokens.Dialect           { return tokens.NoTokenizer }
func (protocol) Loads() []engine.LoadRoute           { return nil }
func (protocol) Compatible(_, _ *engine.Facts) error { return nil }
func (protocol) ReadFacts(f *engine.Facts, _ string, _ int, _ []byte) error {
	f.Models = []string{"m"}
	return nil
}

type probe struct{}

func (probe) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(""))}, nil
}

// client is an upstream.Client that the tests never call.
type client struct{}

func (client) Do(context.Context, *upstream.Request) (*upstream.Response, error) {
	return nil, errors.New("not in this test")
}
func (client) EvictIdle(any, time.Duration) {}
func (client) Withdraw()                    {}
func (client) CloseIdle()                   {}
func (client) Stats() upstream.Stats        { return upstream.Stats{} }

type deaf struct{}

func (deaf) Fallback(string, string) {}
func (deaf) Minted(string)           {}

var quiet = slog.New(slog.DiscardHandler)

// host is a process with its engines, its own numbers for them, and its Local.
type host struct {
	*coordinator.Local
	registry *engine.Registry
	table    *conversation.Table
}

// newHost returns a host with the engines in the given order. With another order the engines have
// other numbers.
func newHost(t *testing.T, names ...string) *host {
	t.Helper()
	ready := make(chan struct{}, 2*len(names))
	h := &host{table: conversation.New(100)}
	h.registry = engine.New(engine.Options{
		Health:    config.Health{Interval: config.Duration(time.Hour), Timeout: config.Duration(time.Minute), UnhealthyAfter: 1, HealthyAfter: 1},
		Circuit:   config.Circuit{Failures: 3, OpenFor: config.Duration(time.Hour)},
		Protocols: func(string) (engine.Protocol, bool) { return protocol{}, true },
		NewClient: func(config.Engine) (upstream.Client, error) { return client{}, nil },
		NewProbe:  func(config.Engine) (http.RoundTripper, error) { return probe{}, nil },
		OnState: func(_ *engine.Instance, s engine.State) {
			if s == engine.Ready {
				ready <- struct{}{}
			}
		},
	})
	var engines []config.Engine
	for _, name := range names {
		role := config.RoleDecode
		if strings.HasPrefix(name, "p") {
			role = config.RolePrefill
		}
		engines = append(engines, config.Engine{Name: name, URL: "http://" + name, Role: role, Connector: "x", Ranks: 1})
	}
	if err := h.registry.Apply(engine.SourceStatic, engines, time.Hour); err != nil {
		t.Fatal(err)
	}
	start(t, h.registry.Run)
	for range names {
		<-ready
	}
	native, err := policies.NewNative(policies.Names{Plan: "auto", Place: "conversation", Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	sum := fnv.New32a()
	fmt.Fprint(sum, names)
	ids, err := disaggid.New(int(sum.Sum32()&255), 2)
	if err != nil {
		t.Fatal(err)
	}
	h.Local = coordinator.NewLocal(h.registry, native, native, coordinator.State{Conversations: h.table}, ids, deaf{})
	return h
}

// start calls run in a goroutine. The end of the test, or stop, ends run and waits for
// it.
func start(t *testing.T, run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { run(ctx) })
	stop = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// Name implements Instances.
func (h *host) Name(number uint32) string {
	for _, i := range h.registry.Snapshot().Instances {
		if i.ID == number {
			return i.Spec.Name
		}
	}
	return ""
}

// Number implements Instances.
func (h *host) Number(name string) uint32 {
	if i := h.registry.Snapshot().Instance(name); i != nil {
		return i.ID
	}
	return 0
}

// candidate is a host that runs as a coordinator.
type candidate struct {
	*host
	*Member
	server  *fleet.Server
	address string
	stop    func() // as SIGTERM does
}

// newCandidate runs a coordinator on a listener. succeed is for a coordinator without an
// election.
func newCandidate(t *testing.T, h *host, l *net.UnixListener, e Election, succeed func()) *candidate {
	t.Helper()
	c := &candidate{host: h, address: "unix:" + l.Addr().String()}
	c.server = fleet.NewServer(fleet.ServerOptions{
		Local: h.Local, Log: quiet, Standby: true, Homes: replica.NewSource(h.table, h.Name).Answer,
	})
	c.Member = New(Options{
		Election: e, Server: c.server, Listeners: []Listener{l}, Address: c.address, Copy: replica.NewCopy(h.table), Instances: h,
		Dial: dial, Node: t.Name(), Log: quiet, Succeed: succeed,
	})
	c.stop = start(t, func(ctx context.Context) {
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	return c
}

// dial connects to a Unix socket.
func dial(ctx context.Context, address string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", strings.TrimPrefix(address, "unix:"))
}

func listen(t *testing.T) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// sameSocket returns a listener of the same socket, as a successor gets it.
func sameSocket(t *testing.T, l *net.UnixListener) *net.UnixListener {
	t.Helper()
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	other, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	return other.(*net.UnixListener)
}

// vote is an Election whose result the test sets.
type vote struct {
	mu       sync.Mutex
	standing election.Standing
	changed  chan struct{}
	resigned chan struct{}
}

func newVote() *vote { return &vote{changed: make(chan struct{}), resigned: make(chan struct{})} }

func (v *vote) Standing() (election.Standing, <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.standing, v.changed
}

func (v *vote) set(s election.Standing) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.standing = s
	close(v.changed)
	v.changed = make(chan struct{})
}

func (v *vote) Resign()                 { close(v.resigned) }
func (v *vote) Run(ctx context.Context) { <-ctx.Done() }

// own is the Numbers of a worker. It finds the instances of one coordinator by name.
type own struct {
	here  *host
	there atomic.Pointer[host]
}

func newOwn(here, there *host) *own {
	o := &own{here: here}
	o.there.Store(there)
	return o
}

func (o *own) Number(i *engine.Instance) (uint32, bool) {
	n := o.there.Load().Number(i.Spec.Name)
	return n, n != 0
}

func (o *own) Instance(n uint32) *engine.Instance {
	return o.here.registry.Snapshot().Instance(o.there.Load().Name(n))
}

// eventually waits for a condition. Its time limit is no claim about speed.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// turn returns a request of a conversation.
func turn(id string) *coordinator.PlacementRequest {
	return &coordinator.PlacementRequest{
		Model: "m", Request: abi.RequestFacts{PromptTokens: 100, MaxTokens: 10, N: 1},
		Key: coordinator.Key{Conversation: conversation.Query{ID: id}},
	}
}
