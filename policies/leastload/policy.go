// Package leastload is the built-in place policy least_load: each leg goes to
// the candidate with the fewest tokens in flight.
package leastload

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Place chooses the targets of a request, a pure function of the facts that does
// not allocate. Equal loads are drawn with f.Random. An index of -1 where a leg
// was to be placed means that no candidate fits.
func Place(f *abi.PlaceFacts) abi.PlaceDecision {
	rows := f.Candidates
	if f.Flow == abi.FlowAggregated {
		leg := candidates.Aggregated()
		return abi.PlaceDecision{Prefill: -1, Decode: least(rows, &leg, f.Random, 0)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		leg := candidates.Prefill()
		prefill = least(rows, &leg, f.Random, 1)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	leg := candidates.Decode(rows, prefill)
	return abi.PlaceDecision{Prefill: prefill, Decode: least(rows, &leg, f.Random, 2)}
}

// least returns the row that takes the leg best: the highest grade, then the
// fewest tokens, then the fewest requests. Among equals the random number and
// the number of the draw decide: a rule that took the first would send
// everything at rest to one target, and turns would move in step with the
// groups.
func least(rows []abi.Candidate, leg *candidates.Leg, random, draw uint64) int32 {
	best, bestGrade, equals := -1, 0, uint64(0)
	tokens, requests := int64(0), int32(0)
	l := *leg // the compiler keeps it in registers
	for i := range rows {
		c := &rows[i]
		g := l.Grade(c, i)
		if g == 0 || g < bestGrade {
			continue
		}
		if g == bestGrade {
			if c.Tokens > tokens || c.Tokens == tokens && c.Requests > requests {
				continue
			}
			if c.Tokens == tokens && c.Requests == requests {
				equals++
				continue
			}
		}
		best, bestGrade, equals = i, g, 1
		tokens, requests = c.Tokens, c.Requests
	}
	if equals <= 1 {
		return int32(best)
	}
	// The bias of scaling 32 random bits to the number of equals is below
	// equals/2^32.
	skip := candidates.Bits(random, draw) >> 32 * equals >> 32
	for i := best; i < len(rows); i++ {
		c := &rows[i]
		if c.Tokens != tokens || c.Requests != requests || l.Grade(c, i) != bestGrade {
			continue
		}
		if skip == 0 {
			return int32(i)
		}
		skip--
	}
	return int32(best)
}
