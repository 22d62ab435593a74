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

// New returns the policy with the given parameters. It is a pure function of the
// facts, does not allocate and is safe for concurrent use. An index of -1 where
// a leg was to be placed means that no candidate fits.
func New(p Params) func(*abi.PlaceFacts) abi.PlaceDecision {
	return p.Place
}

// Place is the policy. It reads p, which nobody may change meanwhile.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored = true
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: p.Prefill(f, candidates.Aggregated(), p.DecodeMicros)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = p.Prefill(f, candidates.Prefill(), 0)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.Decode(f, candidates.Decode(f.Candidates, prefill))}
}

// pool is what the candidates of a leg have in common.
type pool struct {
	micros float64 // prefill of one uncached token where no speed is measured
	best   float64 // the most tokens' worth of prefill that one row saves
	worth  float64 // µs of patience for a saved token
}

// Prefill returns the row that is estimated to have the prompt computed first.
// inFlight is what a token in flight costs, in µs: 0 where only prefill runs.
// The scores of the rows are the estimates in seconds; less is better.
func (p *Params) Prefill(f *abi.PlaceFacts, leg candidates.Leg, inFlight float64) int32 {
	prompt := float64(max(1, f.Request.PromptTokens))
	l := p.survey(f, leg, prompt)
	rows, best, least, order := f.Candidates, int32(-1), 0.0, uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		micros := l.micros
		if c.TokenMicros > 0 {
			micros = float64(c.TokenMicros)
		}
		saved := float64(c.Score)
		tokens := prompt - saved + float64(p.QueueWeight*float64(max(0, c.Queued)))
		cost := float64(tokens*micros) + float64(inFlight*float64(c.Tokens)) + p.pressure(c)
		if saved -= p.SharedTokens; saved > 0 {
			cost -= float64(saved * l.worth)
		}
		c.Score = float32(cost * 1e-6)
		if cost += busy * float64(4-leg.Grade(c)); best >= 0 && cost > least {
			continue
		}
		o := tie(c, f.Random, i)
		if best >= 0 && cost == least && o >= order {
			continue
		}
		best, least, order = int32(i), cost, o
	}
	return best
}

// busy is what each step of a row's grade costs, in µs: more than any estimate.
const busy = 1e15

// survey looks at all rows that suit the leg: it leaves in the score of each how
// many tokens' worth of prefill it saves, and returns what that is measured by.
func (p *Params) survey(f *abi.PlaceFacts, leg candidates.Leg, prompt float64) pool {
	rows := f.Candidates
	var l pool
	queued, requests, micros, measured := 0.0, 0.0, 0.0, 0.0
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		if c.TokenMicros > 0 {
			micros += float64(c.TokenMicros)
			measured++
		}
		if c.Queued > 0 {
			queued += float64(c.Queued)
			requests += float64(max(1, c.Requests))
		}
		saved := p.saved(c, prompt)
		c.Score = float32(saved)
		l.best = max(l.best, saved)
	}
	if l.micros = p.TokenMicros; measured > 0 {
		l.micros = micros / measured
	}
	if l.best <= p.SharedTokens {
		return l
	}
	holders := 0.0
	for i := range rows {
		if c := &rows[i]; leg.Suits(c, i) && float64(c.Score) >= 0.75*l.best {
			holders++
		}
	}
	typical := p.TypicalTokens
	if requests > 0 {
		typical = queued / requests
	}
	patience := p.Patience
	if f.Request.Turn == 1 {
		patience = p.FirstPatience
	}
	l.worth = patience * typical * l.micros / (prompt * max(1, holders))
	return l
}
