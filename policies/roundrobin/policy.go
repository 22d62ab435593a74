// Package roundrobin is the built-in place policy round_robin: each leg goes to
// the next candidate in turn, whatever it carries.
package roundrobin

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Place chooses the targets of a request, a pure function of the facts that does
// not allocate; whose turn it is follows from f.Sequence. An index of -1 where a
// leg was to be placed means that no candidate fits.
//
// A turn counts candidates, that is slots of instance x rank, never instances
// and ranks apart: two counters would move in step and strand ranks. Decode's
// choice is confined to prefill's group, so its turn is the number of prefill
// legs that the group has had before.
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
	// Slots whose numbers share a divisor would meet the same slots of the other
	// phase for ever, some perhaps none: so each time that both are at their
	// beginnings together decode moves on by one.
	if d := divisor(lap, n); d > 1 && n > 0 {
		turn += turn / (lap / d * n)
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: nth(rows, leg, grade, n, turn)}
}

// best returns the highest grade among the rows that suit the leg, how many rows
// have it, and whether rows of several groups may be among them; 0 and 0 when
// none suits.
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

// nth returns the row whose turn it is among the n rows of that grade; -1 when
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

// within returns how many turns the group of the chosen row has had before this
// one, in so many laps through all rows of that grade and the lap under way, and
// how many it has in a lap.
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
