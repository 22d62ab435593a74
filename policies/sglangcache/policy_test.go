package sglangcache

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestPlace(t *testing.T) {
	for _, tt := range []struct {
		name     string
		requests [3]int32
		blocks   [3]uint32
		want     int32
	}{
		{"the longest match", [3]int32{1, 60, 0}, [3]uint32{4, 5, 0}, 1},
		{"no match above the threshold", [3]int32{1, 60, 0}, [3]uint32{3, 3, 0}, 2},
		{"a difference of 64 is no imbalance", [3]int32{0, 64, 1}, [3]uint32{0, 9, 0}, 1},
		{"a difference of 65 is an imbalance", [3]int32{0, 65, 1}, [3]uint32{0, 9, 0}, 0},
		{"unless the factor is below 1.5", [3]int32{200, 280, 201}, [3]uint32{0, 9, 0}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rows := make([]abi.Candidate, 3)
			for i := range rows {
				rows[i] = abi.Candidate{
					Roles: abi.RoleBoth, Group: 1, Instance: uint32(i + 1), Requests: tt.requests[i], BlocksGPU: tt.blocks[i], BlockTokens: 10,
				}
			}
			f := &abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Request: abi.RequestFacts{PromptTokens: 100}, Candidates: rows}
			p := Defaults()
			for random := range uint64(5) {
				f.Random = random
				if d := p.Place(f); d != (abi.PlaceDecision{Prefill: -1, Decode: tt.want}) {
					t.Fatalf("p.Place(f) = %+v, want %d", d, tt.want)
				}
			}
		})
	}
}
