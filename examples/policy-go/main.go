// Command policy-go is a place policy in twenty lines: each leg goes to the
// target with the fewest requests in flight.
package main

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
)

func init() { guest.Place("fewest", place) }

func main() {}

func place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: fewest(f, abi.RoleBoth, -1)}
	}
	prefill := f.Fixed // a retry keeps its prefill target
	if prefill < 0 {
		prefill = fewest(f, abi.RolePrefill, -1)
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: fewest(f, abi.RoleDecode, prefill)}
}

// fewest returns the row with the fewest requests that serves the role. A
// partner's row must be in the same group and on another instance.
func fewest(f *abi.PlaceFacts, role abi.Role, partner int32) int32 {
	best := int32(-1)
	for i := range f.Candidates {
		c := &f.Candidates[i]
		if c.Roles&role == 0 {
			continue
		}
		if partner >= 0 && (c.Group != f.Candidates[partner].Group || c.Instance == f.Candidates[partner].Instance) {
			continue
		}
		if best < 0 || c.Requests < f.Candidates[best].Requests {
			best = int32(i)
		}
	}
	return best
}
