package coordinator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

var _ Decider = (*policies.Native)(nil)

// protocol is a connector for tests. Every engine serves model m, and two of
// them pair if their names end in the same digit, or both in none.
type protocol struct{ flow abi.Flow }

func (p protocol) Flow() abi.Flow                    { return p.flow }
func (protocol) HealthPath(abi.Role) (string, bool)  { return "/health", false }
func (protocol) FactPaths(abi.Role) []string         { return []string{"/facts"} }
func (protocol) BothPairs() bool                     { return true }
func (protocol) Compatible(p, d *engine.Facts) error { return differ(p.Version, d.Version) }
func (protocol) ReadFacts(f *engine.Facts, _ string, _ int, body []byte) error {
	f.Version = string(body)
	f.Models = []string{"m"}
	return nil
}

func differ(a, b string) error {
	if a != b {
		return errors.New("versions differ")
	}
	return nil
}

// answers is a RoundTripper whose body is the digit at the end of the host.
type answers struct{}

func (answers) RoundTrip(r *http.Request) (*http.Response, error) {
	host := r.URL.Hostname()
	if strings.HasPrefix(host, "down") {
		return nil, errors.New("connection refused")
	}
	digit := strings.TrimLeft(host[len(host)-1:], "abcdefghijklmnopqrstuvwxyz")
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(digit))}, nil
}

// client is an upstream.Client that is never called.
type client struct{}

func (client) Do(context.Context, *upstream.Request) (*upstream.Response, error) {
	return nil, errors.New("not in this test")
}
func (client) EvictIdle(any, time.Duration) {}
func (client) CloseIdle()                   {}
func (client) Stats() upstream.Stats        { return upstream.Stats{} }

// counts is an Observer.
type counts struct {
	mu        sync.Mutex
	fallbacks map[Fallback]int
	minted    map[string]int
}

func (c *counts) Fallback(what, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fallbacks[Fallback{what, reason}]++
}

func (c *counts) Minted(policy string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.minted[policy]++
}

// world is a registry of ready instances and a Local over it.
type world struct {
	*Local
	client   *Client // nil, but where a test runs over the wire
	server   *Server
	reg      *engine.Registry
	counts   *counts
	known    State
	verdicts []indexcheck.Verdict
}

// stub is a Decider whose nil hooks are absent.
type stub struct {
	plan  func(*abi.PlanFacts) (abi.PlanAnswer, string, bool)
	place func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool)
	mint  func(*abi.MintFacts) (uint64, string, bool)
	needs abi.Needs
}

func (s stub) Plan(_ context.Context, f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	if s.plan == nil {
		return abi.PlanAnswer{}, ReasonAbsent, false
	}
	return s.plan(f)
}

func (s stub) Place(_ context.Context, f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
	if s.place == nil {
		return abi.PlaceDecision{}, ReasonAbsent, false
	}
	return s.place(f)
}

func (s stub) Needs() abi.Needs { return s.needs }

func (s stub) Mint(_ context.Context, f *abi.MintFacts) (uint64, string, bool) {
	if s.mint == nil {
		return 0, ReasonAbsent, false
	}
	return s.mint(f)
}

func builtin(t testing.TB, plan, place string) *policies.Native {
	t.Helper()
	n, err := policies.NewNative(policies.Names{Plan: plan, Place: place, Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// newWorld returns a world of the instances of specs, each "name role
// connector ranks" with the last two optional (two, 1). name=model sets the
// model. All but those whose name begins with "down" are ready. Connector two
// has two legs, one has one.
func newWorld(t testing.TB, specs ...string) *world {
	t.Helper()
	ready := make(chan struct{}, 2*len(specs))
	w := &world{counts: &counts{fallbacks: map[Fallback]int{}, minted: map[string]int{}}}
	w.known = State{
		Index: kvindex.New(kvindex.Options{}), Conversations: conversation.New(100),
		Trust: indexcheck.New(func(v indexcheck.Verdict) { w.verdicts = append(w.verdicts, v) }),
	}
	w.reg = engine.New(engine.Options{
		Index:   w.known.Index,
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
		fmt.Sscan(s, &e.Name, &e.Role, &e.Connector, &e.Ranks)
		var host string
		host, e.Model, _ = strings.Cut(e.Name, "=")
		e.URL = "http://" + host
		if !strings.HasPrefix(e.Name, "down") {
			up++
		}
		engines = append(engines, e)
	}
	if err := w.reg.Apply(engine.SourceStatic, engines, time.Hour); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.reg.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	for range up {
		<-ready
	}
	mint, err := disaggid.New(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	w.Local = NewLocal(w.reg, stub{}, builtin(t, "auto", "least_load"), w.known, mint, w.counts)
	if strings.HasPrefix(t.Name(), overTheWire) {
		w.connect(t)
	}
	return w
}

func (w *world) target(t testing.TB, name string, rank int) engine.Target {
	t.Helper()
	i := w.reg.Snapshot().Instance(name)
	if i == nil {
		t.Fatalf("no instance %q", name)
	}
	return engine.Target{Instance: i, Rank: rank}
}

// open opens the circuit of an instance.
func (w *world) breakCircuit(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		for range 3 {
			w.target(t, name, 0).Breaker.Failure()
		}
	}
}

// must places a or fails the test.
func (w *world) must(t testing.TB, a *Ask) *Placement {
	t.Helper()
	p, err := w.Place(context.Background(), a)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// idle fails the test if anything is still held.
func (w *world) idle(t testing.TB) {
	t.Helper()
	w.arrived()
	for _, i := range w.reg.Snapshot().Instances {
		for r := range i.Load {
			if i.Load[r].Requests() != 0 || i.Load[r].Tokens() != 0 {
				t.Errorf("%s rank %d still carries %d requests, %d tokens", i.Spec.Name, r, i.Load[r].Requests(), i.Load[r].Tokens())
			}
		}
	}
	if w.Open() != 0 || w.LiveIDs() != 0 {
		t.Errorf("%d leases, %d ids are left", w.Open(), w.LiveIDs())
	}
}

// ask is a request of 100 prompt tokens and at most 10 more.
func ask() *Ask {
	return &Ask{Model: "m", Request: abi.RequestFacts{PromptTokens: 100, MaxTokens: 10, N: 1}}
}

func show(fallbacks []Fallback) string {
	var s []string
	for _, f := range fallbacks {
		s = append(s, f.What+"/"+f.Reason)
	}
	return strings.Join(s, " ")
}
