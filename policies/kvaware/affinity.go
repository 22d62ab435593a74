package kvaware

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Most decisions have neither a LoRA adapter nor labels. So their costs are not in the loops of
// Prefill and Decode, but in a second pass over the scores, which most decisions do not need.

// Affine reports whether the costs of LoRA adapters or of labels apply to a decision.
func (p *Params) Affine(f *abi.PlaceFacts) bool { return f.Adapters || p.labelled(f) }

func (p *Params) labelled(f *abi.PlaceFacts) bool {
	return len(p.LabelMicros.Names) != 0 && len(f.Details) != 0
}

// AffinePrefill adds the cost of the LoRA adapter to the scores that Prefill has stored for a
// prefill leg, and returns what Prefill returns.
func (p *Params) AffinePrefill(f *abi.PlaceFacts) (best int32, second float64) {
	return p.affine(f, candidates.Prefill(), -1, f.Random)
}

// affine adds to the score of each row that suits the leg the costs of the LoRA adapter, and of
// the labels if the leg pairs with the row prefill (-1: none). It returns the cheapest row, -1
// without one, and the cost of the second cheapest in µs.
func (p *Params) affine(f *abi.PlaceFacts, leg candidates.Leg, prefill int32, random uint64) (best int32, second float64) {
	rows, best, least, second := f.Candidates, int32(-1), math.MaxFloat64, math.MaxFloat64
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		cost := float64(float64(c.Score)*1e6) + p.Apart(f, prefill, int32(i))
		c.Score = float32(cost * 1e-6)
		cost += Busy * float64(candidates.BestGrade-leg.Grade(c))
		if cost > second {
			continue
		}
		if cost < least || cost == least && Before(rows, int32(i), best, random) {
			best, least, second = int32(i), cost, least
		} else {
			second = cost
		}
	}
	return best, second
}

// Apart returns the cost of a row for the LoRA adapter of the request, and for the labels whose
// value it does not share with the row prefill (-1: none).
func (p *Params) Apart(f *abi.PlaceFacts, prefill, row int32) (cost float64) {
	if f.Adapters {
		cost = p.adapter(f.Candidates[row].Adapter)
	}
	if prefill < 0 || !p.labelled(f) {
		return cost
	}
	a, b := &f.Details[prefill], &f.Details[row]
	for i, name := range p.LabelMicros.Names {
		if value := a.Value(name); value == 0 || value != b.Value(name) {
			cost += p.LabelMicros.Values[i]
		}
	}
	return cost
}

// adapter returns the cost of a target in the given state. A target whose engine reports no
// adapters counts like one that has a place for the adapter.
func (p *Params) adapter(s abi.AdapterState) float64 {
	switch s {
	case abi.AdapterRunning:
		return 0
	case abi.AdapterWaiting:
		return float64(0.5e6 * p.LoRAWaitSeconds)
	case abi.AdapterFull:
		return float64(1e6 * p.LoRAWaitSeconds)
	}
	return float64(1e6 * p.LoRALoadSeconds)
}
