package candidates

import "github.com/pdproxy/pdproxy/abi"

// Legs places the legs of a request one after the other. choose returns the row
// for a leg, or -1. phase is RoleBoth for an aggregated leg.
func Legs(f *abi.PlaceFacts, choose func(leg Leg, phase abi.Role) int32) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: choose(Aggregated(), abi.RoleBoth)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = choose(Prefill(), abi.RolePrefill)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: choose(Decode(f.Candidates, prefill), abi.RoleDecode)}
}

// Cheapest returns the row of the highest grade that takes the leg at the
// lowest cost, -1 without a row. Rows of equal cost take turns. It stores the
// costs in the scores of the rows, in the precision of a score.
func Cheapest(rows []abi.Candidate, leg Leg, turn uint64, cost func(*abi.Candidate) float64) int32 {
	grade, least, n := 0, 0.0, uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		v := cost(c)
		c.Score = float32(v)
		g := leg.Grade(c)
		if g < grade || g == grade && v > least {
			continue
		}
		if g > grade || v < least {
			grade, least, n = g, v, 0
		}
		n++
	}
	if n == 0 {
		return -1
	}
	left := turn % n
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade || cost(c) != least {
			continue
		}
		if left == 0 {
			return int32(i)
		}
		left--
	}
	return -1
}
