package policies

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// placePolicies are the policies whose cost over the size of a fleet is measured.
var placePolicies = []string{"least_load", "kv_aware", "pair_aware"}

// BenchmarkScaleTargets measures a whole placement over the number of targets of one model.
func BenchmarkScaleTargets(b *testing.B) {
	for _, place := range placePolicies {
		for _, n := range []int{4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 10_000} {
			b.Run(fmt.Sprintf("%s/%d", place, n), func(b *testing.B) { newScaled(b, place, 1, n).measure(b) })
		}
	}
}

// BenchmarkScaleModels measures a whole placement over the number of models, with 64 targets for
// each model.
func BenchmarkScaleModels(b *testing.B) {
	for _, place := range placePolicies {
		for _, n := range []int{1, 2, 4, 8, 16, 32, 64} {
			b.Run(fmt.Sprintf("%s/%d", place, n), func(b *testing.B) { newScaled(b, place, n, 64).measure(b) })
		}
	}
}

// scaled is a coordinator whose index has one prompt for each model. Three targets of the model
// hold a third, two thirds and all of the prompt, and the other targets hold the system prompt.
// So the work does not grow with the cached part of the prompts.
type scaled struct {
	*routing
	requests []coordinator.PlacementRequest // one for each model
	next     int
}

func newScaled(b *testing.B, place string, models, targets int) *scaled {
	b.Helper()
	s := &scaled{routing: newRouting(b, place, models, targets)}
	tokens := make([]uint32, promptBlocks*blockTokens)
	for i := range tokens {
		tokens[i] = uint32(i * 2654435761)
	}
	form := kvindex.Form{Block: blockTokens}
	for n := range models {
		model := fmt.Sprint("m", n)
		chain := kvindex.AppendTokens(nil, kvindex.Seed(model, "", ""), tokens, blockTokens)
		a := coordinator.PlacementRequest{Model: model, Request: abi.RequestFacts{PromptTokens: int64(len(tokens)), MaxTokens: 100, N: 1}}
		a.Key.Chains = []coordinator.Chain{{Form: form, Blocks: chain}}
		s.requests = append(s.requests, a)
		pool, _ := s.registry.Snapshot().Pool(model)
		for i, r := range pool.Ready {
			blocks := systemBlocks
			if third := max(1, targets/3); i%third == 0 && i/third < 3 {
				blocks = (i/third + 1) * promptBlocks / 3
			}
			s.index.Store(r.KV[r.Rank], kvindex.GPU, chain[:blocks])
		}
	}
	return s
}

// place places n requests, for one model after the other.
func (s *scaled) place(b *testing.B, n int) {
	for range n {
		a := s.requests[s.next%len(s.requests)]
		s.next++
		p, err := s.Place(context.Background(), &a)
		if err != nil {
			b.Fatal(err)
		}
		if len(p.Fallbacks) > 0 {
			b.Fatal(p.Fallbacks)
		}
		p.Recycle()
		p.Lease.Release()
	}
}

// measure reports the mean and the p99 of the CPU time of a placement, which runs in one thread.
func (s *scaled) measure(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s.place(b, max(10, len(s.requests)))
	var times []time.Duration
	before := usage.ThreadTime()
	for b.Loop() {
		began := usage.ThreadTime()
		s.place(b, 1)
		times = append(times, usage.ThreadTime()-began)
	}
	b.ReportMetric((usage.ThreadTime()-before).Seconds()*1e6/float64(b.N), "cpu-µs/placement")
	b.ReportMetric(usage.QuantileMicros(times, 0.99), "p99-cpu-µs")
}
