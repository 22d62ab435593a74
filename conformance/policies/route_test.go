package policies

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// plain is a connector of two legs without requirements for its engines.
type plain struct{}

func (plain) Flow() abi.Flow                                     { return abi.FlowPrefillFirst }
func (plain) HealthPath(abi.Role) (string, bool)                 { return "/health", false }
func (plain) FactPaths(abi.Role) []string                        { return nil }
func (plain) ReadFacts(*engine.Facts, string, int, []byte) error { return nil }
func (plain) BothPairs() bool                                    { return true }
func (plain) Tokenizes() tokens.Dialect                          { return tokens.NoTokenizer }
func (plain) Loads() []engine.LoadRoute                          { return nil }
func (plain) Compatible(_, _ *engine.Facts) error                { return nil }

// healthy answers every probe with success.
type healthy struct{}

func (healthy) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(""))}, nil
}

type deaf struct{}

func (deaf) Observe(time.Duration)   {}
func (deaf) Fail(string)             {}
func (deaf) Fallback(string, string) {}
func (deaf) Minted(string)           {}

// blockTokens and promptBlocks are the size of the prompts.
const blockTokens, promptBlocks = 16, 2048

// prompts is the number of prompts that take turns, so that no two requests in
// flight have the same one.
const prompts = 64

// routing is a coordinator over ranks with KV events.
type routing struct {
	*coordinator.Local
	index    *kvindex.Index
	registry *engine.Registry
}

// newRouting returns a coordinator over models with that many ranks each, half of them of each
// role. The ranks belong to instances of up to 8. The models are m0, m1 ...
func newRouting(b *testing.B, place string, models, ranks int) *routing {
	b.Helper()
	var specs []config.Engine
	each := min(8, ranks/2)
	for n := range models {
		for i := range ranks / each {
			e := config.DefaultEngine()
			e.Name, e.URL, e.Role, e.Connector, e.Model, e.Ranks = fmt.Sprintf("m%de%d", n, i), "http://e", config.RolePrefill, "plain", fmt.Sprint("m", n), each
			e.KVEvents, e.BlockTokens = "tcp://e:5557", blockTokens
			if i >= ranks/each/2 {
				e.Role = config.RoleDecode
			}
			specs = append(specs, e)
		}
	}
	r := &routing{index: kvindex.New(kvindex.Options{})}
	ready := make(chan struct{}, len(specs))
	r.registry = engine.New(engine.Options{
		Index:     r.index,
		Health:    config.Health{Interval: config.Duration(time.Hour), Timeout: config.Duration(time.Minute), UnhealthyAfter: 1, HealthyAfter: 1},
		Circuit:   config.Circuit{Failures: 5, OpenFor: config.Duration(time.Minute)},
		Protocols: func(string) (engine.Protocol, bool) { return plain{}, true },
		NewClient: func(config.Engine) (upstream.Client, error) { return upstream.New(upstream.Options{}), nil },
		NewProbe:  func(config.Engine) (http.RoundTripper, error) { return healthy{}, nil },
		OnState: func(_ *engine.Instance, s engine.State) {
			if s == engine.Ready {
				ready <- struct{}{}
			}
		},
	})
	if err := r.registry.Apply(engine.SourceStatic, specs, 0); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.registry.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-done })
	for range specs {
		<-ready
	}
	for _, i := range r.registry.Snapshot().Instances {
		i.SetBlockTokens(blockTokens) // as after the first event
	}
	set, err := plugins.New(plugins.Deps{
		Builtin: policies.Wasm, Meter: func(string, string) policy.Meter { return deaf{} }, CacheDir: policytest.CacheDir(b.TempDir()), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { set.Close(context.Background()) })
	if err := set.Apply(ctx, plugins.Config{Plan: []string{"auto"}, Place: place, Mint: "snowflake", Retain: "lease", Budget: time.Minute}); err != nil {
		b.Fatal(err)
	}
	ids, err := disaggid.New(0, 0)
	if err != nil {
		b.Fatal(err)
	}
	r.Local = coordinator.NewLocal(r.registry, set, set, coordinator.State{Index: r.index, Conversations: conversation.New(0)}, ids, deaf{})
	noted := make(chan struct{})
	go func() { defer close(noted); r.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-noted })
	return r
}

// BenchmarkRoute measures one whole decision for a prompt of 2,048 blocks of 16
// tokens over 64 ranks: hash the blocks, match them with each rank's, decide in
// WebAssembly, commit and release the placement.
func BenchmarkRoute(b *testing.B) {
	for _, place := range []string{"least_load", "kv_aware", "pair_aware", "conversation"} {
		for held, blocks := range holdings {
			b.Run(place+"/held_by_"+held, func(b *testing.B) { benchRoute(b, place, blocks) })
		}
	}
}

// holdings returns how many blocks of prompt k each of the 64 ranks holds.
var holdings = map[string]func(k, rank int) int{
	// A system prompt, and a conversation that has used three ranks.
	"three": func(k, rank int) int {
		if part := (rank + 64 - k) % 64; part%21 == 0 && part < 63 {
			return (part/21 + 1) * promptBlocks / 3
		}
		return systemBlocks
	},
	// Every other rank, each up to a different block: the maximum.
	"half": func(_, rank int) int { return rank % 2 * rank * promptBlocks / 64 },
}

// systemBlocks is the number of blocks of the system prompt.
const systemBlocks = 64

func benchRoute(b *testing.B, place string, blocks func(k, rank int) int) {
	r := newRouting(b, place, 1, 64)
	seed := kvindex.Seed("m0", "", "")
	prompts := make([][]uint32, prompts)
	var chain []kvindex.Hash
	for k := range prompts {
		prompts[k] = make([]uint32, promptBlocks*blockTokens)
		for i := range prompts[k] {
			if prompts[k][i] = uint32(i * 2654435761); i >= systemBlocks*blockTokens {
				prompts[k][i] += uint32(k)
			}
		}
		chain = kvindex.AppendTokens(chain[:0], seed, prompts[k], blockTokens)
		for n, i := range r.registry.Snapshot().Instances {
			for rank, slot := range i.KV {
				r.index.Store(slot, kvindex.GPU, chain[:blocks(k, n*8+rank)])
			}
		}
	}
	ask := &coordinator.PlacementRequest{Model: "m0"}
	b.ReportAllocs()
	for k := 0; b.Loop(); k++ {
		tokens := prompts[k%len(prompts)]
		var cut coordinator.Cut
		r.Cut(&cut, "m0")
		*ask = coordinator.PlacementRequest{Model: "m0", Request: abi.RequestFacts{PromptTokens: int64(len(tokens)), MaxTokens: 100, N: 1}}
		for _, form := range cut.Forms {
			if !form.Text {
				chain = kvindex.AppendTokens(chain[:0], seed, tokens, form.Block)
				ask.Key.Chains = append(ask.Key.Chains, coordinator.Chain{Form: form, Blocks: chain})
			}
		}
		p, err := r.Place(context.Background(), ask)
		if err != nil {
			b.Fatal(err)
		}
		p.Recycle()
		p.Lease.Release()
	}
}
