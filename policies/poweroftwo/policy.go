// Package poweroftwo is the built-in place policy power_of_two: for each leg
// two candidates are drawn at random and the one with fewer tokens in flight
// gets it.
package poweroftwo

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Place chooses the targets of a request, a pure function of the facts that does
// not allocate; it draws with f.Random. An index of -1 where a leg was to be
// placed means that no candidate fits.
func Place(f *abi.PlaceFacts) abi.PlaceDecision {
	rows := f.Candidates
	if f.Flow == abi.FlowAggregated {
		leg := candidates.Aggregated()
		return abi.PlaceDecision{Prefill: -1, Decode: draw(rows, &leg, candidates.Bits(f.Random, 0))}
	}
	prefill := f.Fixed
	if prefill < 0 {
		leg := candidates.Prefill()
		prefill = draw(rows, &leg, candidates.Bits(f.Random, 1))
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	leg := candidates.Decode(rows, prefill)
	return abi.PlaceDecision{Prefill: prefill, Decode: draw(rows, &leg, candidates.Bits(f.Random, 2))}
}

// draw returns the lighter of two different rows drawn from those of the
// highest grade, the one drawn first when they carry the same.
func draw(rows []abi.Candidate, leg *candidates.Leg, bits uint64) int32 {
	l := *leg // the compiler keeps it in registers
	best, n := l.Best(rows)
	if best == 0 {
		return -1
	}
	a, b := two(bits, n)
	drawn, other, k, last := -1, -1, uint64(0), max(a, b)
	for i := range rows {
		if l.Grade(&rows[i], i) != best {
			continue
		}
		if k == a {
			drawn = i
		}
		if k == b {
			other = i
		}
		if k == last {
			break
		}
		k++
	}
	if candidates.Lighter(&rows[other], &rows[drawn]) {
		return int32(other)
	}
	return int32(drawn)
}

// two makes of 64 random bits two different numbers below n, equal ones only
// when n is 1. The bias of scaling 32 random bits to n is below n/2^32.
func two(bits, n uint64) (a, b uint64) {
	if n == 1 {
		return 0, 0
	}
	a = bits >> 32 * n >> 32
	b = bits & 0xffffffff * (n - 1) >> 32
	if b >= a {
		b++
	}
	return a, b
}
