// Package kvaware is the built-in place policy kv_aware: each leg goes to the
// target that is estimated to finish it first. The estimate, in seconds,
// subtracts the work that the target's cached blocks save.
package kvaware

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Needs are the additional facts that the policy needs with any parameters.
const Needs = abi.NeedBlocks | abi.NeedConversation

// Place is the policy, a pure function of the facts that does not allocate. It
// reads p, which must not change during the call. An index of -1 for a leg
// means that no candidate fits. It stores its estimates in seconds in the
// scores; less is better. A row that could take either leg has the estimate of
// the second leg.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored, f.Scale = true, abi.LowWins|abi.UnitSeconds
	if f.Flow == abi.FlowAggregated {
		s := p.Survey(f, abi.RoleBoth)
		row, _ := p.Prefill(f, abi.RoleBoth, &s, p.DecodeMicros)
		if f.Adapters {
			row, _ = p.affine(f, candidates.Aggregated(), -1, f.Random)
		}
		return abi.PlaceDecision{Prefill: -1, Decode: row}
	}
	prefill := f.Fixed
	if prefill < 0 {
		s := p.Survey(f, abi.RolePrefill)
		prefill, _ = p.Prefill(f, abi.RolePrefill, &s, 0)
		if f.Adapters {
			prefill, _ = p.AffinePrefill(f)
		}
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.DecodeOf(f, prefill)}
}

// DecodeOf chooses the decode row for a prefill row; -1 means that no candidate fits.
func (p *Params) DecodeOf(f *abi.PlaceFacts, prefill int32) int32 {
	leg := candidates.Decode(f.Candidates, prefill)
	decode := p.decode(f, leg)
	if p.Affine(f) {
		decode, _ = p.affine(f, leg, prefill, ^f.Random)
	}
	return decode
}
