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
		s := p.Survey(f, candidates.Aggregated())
		return abi.PlaceDecision{Prefill: -1, Decode: p.Prefill(f, candidates.Aggregated(), &s, p.DecodeMicros)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		s := p.Survey(f, candidates.Prefill())
		prefill = p.Prefill(f, candidates.Prefill(), &s, 0)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.decode(f, candidates.Decode(f.Candidates, prefill))}
}

// decode returns the row on which the stream is estimated to fare best.
func (p *Params) decode(f *abi.PlaceFacts, leg candidates.Leg) int32 {
	prompt, pressure := float64(max(0, f.Request.PromptTokens)), p.pressure()
	rows, best, least, order := f.Candidates, int32(-1), 0.0, uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		cost := float64(p.DecodeMicros*float64(c.Tokens)) + float64(p.TransferMicros*(prompt-min(prompt, float64(c.Matched()))))
		if over := float64(c.Usage) - p.PressureFrom; over > 0 {
			cost += float64(over * pressure)
		}
		c.Score = float32(cost * 1e-6)
		if g := leg.Grade(c); g != candidates.BestGrade {
			cost += Busy * float64(candidates.BestGrade-g)
		}
		if best >= 0 && cost >= least {
			if cost > least || Order(c, ^f.Random, i) >= order {
				continue
			}
		}
		best, least, order = int32(i), cost, Order(c, ^f.Random, i)
	}
	return best
}
