package plan

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestPlan(t *testing.T) {
	const agg, two, no = abi.PlanAggregate, abi.PlanDisaggregate, abi.PlanReject
	for _, tt := range []struct {
		name                string
		p, d, b             int32
		unpairable          bool
		auto, always, never abi.PlanDecision
	}{
		{"all", 1, 1, 1, false, two, two, agg},
		{"pair only", 2, 3, 0, false, two, two, agg},
		{"no prefill", 0, 1, 1, false, agg, two, agg},
		{"no decode", 1, 0, 1, false, agg, two, agg},
		{"both only", 0, 0, 4, false, agg, two, agg},
		{"prefill only", 1, 0, 0, false, no, two, agg},
		{"nothing", 0, 0, 0, false, no, two, agg},
		{"unpairable", 1, 1, 1, true, agg, no, agg},
		{"unpairable, no both", 1, 1, 0, true, no, no, agg},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &abi.PlanFacts{
				Request:        abi.RequestFacts{PairBroken: tt.unpairable},
				PrefillTargets: tt.p, DecodeTargets: tt.d, BothTargets: tt.b,
			}
			if got := Auto(f); got != tt.auto {
				t.Errorf("auto = %v, want %v", got, tt.auto)
			}
			if got := Always(f); got != tt.always {
				t.Errorf("always = %v, want %v", got, tt.always)
			}
			if got := Never(f); got != tt.never {
				t.Errorf("never = %v, want %v", got, tt.never)
			}
		})
	}
}
