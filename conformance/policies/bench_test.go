package policies

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
)

// samples is the number of decisions for the percentiles.
const samples = 20_000

// BenchmarkDecision measures the cost of one decision: writing the frame into
// the guest's memory, the call, and reading the answer. ns/op is the mean
// without a clock in the loop; the percentiles include two readings of the
// clock.
func BenchmarkDecision(b *testing.B) {
	builtin, guarded := run(b, policies.Wasm()), runGuarded(b, policies.Wasm())
	for i, name := range policies.PlaceNames() {
		native, _ := policies.Place(name)
		for _, rows := range []int{8, 64, 512} {
			f := busy(rows)
			b.Run(fmt.Sprintf("place/%s/%d/native", name, rows), func(b *testing.B) {
				measure(b, func(n uint64) { f.Sequence, f.Random = n, n*0x9e3779b97f4a7c15; native(f) })
			})
			b.Run(fmt.Sprintf("place/%s/%d/wasm", name, rows), func(b *testing.B) { builtin.measurePlace(b, uint32(i), rows) })
			b.Run(fmt.Sprintf("place/%s/%d/guarded", name, rows), func(b *testing.B) { guarded.measurePlace(b, uint32(i), rows) })
		}
	}
	for _, e := range examples() {
		g, guarded := run(b, e.prebuilt(b)), runGuarded(b, e.prebuilt(b))
		for _, rows := range []int{8, 64, 512} {
			b.Run(fmt.Sprintf("place/example/%d/%s", rows, e.language), func(b *testing.B) { g.measurePlace(b, 0, rows) })
			b.Run(fmt.Sprintf("place/example/%d/%s-guarded", rows, e.language), func(b *testing.B) { guarded.measurePlace(b, 0, rows) })
		}
	}
	plan, mint := &abi.PlanFacts{Request: busy(0).Request, PrefillTargets: 4, DecodeTargets: 4}, &abi.MintFacts{UnixMilli: abi.DisaggEpochMilli}
	auto, _ := policies.Plan("auto")
	snowflake, _ := policies.Mint("snowflake")
	b.Run("plan/auto/native", func(b *testing.B) { measure(b, func(uint64) { auto(plan) }) })
	b.Run("plan/auto/wasm", func(b *testing.B) { measure(b, func(uint64) { builtin.plan(&abi.Header{}, plan) }) })
	b.Run("plan/auto/guarded", func(b *testing.B) { measure(b, func(uint64) { guarded.plan(&abi.Header{}, plan) }) })
	b.Run("mint/snowflake/native", func(b *testing.B) { measure(b, func(uint64) { snowflake(mint) }) })
	b.Run("mint/snowflake/wasm", func(b *testing.B) { measure(b, func(uint64) { builtin.mint(&abi.Header{}, mint) }) })
}

func (g *guest) measurePlace(b *testing.B, policy uint32, rows int) {
	f, h := busy(rows), &abi.Header{Policy: policy, Layout: abi.Layout{Extended: policies.PlaceNames()[policy] == "slo_aware"}}
	measure(b, func(n uint64) {
		f.Sequence, f.Random = n, n*0x9e3779b97f4a7c15
		if d := g.place(h, f); d.Decode < 0 {
			b.Fatalf("decision %+v", d)
		}
	})
}

// measure reports mean, percentiles and allocations of one call of decide.
func measure(b *testing.B, decide func(n uint64)) {
	times := make([]time.Duration, samples)
	for i := range times {
		began := time.Now()
		decide(uint64(i))
		times[i] = time.Since(began)
	}
	slices.Sort(times)
	b.ReportAllocs()
	n := uint64(0)
	for b.Loop() {
		decide(n)
		n++
	}
	b.ReportMetric(float64(times[samples/2]), "p50-ns")
	b.ReportMetric(float64(times[samples*99/100]), "p99-ns")
	b.ReportMetric(float64(times[samples*999/1000]), "p99.9-ns")
}

// busy returns a table of half prefill and half decode targets under load, with
// four ranks per instance. A later turn finds a part of its prompt on some of
// them.
func busy(rows int) *abi.PlaceFacts {
	f := &abi.PlaceFacts{
		Request: abi.RequestFacts{PromptTokens: 10_000, MaxTokens: 200, Turn: 2, N: 1, Stream: true, Model: "meta-llama/Llama-3.1-8B-Instruct"},
		Flow:    abi.FlowPrefillFirst, Fixed: -1,
	}
	for i := range rows {
		role := abi.RolePrefill
		if i >= rows/2 {
			role = abi.RoleDecode
		}
		f.Candidates = append(f.Candidates, abi.Candidate{
			Instance: uint32(1 + i/4), Rank: int32(i % 4), Group: 1, Roles: role,
			Requests: int32(i * 7 % 13), Tokens: int64(i*7%13) * 900, Queued: int64(i*5%11) * 700,
			BlockTokens: 16, BlocksGPU: uint32(4 + max(0, i*11%31-15)*31), Usage: 0.5,
			TokenMicros: 80 + float32(i*3%7), RecentTokens: 90_000 + float32(i*100), RecentRequests: 20, Busy: 0.5,
		})
		wait := float32(i*5%11) * 700_000
		f.Predictions = append(f.Predictions, abi.Prediction{Prefill: 400_000 + wait, PrefillError: 40_000, Wait: wait, Start: 10_000, Token: 12_000})
	}
	return f
}

// TestDecisionsDoNotAllocate: in steady state neither the host nor the guest
// allocates.
func TestDecisionsDoNotAllocate(t *testing.T) {
	g := run(t, policies.Wasm())
	f, plan, mint := busy(64), &abi.PlanFacts{}, &abi.MintFacts{}
	places := len(policies.PlaceNames())
	decide := func() {
		for i := range places {
			g.place(&abi.Header{Policy: uint32(i)}, f)
		}
		g.plan(&abi.Header{}, plan)
		g.mint(&abi.Header{}, mint)
	}
	decide()
	size := g.vm.MemorySize()
	if n := testing.AllocsPerRun(5000, decide); n != 0 && !raceEnabled { // its instrumentation allocates
		t.Errorf("%v allocations in the host", n)
	}
	if grown := g.vm.MemorySize(); grown != size {
		t.Errorf("guest memory changed from %d to %d bytes", size, grown)
	}
	if err := g.vm.Close(context.Background()); err != nil {
		t.Error(err)
	}
}
