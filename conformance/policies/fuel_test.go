package policies

import (
	"context"
	"fmt"
	"testing"

	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/abi/host/meter"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/policies"
)

// TestFuel compares the work of the decisions of the built-in module with their numbers. The unit is
// one call of a guest's function or one round of a loop, where a module that is not trusted has the
// checks of its meter.
func TestFuel(t *testing.T) {
	checks, g := startMetered(t, &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }})
	fuel := func(name string, decide func(n uint64)) {
		t.Helper()
		const decisions = 100
		decide(0)
		before := *checks
		for n := range uint64(decisions) {
			decide(n)
		}
		testbed.Cost(t, name+": fuel", float64(*checks-before)/decisions)
	}
	f := busy(64)
	for i, name := range policies.PlaceNames() {
		h := &abi.Header{Policy: uint32(i), Layout: abi.Layout{Extended: name == "slo_aware", Traits: name == "slo_aware"}}
		fuel(fmt.Sprintf("place %s of 64", name), func(n uint64) {
			f.Sequence, f.Random = n, n*0x9e3779b97f4a7c15
			g.place(h, f)
		})
	}
	plan, mint := &abi.PlanFacts{Request: f.Request, PrefillTargets: 4, DecodeTargets: 4}, &abi.MintFacts{UnixMilli: abi.DisaggEpochMilli}
	fuel("plan auto", func(uint64) { g.plan(&abi.Header{}, plan) })
	ended := &abi.RetainFacts{ToolCall: true, MostMillis: 450_000, Tokens: 2048, Usage: 0.5, All: abi.Gaps{Turns: 64, Back: 0.5, P50: 500, P75: 1000, P90: 4000, P95: 8000, P99: 64000}}
	fuel("retain likely", func(uint64) { g.retain(&abi.Header{}, ended) })
	running := &abi.EvictFacts{Priority: 1, Running: make([]abi.Evictable, abi.MaxEvictable)}
	fuel("evict lowest_youngest", func(uint64) { g.evict(&abi.Header{}, running) })
	fuel("mint snowflake", func(uint64) { g.mint(&abi.Header{}, mint) })
}

// startMetered starts the built-in module in a world, with a counter of its checks.
func startMetered(t *testing.T, w *world) (*checkCounter, *guest) {
	checks := new(checkCounter)
	ctx := experimental.WithFunctionListenerFactory(context.Background(), checks)
	return checks, startIn(t, ctx, policies.Wasm(), w, host.LoadOptions{Guarded: true})
}

// checkCounter counts the checks of a meter. It changes the result of each call of meter.Pause, the
// budget up to the next call, to 0, so that each check calls meter.Pause.
type checkCounter int

// NewFunctionListener implements experimental.FunctionListenerFactory.
func (c *checkCounter) NewFunctionListener(f api.FunctionDefinition) experimental.FunctionListener {
	if f.ModuleName() == meter.ImportModule && f.Name() == meter.Pause {
		return c
	}
	return nil
}

// Before implements experimental.FunctionListener.
func (*checkCounter) Before(context.Context, api.Module, api.FunctionDefinition, []uint64, experimental.StackIterator) {
}

// After implements experimental.FunctionListener.
func (c *checkCounter) After(_ context.Context, _ api.Module, _ api.FunctionDefinition, results []uint64) {
	*c++
	results[0] = 0
}

// Abort implements experimental.FunctionListener.
func (*checkCounter) Abort(context.Context, api.Module, api.FunctionDefinition, error) {}
