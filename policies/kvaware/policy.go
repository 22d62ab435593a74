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
		return abi.PlaceDecision{Prefill: -1, Decode: p.prefill(f, candidates.Aggregated(), p.DecodeMicros)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = p.prefill(f, candidates.Prefill(), 0)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.decode(f, candidates.Decode(f.Candidates, prefill))}
}

// prefill returns the row that is estimated to have the prompt computed first.
// inFlight is what a token in flight costs, in µs: 0 where only prefill runs.
func (p *Params) prefill(f *abi.PlaceFacts, leg candidates.Leg, inFlight float64) int32 {
	s := p.Survey(f, leg)
	rows, best, least, order, nth := f.Candidates, int32(-1), 0.0, uint64(0), -1
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		nth++
		cost := p.Prefill(c, &s, nth) + float64(inFlight*float64(c.Tokens))
		c.Score = float32(cost * 1e-6)
		if cost += Busy * float64(4-leg.Grade(c)); best >= 0 && cost > least {
			continue
		}
		o := Order(c, f.Random, i)
		if best >= 0 && cost == least && o >= order {
			continue
		}
		best, least, order = int32(i), cost, o
	}
	return best
}

// decode returns the row on which the stream is estimated to fare best.
func (p *Params) decode(f *abi.PlaceFacts, leg candidates.Leg) int32 {
	prompt := float64(max(0, f.Request.PromptTokens))
	rows, best, least, order := f.Candidates, int32(-1), 0.0, uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		cost := p.Decode(c) + float64(p.TransferMicros*Missing(c, prompt))
		c.Score = float32(cost * 1e-6)
		if cost += Busy * float64(4-leg.Grade(c)); best >= 0 && cost > least {
			continue
		}
		o := Order(c, ^f.Random, i)
		if best >= 0 && cost == least && o >= order {
			continue
		}
		best, least, order = int32(i), cost, o
	}
	return best
}
