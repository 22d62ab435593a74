// Package leastload is the built-in place policy least_load: each leg goes to
// the candidate with the fewest tokens in flight.
package leastload

import (
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Policy is the policy's state: the number of decisions made, from which equal
// loads are drawn. The zero value is ready for use, by many goroutines at once.
type Policy struct {
	turn atomic.Uint64
}

// Place chooses the targets of a request. It does not allocate; the same frame
// and the same number of decisions before give the same decision. An index of
// -1 where a leg was to be placed means that no candidate fits.
func (p *Policy) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	bits := candidates.Bits(0, p.turn.Add(1))
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: least(f.Candidates, abi.RoleBoth, -1, bits>>32)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = least(f.Candidates, abi.RolePrefill, -1, bits>>32)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: least(f.Candidates, abi.RoleDecode, prefill, bits&0xffffffff)}
}

// least returns the row that takes the leg best: the highest grade, then the
// fewest tokens, then the fewest requests. Among equals the 32 bits draw: a
// rule that took the first would send everything at rest to one target, and a
// counter would move in step with the groups.
func least(rows []abi.Candidate, role abi.Role, prefill int32, bits uint64) int32 {
	best, bestGrade, equals := int32(-1), 0, uint64(0)
	for i := range rows {
		g := candidates.Grade(rows, int32(i), role, prefill)
		switch {
		case g == 0 || g < bestGrade:
		case g > bestGrade || candidates.Lighter(&rows[i], &rows[best]):
			best, bestGrade, equals = int32(i), g, 1
		case !candidates.Lighter(&rows[best], &rows[i]):
			equals++
		}
	}
	if equals <= 1 {
		return best
	}
	skip := bits * equals >> 32
	for i := best; skip > 0; {
		i++
		if candidates.Grade(rows, i, role, prefill) == bestGrade && same(&rows[i], &rows[best]) {
			best = i
			skip--
		}
	}
	return best
}

// same reports whether a and b carry the same.
func same(a, b *abi.Candidate) bool { return a.Tokens == b.Tokens && a.Requests == b.Requests }
