// Package kvaware is the built-in place policy kv_aware: each leg goes where it
// is estimated to be done first, with the work of what a target holds already
// saved, on one scale of seconds.
package kvaware

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Needs is what the policy asks for beyond the usual facts.
const Needs = abi.NeedBlocks | abi.NeedConversation

// Place is the policy, a pure function of the facts that does not allocate. It
// reads p, which nobody may change meanwhile. An index of -1 where a leg was to
// be placed means that no candidate fits. The scores that it leaves are the
// estimates in seconds, less is better; a row that could take either leg has
// that of the second.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored = true
	if f.Flow == abi.FlowAggregated {
		s := p.Survey(f, abi.RoleBoth)
		row, _ := p.Prefill(f, abi.RoleBoth, &s, p.DecodeMicros)
		return abi.PlaceDecision{Prefill: -1, Decode: row}
	}
	prefill := f.Fixed
	if prefill < 0 {
		s := p.Survey(f, abi.RolePrefill)
		prefill, _ = p.Prefill(f, abi.RolePrefill, &s, 0)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.Decode(f, candidates.Decode(f.Candidates, prefill))}
}
