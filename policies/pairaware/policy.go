// Package pairaware is the built-in place policy pair_aware: prefill and decode
// are chosen together, by the sum of what each costs and what lies between them.
package pairaware

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/kvaware"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs is what the policy asks for beyond the usual facts.
const Needs = kvaware.Needs | abi.NeedPairs

// Params is what an operator may change: what kv_aware has, and what pairs cost.
type Params struct {
	KV                           kvaware.Params
	UnknownMicros, WarmingMicros float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e9
	return append(p.KV.Table(),
		param.Param{Name: "unknown_micros", Value: &p.UnknownMicros, Default: 50_000, Most: large, Unit: "µs", Meaning: "cost of a pair that has not been connected yet"},
		param.Param{Name: "warming_micros", Value: &p.WarmingMicros, Default: 200_000, Most: large, Unit: "µs", Meaning: "cost of a pair whose connection is under way"},
	)
}

// Defaults returns the parameters as they are when nothing is configured.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// broken is what a broken pair costs, in µs: more than any estimate, and less
// than a step of a row's grade.
const broken = 1e14

// Place is the policy, a pure function of the facts that does not allocate. It
// reads p, which nobody may change meanwhile. An index of -1 where a leg was to
// be placed means that no candidate fits. The scores that it leaves are the
// estimates in seconds, less is better: of a row that takes prefill that of the
// prefill alone, of any other the least of a pair with it.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return p.KV.Place(f)
	}
	f.Scored = true
	s := search{p: p, f: f, prompt: float64(max(0, f.Request.PromptTokens)), best: abi.PlaceDecision{Prefill: f.Fixed, Decode: -1}, least: math.Inf(1)}
	for i := range f.Candidates {
		if c := &f.Candidates[i]; c.Roles&abi.RolePrefill == 0 {
			c.Score = math.MaxFloat32
		}
	}
	if f.Fixed >= 0 {
		f.Candidates[f.Fixed].Score = 0
		s.pair(f.Fixed, 0)
		return s.best
	}
	leg := candidates.Prefill()
	pool := p.KV.Survey(f, leg)
	p.KV.Prefill(f, leg, &pool, 0)
	s.all(leg)
	return s.best
}

// search is the way to the cheapest pair.
type search struct {
	p      *Params
	f      *abi.PlaceFacts
	prompt float64
	best   abi.PlaceDecision
	least  float64 // its cost in µs
	order  uint64  // and its place among equals
	floor  float64 // what decode and pair cost at the very least
}

// tries is how many prefill rows are tried with all decode rows, if there is a
// pair that is not broken among them.
const tries = 8

// all tries the prefill rows from the cheapest on. It ends with the first that
// cannot make a better pair than the best so far, which is soon.
func (s *search) all(leg candidates.Leg) {
	rows := s.f.Candidates
	s.floor = s.under()
	last, lastOrder, first := 0.0, uint64(0), true
	for n := 0; n < tries || s.least >= broken; n++ {
		row, least, order := int32(-1), 0.0, uint64(0)
		for i := range rows {
			c := &rows[i]
			if !leg.Suits(c, i) {
				continue
			}
			cost := float64(float64(c.Score)*1e6) + kvaware.Busy*float64(candidates.BestGrade-leg.Grade(c))
			if !first && cost < last || row >= 0 && cost > least {
				continue
			}
			o := kvaware.Order(c, s.f.Random, i)
			if !first && cost == last && o <= lastOrder || row >= 0 && cost == least && o >= order {
				continue
			}
			row, least, order = int32(i), cost, o
		}
		if row < 0 || s.best.Decode >= 0 && least+s.floor >= s.least {
			return
		}
		if s.best.Prefill < 0 {
			s.best.Prefill = row
		}
		s.pair(row, least)
		last, lastOrder, first = least, order, false
	}
}

// under is what no decode row with its pair costs less than.
func (s *search) under() float64 {
	micros, state := s.p.KV.TransferMicros, s.p.UnknownMicros
	for i := range s.f.Pairs {
		pair := &s.f.Pairs[i]
		if pair.TransferMicros > 0 {
			micros = min(micros, float64(pair.TransferMicros))
		}
		state = min(state, s.p.state(pair.State))
	}
	least := math.Inf(1)
	for i := range s.f.Candidates {
		if c := &s.f.Candidates[i]; c.Roles&abi.RoleDecode != 0 {
			least = min(least, s.p.KV.Decode(c)+float64(micros*kvaware.Missing(c, s.prompt)))
		}
	}
	return least + state
}

// listed is how many rows' pairs are looked up in one go.
const listed = 512

// pair tries a prefill row of the given cost with each decode row: first with
// those that the table of pairs lists, then with the others, whose pairs are
// unknown.
func (s *search) pair(prefill int32, cost float64) {
	leg := candidates.Decode(s.f.Candidates, prefill)
	var known [listed / 64]uint64
	for i := range s.f.Pairs {
		pair := &s.f.Pairs[i]
		if d := pair.Decode; pair.Prefill == prefill && uint32(d) < uint32(len(s.f.Candidates)) {
			if d < listed {
				known[d/64] |= 1 << (d % 64)
			}
			s.try(leg, prefill, d, cost, pair.State, pair.TransferMicros)
		}
	}
	for i := range s.f.Candidates {
		if i >= listed || known[i/64]&(1<<(i%64)) == 0 {
			s.try(leg, prefill, int32(i), cost, abi.PairUnknown, 0)
		}
	}
}

// try weighs one pair.
func (s *search) try(leg candidates.Leg, prefill, decode int32, cost float64, state abi.PairState, transfer float32) {
	c := &s.f.Candidates[decode]
	if !leg.Suits(c, int(decode)) {
		return
	}
	micros := s.p.KV.TransferMicros
	if transfer > 0 {
		micros = float64(transfer)
	}
	cost += s.p.KV.Decode(c) + float64(micros*kvaware.Missing(c, s.prompt)) + s.p.state(state)
	if c.Roles&abi.RolePrefill == 0 {
		c.Score = min(c.Score, float32(cost*1e-6))
	}
	if cost += kvaware.Busy * float64(candidates.BestGrade-leg.Grade(c)); s.best.Decode >= 0 && cost > s.least {
		return
	}
	o := kvaware.Order(c, ^s.f.Random, int(decode))
	if s.best.Decode >= 0 && cost == s.least && o >= s.order {
		return
	}
	s.best, s.least, s.order = abi.PlaceDecision{Prefill: prefill, Decode: decode}, cost, o
}

func (p *Params) state(s abi.PairState) float64 {
	switch s {
	case abi.PairReady:
		return 0
	case abi.PairWarming:
		return p.WarmingMicros
	case abi.PairBroken:
		return broken
	}
	return p.UnknownMicros
}
