// Package leastload is the built-in place policy least_load: each leg goes to
// the candidate with the fewest tokens in flight.
package leastload

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Place chooses the targets of a request. It is a pure function of the facts
// and does not allocate. It draws among equal loads with f.Random. An index of
// -1 for a leg means that no candidate fits.
func Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: Least(f, candidates.Aggregated(), f.Random)}
	}
	prefill := f.Fixed
	if prefill < 0 {
		prefill = Least(f, candidates.Prefill(), f.Random)
	}
	if prefill < 0 {
		return abi.PlaceDecision{Prefill: -1, Decode: -1}
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: Least(f, candidates.Decode(f.Candidates, prefill), ^f.Random)}
}

// gradeShift puts the grade above the tokens in the number that is compared;
// lower is better.
const gradeShift = 56

// adapterTokens are the tokens that a row counts in addition to those in flight, by the state of
// the request's LoRA adapter there. A prompt of a few thousand tokens takes about as long as
// loading an adapter. A place for an adapter becomes free when other requests have ended, which
// takes as long as many prompts.
var adapterTokens = [8]int64{abi.AdapterRunning: -4096, abi.AdapterWaiting: 16_384, abi.AdapterFull: 32_768}

// Least returns the row that takes the leg best, -1 without one: the highest grade, then the fewest
// tokens, with those for the LoRA adapter, then the fewest requests. Each of several equal rows
// draws a number from random. The row with the lowest number is chosen. Taking the first row would send all requests of an idle fleet
// to one target, and taking turns would advance in step with the groups.
func Least(f *abi.PlaceFacts, leg candidates.Leg, random uint64) int32 {
	rows, adapters := f.Candidates, f.Adapters
	best, first, second := int32(-1), int64(math.MaxInt64), uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		a := c.Tokens - int64(leg.Grade(c))<<gradeShift
		if adapters {
			a += adapterTokens[c.Adapter&7]
		}
		if a > first {
			continue
		}
		b := uint64(uint32(c.Requests))<<32 | candidates.Draw(random, i)
		if a == first && b >= second {
			continue
		}
		best, first, second = int32(i), a, b
	}
	return best
}
