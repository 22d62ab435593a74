// Package poweroftwo is the built-in place policy power_of_two: for each leg the policy draws two
// candidates at random; the candidate with fewer tokens in flight gets the leg.
package poweroftwo

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Place chooses the targets of a request. It is a pure function of the facts
// and does not allocate. It draws with f.Random. An index of -1 for a leg means
// that no candidate fits.
func Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: draw(f.Candidates, candidates.Aggregated(), f.Random)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = draw(f.Candidates, candidates.Prefill(), f.Random)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: draw(f.Candidates, candidates.Decode(f.Candidates, prefill), ^f.Random)}
}

// gradeShift puts the grade above the 32 bits of a draw.
const gradeShift = 32

// draw returns the row with less load of two rows of the highest grade. Each
// row draws a number, and the two lowest are compared. A row of a lower grade
// is chosen only when there is no other.
func draw(rows []abi.Candidate, leg candidates.Leg, random uint64) int32 {
	const none = math.MaxInt64
	drawn, other, first, second := -1, -1, int64(none), int64(none)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		d := int64(candidates.Draw(random, i)) - int64(leg.Grade(c))<<gradeShift
		switch {
		case d >= second:
		case d >= first:
			other, second = i, d
		default:
			other, second = drawn, first
			drawn, first = i, d
		}
	}
	// Draws of one grade have equal bits above gradeShift.
	if other < 0 || second>>gradeShift != first>>gradeShift || !candidates.Lighter(&rows[other], &rows[drawn]) {
		return int32(drawn)
	}
	return int32(other)
}
