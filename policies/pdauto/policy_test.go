package pdauto

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestPlan(t *testing.T) {
	const one, two, no = abi.PlanAggregate, abi.PlanDisaggregate, abi.PlanReject
	for _, tt := range []struct {
		name   string
		prompt int64
		change func(f *abi.PlanFacts, p *Params)
		want   abi.PlanDecision
	}{
		// 175 µs a token against 105 µs and 20 ms: the costs are equal at 286
		// tokens.
		{"short", 200, nil, one},
		{"long", 400, nil, two},
		{"long, but cached", 8000, func(f *abi.PlanFacts, _ *Params) { f.BothCached, f.PrefillCached = 7900, 7900 }, one},
		{"cached at prefill only", 8000, func(f *abi.PlanFacts, _ *Params) { f.PrefillCached = 7900 }, two},
		{"more cached than there is", 100, func(f *abi.PlanFacts, _ *Params) { f.BothCached, f.PrefillCached = 512, 512 }, one},
		{"prefill is busy", 8000, func(f *abi.PlanFacts, _ *Params) { f.PrefillQueued = 50_000 }, one},
		{"both are busy", 200, func(f *abi.PlanFacts, _ *Params) { f.BothQueued = 5000 }, two},
		{"a handover was measured", 400, func(f *abi.PlanFacts, _ *Params) { f.HandoverMicros = 300_000 }, one},
		{"a fast transfer was measured", 270, func(f *abi.PlanFacts, _ *Params) { f.TransferMicros = 0.1 }, two},
		{"prefill was measured to be slow", 8000, func(f *abi.PlanFacts, _ *Params) { f.PrefillMicros, f.BothMicros = 1000, 150 }, one},
		{"prefill was measured to be slow, and so the other is likely", 8000, func(f *abi.PlanFacts, _ *Params) { f.PrefillMicros = 1000 }, two},
		{"one leg was measured to be fast", 8000, func(f *abi.PlanFacts, _ *Params) { f.BothMicros, f.PrefillMicros = 10, 100 }, one},
		{"one leg was measured to be slow, and so the other is likely", 400, func(f *abi.PlanFacts, _ *Params) { f.BothMicros = 1500 }, two},
		{"a margin", 200, func(_ *abi.PlanFacts, p *Params) { p.Margin = 0.5 }, two},
		{"conditional, the rest is short", 800, func(f *abi.PlanFacts, p *Params) { p.LocalTokens, f.BothCached = 100, 700 }, one},
		{"conditional, the rest is one longer", 801, func(f *abi.PlanFacts, p *Params) { p.LocalTokens, f.BothCached = 100, 700 }, two},
		{"conditional, nothing is cached", 10, func(_ *abi.PlanFacts, p *Params) { p.LocalTokens = 100 }, two},
		{"conditional, all is cached", 500, func(f *abi.PlanFacts, p *Params) { p.LocalTokens, f.BothCached = 0, 512 }, one},
		{"conditional, and busy", 800, func(f *abi.PlanFacts, p *Params) { p.LocalTokens, f.BothCached, f.BothQueued = 100, 700, 1e6 }, one},
		{"conditional, one leg only", 8000, func(f *abi.PlanFacts, p *Params) { p.LocalTokens, f.PrefillTargets = 100, 0 }, one},
		{"one leg only", 8000, func(f *abi.PlanFacts, _ *Params) { f.PrefillTargets = 0 }, one},
		{"two legs only", 10, func(f *abi.PlanFacts, _ *Params) { f.BothTargets = 0 }, two},
		{"the form cannot be paired", 8000, func(f *abi.PlanFacts, _ *Params) { f.Request.PairBroken = true }, one},
		{"nothing", 10, func(f *abi.PlanFacts, _ *Params) { f.PrefillTargets, f.BothTargets = 0, 0 }, no},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &abi.PlanFacts{Request: abi.RequestFacts{PromptTokens: tt.prompt}, PrefillTargets: 2, DecodeTargets: 2, BothTargets: 2}
			p := Defaults()
			if tt.change != nil {
				tt.change(f, &p)
			}
			if got := p.Plan(f); got != tt.want {
				t.Errorf("p.Plan(f) = %v, want %v", got, tt.want)
			}
		})
	}
}
