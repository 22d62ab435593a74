// Package poweroftwo is the built-in place policy power_of_two: for each leg
// two candidates are drawn at random and the one with fewer tokens in flight
// gets it.
package poweroftwo

import (
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Policy is the policy's state: a seed and the number of draws made. The zero
// value is ready for use, by many goroutines at once; proxies that share engines
// take different seeds.
type Policy struct {
	seed  uint64
	draws atomic.Uint64
}

// New returns a policy whose draws follow from seed.
func New(seed uint64) *Policy { return &Policy{seed: seed} }

// Place chooses the targets of a request. It does not allocate; the same frame,
// seed and number of draws give the same decision. An index of -1 where a leg
// was to be placed means that no candidate fits.
func (p *Policy) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: p.draw(f.Candidates, abi.RoleBoth, -1)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = p.draw(f.Candidates, abi.RolePrefill, -1)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: p.draw(f.Candidates, abi.RoleDecode, prefill)}
}

// draw returns the lighter of two different rows drawn from those of the
// highest grade, the one drawn first when they carry the same.
func (p *Policy) draw(rows []abi.Candidate, role abi.Role, prefill int32) int32 {
	best, n := 0, uint64(0)
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
	a, b := p.two(n)
	drawn, other, k := int32(-1), int32(-1), uint64(0)
	for i := range rows {
		if candidates.Grade(rows, int32(i), role, prefill) != best {
			continue
		}
		if k == a {
			drawn = int32(i)
		}
		if k == b {
			other = int32(i)
		}
		k++
	}
	if candidates.Lighter(&rows[other], &rows[drawn]) {
		return other
	}
	return drawn
}

// two draws two different numbers below n, equal ones only when n is 1. The
// bias of scaling 32 random bits to n is below n/2^32.
func (p *Policy) two(n uint64) (a, b uint64) {
	if n == 1 {
		return 0, 0
	}
	x := candidates.Bits(p.seed, p.draws.Add(1))
	a = x >> 32 * n >> 32
	b = x & 0xffffffff * (n - 1) >> 32
	if b >= a {
		b++
	}
	return a, b
}
