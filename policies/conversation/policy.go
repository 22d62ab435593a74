// Package conversation is the built-in place policy conversation: the first
// turn of a conversation goes to the next target in turn, later turns go to the
// conversation's home.
package conversation

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/leastload"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs are the additional facts that the policy needs.
const Needs = abi.NeedConversation

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct {
	OverloadFactor, OverloadTokens float64
	SkipFactor, SkipTokens         float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e12
	return param.Table{
		{Name: "overload_factor", Value: &p.OverloadFactor, Default: 4, Least: 1, Most: 1000, Meaning: "factor between the tokens in flight of a home and of the least loaded target; above this factor and overload_tokens, a conversation leaves its home"},
		{Name: "overload_tokens", Value: &p.OverloadTokens, Default: 500_000, Most: large, Unit: "tokens", Meaning: "difference between the same two numbers; see overload_factor"},
		{Name: "skip_factor", Value: &p.SkipFactor, Default: 1.5, Least: 1, Most: 1000, Meaning: "factor between the tokens in flight of a target and of the least loaded target; first turns skip a target above this factor and skip_tokens"},
		{Name: "skip_tokens", Value: &p.SkipTokens, Default: 32_000, Most: large, Unit: "tokens", Meaning: "difference between the same two numbers; see skip_factor"},
	}
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// New returns the policy with the given parameters. It is a pure function of
// the facts, does not allocate and is safe for concurrent use. An index of -1
// for a leg means that no candidate fits.
func New(p Params) func(*abi.PlaceFacts) abi.PlaceDecision {
	return p.Place
}

// Place is the policy. It reads p, which must not change during the call.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: p.choose(f, candidates.Aggregated(), abi.RoleBoth)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = p.choose(f, candidates.Prefill(), abi.RolePrefill)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.decode(f, candidates.Decode(f.Candidates, prefill))}
}

// choose returns the home of the phase. It returns the next row in turn if
// there is no home or the home is overloaded.
func (p *Params) choose(f *abi.PlaceFacts, leg candidates.Leg, phase abi.Role) int32 {
	s := survey(f.Candidates, leg, phase)
	if p.stays(f, leg, s) {
		return s.home
	}
	if s.n == 0 {
		return -1
	}
	limit := float64(float64(s.least)*p.SkipFactor) + p.SkipTokens
	return next(f.Candidates, leg, s.grade, limit, f.Sequence%s.n)
}

// decode is choose for the decode leg. It uses the least loaded row in place of
// the next one in turn, because streams are long and of unequal length.
func (p *Params) decode(f *abi.PlaceFacts, leg candidates.Leg) int32 {
	if s := survey(f.Candidates, leg, abi.RoleDecode); p.stays(f, leg, s) {
		return s.home
	}
	return leastload.Least(f, leg, ^f.Random)
}

// pool summarises the rows that suit a leg.
type pool struct {
	home  int32 // the least loaded row that is a home of the phase, or -1
	grade int   // the highest grade
	n     uint64
	least int64 // the fewest tokens in flight at one of the n rows of that grade
}

func survey(rows []abi.Candidate, leg candidates.Leg, phase abi.Role) pool {
	s := pool{home: -1}
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		if c.Home&phase != 0 && (s.home < 0 || candidates.Lighter(c, &rows[s.home])) {
			s.home = int32(i)
		}
		g := leg.Grade(c)
		if g < s.grade {
			continue
		}
		if g > s.grade {
			s.grade, s.n, s.least = g, 0, c.Tokens
		}
		s.n++
		s.least = min(s.least, c.Tokens)
	}
	return s
}

// stays reports whether a conversation continues at its home.
func (p *Params) stays(f *abi.PlaceFacts, leg candidates.Leg, s pool) bool {
	if s.home < 0 {
		return false
	}
	c := &f.Candidates[s.home]
	return leg.Grade(c) == s.grade && !p.overloaded(c.Tokens, s.least)
}

func (p *Params) overloaded(home, least int64) bool {
	return float64(home) > float64(p.OverloadFactor*float64(least)) && float64(home-least) > p.OverloadTokens
}

// next returns a row of that grade whose load is at most the limit. The search
// starts at the row whose turn it is and wraps around the table.
func next(rows []abi.Candidate, leg candidates.Leg, grade int, limit float64, turn uint64) int32 {
	first, at := int32(-1), uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade {
			continue
		}
		at++
		switch {
		case float64(c.Tokens) > limit:
		case at > turn:
			return int32(i)
		case first < 0:
			first = int32(i)
		}
	}
	return first
}
