// Package roundrobin is the built-in place policy round_robin: each leg goes to
// the next candidate in turn, whatever it carries.
package roundrobin

import (
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// groups is how many groups keep decode turns of their own. Two groups whose
// numbers are equal modulo it share one.
const groups = 16

// Policy is the policy's state: whose turn it is. A turn counts candidates,
// that is slots of instance x rank, never instances and ranks apart: two
// counters would move in step and strand ranks. Prefill and decode have turns
// of their own, decode one a group, because decode's choice is confined to
// prefill's group. The zero value is ready for use, by many goroutines at once.
type Policy struct {
	prefill    atomic.Uint32
	decode     [groups]atomic.Uint32
	aggregated atomic.Uint32
}

// Place chooses the targets of a request. It does not allocate; the same frame
// and the same turns give the same decision. An index of -1 where a leg was to
// be placed means that no candidate fits.
func (p *Policy) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: next(f.Candidates, abi.RoleBoth, -1, &p.aggregated)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = next(f.Candidates, abi.RolePrefill, -1, &p.prefill)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	turn := &p.decode[f.Candidates[prefill].Group%groups]
	return abi.PlaceDecision{Prefill: prefill, Decode: next(f.Candidates, abi.RoleDecode, prefill, turn)}
}

// next returns the row whose turn it is among those of the highest grade.
func next(rows []abi.Candidate, role abi.Role, prefill int32, turn *atomic.Uint32) int32 {
	best, n := 0, uint32(0)
	for i := range rows {
		switch g := candidates.Grade(rows, int32(i), role, prefill); {
		case g > best:
			best, n = g, 1
		case g == best:
			n++
		}
	}
	if best == 0 {
		return -1
	}
	left := (turn.Add(1) - 1) % n
	for i := range rows {
		if candidates.Grade(rows, int32(i), role, prefill) != best {
			continue
		}
		if left == 0 {
			return int32(i)
		}
		left--
	}
	return -1
}
