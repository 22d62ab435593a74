// Package placetest has engines, policies and a coordinator for tests of package
// coordinator and of packages that use it.
//
// The decisions behind this package are in docs/design/placement.md.
package placetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

var _ coordinator.Decider = (*policies.Native)(nil)

// protocol is a connector for tests. Every engine serves model m. An engine whose name begins
// with "lora" also serves the adapter sql of the model. Two engines can be
// paired if their names end in the same digit, or if neither name ends in a digit.
type protocol struct{ flow abi.Flow }

func (p protocol) Flow() abi.Flow                    { return p.flow }
func (protocol) HealthPath(abi.Role) (string, bool)  { return "/health", false }
func (protocol) FactPaths(abi.Role) []string         { return []string{"/facts"} }
func (protocol) BothPairs() bool                     { return true }
func (protocol) Tokenizes() tokens.Dialect           { return tokens.NoTokenizer }
func (protocol) Loads() []engine.LoadRoute           { return nil }
func (protocol) Compatible(p, d *engine.Facts) error { return differ(p.Version, d.Version) }
func (protocol) ReadFacts(f *engine.Facts, _ string, _ int, body []byte) error {
	version, adapter, _ := strings.Cut(string(body), " ")
	f.Version, f.Models = version, []string{"m"}
	if adapter != "" {
		f.Models = append(f.Models, adapter)
	}
	return nil
}

func differ(a, b string) error {
	if a != b {
		return errors.New("versions differ")
	}
	return nil
}

// answers is a RoundTripper whose body is the digit at the end of the host, and the adapter
// after a space.
type answers struct{}

func (answers) RoundTrip(r *http.Request) (*http.Response, error) {
	host := r.URL.Hostname()
	if strings.HasPrefix(host, "down") {
		return nil, errors.New("connection refused")
	}
	digit := strings.TrimLeft(host[len(host)-1:], "abcdefghijklmnopqrstuvwxyz")
	if strings.HasPrefix(host, "lora") {
		digit += " sql"
	}
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(digit))}, nil
}

// client is an upstream.Client that is never called.
type client struct{}

func (client) Do(context.Context, *upstream.Request) (*upstream.Response, error) {
	return nil, errors.New("not in this test")
}
func (client) EvictIdle(any, time.Duration) {}
func (client) Withdraw()                    {}
func (client) CloseIdle()                   {}
func (client) Stats() upstream.Stats        { return upstream.Stats{} }

// Counts is an Observer.
type Counts struct {
	mu        sync.Mutex
	Fallbacks map[coordinator.Fallback]int
	IDs       map[string]int
}

func (c *Counts) Fallback(what, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Fallbacks[coordinator.Fallback{What: what, Reason: reason}]++
}

func (c *Counts) Minted(policy string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.IDs[policy]++
}

// World is a registry of ready instances and a Local over it.
type World struct {
	*coordinator.Local
	Remote   coordinator.Coordinator // used instead of Local and usually backed by it; nil: Local is used
	Reg      *engine.Registry
	Counts   *Counts
	Known    coordinator.State
	Verdicts []indexcheck.Verdict // of Known.Trust
}

// Stub is a Decider whose nil hooks are absent.
type Stub struct {
	OnPlan  func(*abi.PlanFacts) (abi.PlanAnswer, string, bool)
	OnPlace func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool)
	OnMint  func(*abi.MintFacts) (uint64, string, bool)
	Wants   abi.Needs

	WantedHeaders []string
}

func (s Stub) Plan(_ context.Context, f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	if s.OnPlan == nil {
		return abi.PlanAnswer{}, coordinator.ReasonAbsent, false
	}
	return s.OnPlan(f)
}

func (s Stub) Place(_ context.Context, f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
	if s.OnPlace == nil {
		return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
	}
	return s.OnPlace(f)
}

func (s Stub) Needs() abi.Needs { return s.Wants }

// Headers implements coordinator.Decider.
func (s Stub) Headers() []string { return s.WantedHeaders }

func (s Stub) Mint(_ context.Context, f *abi.MintFacts) (uint64, string, bool) {
	if s.OnMint == nil {
		return 0, coordinator.ReasonAbsent, false
	}
	return s.OnMint(f)
}

func Builtin(t testing.TB, plan, place string) *policies.Native {
	t.Helper()
	n, err := policies.NewNative(policies.Names{Plan: plan, Place: place, Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// NewWorld returns a world of the instances of specs, each "name role connector ranks".
// The connector and the ranks are optional (defaults: two, 1). name=model sets the model.
// All instances are ready, except those whose name begins with "down". The connector
// "two" has two legs, the connector "one" has one.
func NewWorld(t testing.TB, specs ...string) *World {
	t.Helper()
	ready := make(chan struct{}, 2*len(specs))
	w := &World{Counts: &Counts{Fallbacks: map[coordinator.Fallback]int{}, IDs: map[string]int{}}}
	w.Known = coordinator.State{
		Index: kvindex.New(kvindex.Options{}), Conversations: conversation.New(100),
		Trust: indexcheck.New(func(v indexcheck.Verdict) { w.Verdicts = append(w.Verdicts, v) }),
	}
	w.Reg = engine.New(engine.Options{
		Index:   w.Known.Index,
		Health:  config.Health{Interval: config.Duration(time.Hour), Timeout: config.Duration(time.Minute), UnhealthyAfter: 1, HealthyAfter: 1},
		Circuit: config.Circuit{Failures: 3, OpenFor: config.Duration(time.Hour)},
		Protocols: func(name string) (engine.Protocol, bool) {
			if name == "one" {
				return protocol{abi.FlowAggregated}, true
			}
			return protocol{abi.FlowConcurrent}, true
		},
		NewClient: func(config.Engine) (upstream.Client, error) { return client{}, nil },
		NewProbe:  func(config.Engine) (http.RoundTripper, error) { return answers{}, nil },
		OnState: func(_ *engine.Instance, s engine.State) {
			if s == engine.Ready {
				ready <- struct{}{}
			}
		},
	})
	var engines []config.Engine
	up := 0
	for _, s := range specs {
		e := config.Engine{Connector: "two", Ranks: 1}
		_, _ = fmt.Sscan(s, &e.Name, &e.Role, &e.Connector, &e.Ranks) // the later fields are optional
		var host string
		host, e.Model, _ = strings.Cut(e.Name, "=")
		e.URL = "http://" + host
		if !strings.HasPrefix(e.Name, "down") {
			up++
		}
		engines = append(engines, e)
	}
	if err := w.Reg.Apply(engine.SourceStatic, engines, time.Hour); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.Reg.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	for range up {
		<-ready
	}
	mint, err := disaggid.New(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	w.Local = coordinator.NewLocal(w.Reg, Stub{}, Builtin(t, "auto", "least_load"), w.Known, mint, w.Counts)
	return w
}

func (w *World) Target(t testing.TB, name string, rank int) engine.Target {
	t.Helper()
	i := w.Reg.Snapshot().Instance(name)
	if i == nil {
		t.Fatalf("no instance %q", name)
	}
	return engine.Target{Instance: i, Rank: rank}
}

// open opens the circuit of an instance.
func (w *World) BreakCircuit(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		for range 3 {
			w.Target(t, name, 0).Breaker.Failure()
		}
	}
}

// Must places a or fails the test.
func (w *World) Must(t testing.TB, a *coordinator.PlacementRequest) *coordinator.Placement {
	t.Helper()
	p, err := w.Place(context.Background(), a)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// idle fails the test if a lease, an id or load remains.
func (w *World) Idle(t testing.TB) {
	t.Helper()
	w.Arrived()
	for _, i := range w.Reg.Snapshot().Instances {
		for r := range i.Load {
			if i.Load[r].Requests() != 0 || i.Load[r].Tokens() != 0 {
				t.Errorf("%s rank %d still carries %d requests, %d tokens", i.Spec.Name, r, i.Load[r].Requests(), i.Load[r].Tokens())
			}
		}
	}
	if w.Open() != 0 || w.LiveIDs() != 0 {
		t.Errorf("%d leases and %d ids remain", w.Open(), w.LiveIDs())
	}
}

// NewPlacementRequest returns a request with 100 prompt tokens and at most 10 answer tokens.
func NewPlacementRequest() *coordinator.PlacementRequest {
	return &coordinator.PlacementRequest{Model: "m", Request: abi.RequestFacts{PromptTokens: 100, MaxTokens: 10, N: 1}}
}

func Show(fallbacks []coordinator.Fallback) string {
	var s []string
	for _, f := range fallbacks {
		s = append(s, f.What+"/"+f.Reason)
	}
	return strings.Join(s, " ")
}

// Quiet returns a logger that discards all records.
func Quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// Same is the Numbers of a worker that has the coordinator's own instances.
type Same struct{ Reg *engine.Registry }

func (Same) Number(i *engine.Instance) (uint32, bool) { return i.ID, true }
func (s Same) Instance(n uint32) *engine.Instance {
	for _, i := range s.Reg.Snapshot().Instances {
		if i.ID == n {
			return i
		}
	}
	return nil
}

// Pause gives other goroutines time, while a test polls for a condition.
func Pause(t testing.TB) {
	t.Helper()
	select {
	case <-t.Context().Done():
		t.Fatal("waited in vain")
	case <-time.After(time.Millisecond):
	}
}

// Uncounted is a Local whose Adopt takes no load. It is the Fallback of a Client that
// shares its instances with its Server. The Server already counts the load of these
// instances.
type Uncounted struct{ *coordinator.Local }

// Adopt takes over a lease without its targets.
func (u Uncounted) Adopt(lease *coordinator.Lease, a coordinator.Adoption) {
	u.Local.Adopt(lease, coordinator.Adoption{Charge: a.Charge})
}

// Place places by the coordinator that the test is about.
func (w *World) Place(ctx context.Context, a *coordinator.PlacementRequest) (*coordinator.Placement, error) {
	if w.Remote != nil {
		return w.Remote.Place(ctx, a)
	}
	return w.Local.Place(ctx, a)
}

// Arrived returns when the coordinator has received all earlier messages.
func (w *World) Arrived() {
	if w.Remote != nil {
		_, _ = w.Remote.Place(context.Background(), &coordinator.PlacementRequest{Model: "not served"}) // the coordinator answers after it has handled all earlier messages
	}
}
