// Package roundrobin is the built-in place policy round_robin: each leg goes to
// the next candidate in turn, whatever its load.
package roundrobin

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Place chooses the targets of a request. It is a pure function of the facts and does not allocate.
// f.Sequence determines the row. An index of -1 for a leg means that no candidate fits.
//
// A turn counts slots, which are pairs of instance and rank. Two separate
// counters for instances and ranks would advance in step and never reach some
// ranks. Decode's choice is limited to prefill's group, so its turn is the
// number of earlier prefill legs of that group.
func Place(f *abi.PlaceFacts) abi.PlaceDecision {
	rows := f.Candidates
	if f.Flow == abi.FlowAggregated {
		leg := candidates.Aggregated()
		grade, n, _ := best(rows, leg)
		return abi.PlaceDecision{Prefill: -1, Decode: nth(rows, leg, grade, n, f.Sequence)}
	}
	prefill, turn, lap := f.Fixed, f.Sequence, uint64(1)
	if prefill < 0 {
		leg := candidates.Prefill()
		grade, n, groups := best(rows, leg)
		if prefill = nth(rows, leg, grade, n, f.Sequence); prefill < 0 {
			return abi.PlaceDecision{Prefill: -1, Decode: -1}
		}
		if lap = n; groups {
			turn, lap = within(rows, leg, grade, prefill, f.Sequence/n)
		}
	}
	leg := candidates.Decode(rows, prefill)
	grade, n, _ := best(rows, leg)
	// If the numbers of slots of the two phases share a divisor, each slot would always be paired
	// with the same slots of the other phase, and some slots perhaps with none. So each time that
	// both phases are at their first slot together, decode advances by one.
	if d := divisor(lap, n); d > 1 && n > 0 {
		turn += turn / (lap / d * n)
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: nth(rows, leg, grade, n, turn)}
}

// best returns the highest grade of the rows that suit the leg, the number of
// rows of that grade, and whether they may be in several groups; 0 and 0 when
// no row suits.
func best(rows []abi.Candidate, leg candidates.Leg) (grade int, n uint64, groups bool) {
	differ := uint32(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		differ |= c.Group ^ rows[0].Group
		g := leg.Grade(c)
		if g < grade {
			continue
		}
		if g > grade {
			grade, n = g, 0
		}
		n++
	}
	return grade, n, differ != 0
}

// nth returns the row whose turn it is among the n rows of that grade, -1 when
// there is none.
func nth(rows []abi.Candidate, leg candidates.Leg, grade int, n, turn uint64) int32 {
	if n == 0 {
		return -1
	}
	left := turn % n
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade {
			continue
		}
		if left == 0 {
			return int32(i)
		}
		left--
	}
	return -1
}

// within returns the number of earlier turns of the chosen row's group, and its
// number of turns in one lap. laps is the number of completed laps through all
// rows of that grade.
func within(rows []abi.Candidate, leg candidates.Leg, grade int, chosen int32, laps uint64) (turn, lap uint64) {
	group, before := rows[chosen].Group, uint64(0)
	for i := range rows {
		c := &rows[i]
		if c.Group != group || !leg.Suits(c, i) || leg.Grade(c) != grade {
			continue
		}
		if i == int(chosen) {
			before = lap
		}
		lap++
	}
	return laps*lap + before, lap
}

// divisor returns the greatest common divisor of two positive numbers.
func divisor(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
