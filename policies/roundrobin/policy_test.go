package roundrobin

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestTurns: prefill and decode have turns of their own, so an aggregated
// request or a kept prefill moves only what it uses.
func TestTurns(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Group: 1, Instance: 1}, {Roles: abi.RolePrefill, Group: 1, Instance: 2},
		{Roles: abi.RoleDecode, Group: 1, Instance: 3}, {Roles: abi.RoleDecode, Group: 1, Instance: 4},
		{Roles: abi.RoleDecode, Group: 1, Instance: 5},
	}
	var p Policy
	for i, tt := range []struct {
		fixed int32
		want  abi.PlaceDecision
	}{
		{-1, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{-1, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{1, abi.PlaceDecision{Prefill: 1, Decode: 4}},
		{-1, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{-1, abi.PlaceDecision{Prefill: 1, Decode: 3}},
	} {
		if got := p.Place(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: tt.fixed, Candidates: rows}); got != tt.want {
			t.Fatalf("decision %d: got %+v, want %+v", i, got, tt.want)
		}
	}
	for i, want := range []int32{0, 1, 2, 3, 4, 0} {
		if got := p.Place(&abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Candidates: rows}); got.Decode != want {
			t.Fatalf("aggregated %d: got %+v, want %d", i, got, want)
		}
	}
}
