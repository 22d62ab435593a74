package roundrobin

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestTurns: the sequence number determines the turn. A fixed prefill has turns
// of its own.
func TestTurns(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Group: 1, Instance: 1}, {Roles: abi.RolePrefill, Group: 1, Instance: 2},
		{Roles: abi.RoleDecode, Group: 1, Instance: 3}, {Roles: abi.RoleDecode, Group: 1, Instance: 4},
		{Roles: abi.RoleDecode, Group: 1, Instance: 5},
	}
	for _, tt := range []struct {
		name  string
		flow  abi.Flow
		fixed int32
		want  []abi.PlaceDecision
	}{
		{"pair", abi.FlowConcurrent, -1, []abi.PlaceDecision{
			{Prefill: 0, Decode: 2}, {Prefill: 1, Decode: 3}, {Prefill: 0, Decode: 4}, {Prefill: 1, Decode: 2}, {Prefill: 0, Decode: 3},
		}},
		{"fixed", abi.FlowPrefillFirst, 1, []abi.PlaceDecision{
			{Prefill: 1, Decode: 2}, {Prefill: 1, Decode: 3}, {Prefill: 1, Decode: 4}, {Prefill: 1, Decode: 2},
		}},
		{"aggregated", abi.FlowAggregated, -1, []abi.PlaceDecision{
			{Prefill: -1, Decode: 0}, {Prefill: -1, Decode: 1}, {Prefill: -1, Decode: 2}, {Prefill: -1, Decode: 3}, {Prefill: -1, Decode: 4}, {Prefill: -1, Decode: 0},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i, want := range tt.want {
				f := &abi.PlaceFacts{Flow: tt.flow, Fixed: tt.fixed, Sequence: uint64(i), Candidates: rows}
				if got := Place(f); got != want {
					t.Errorf("turn %d: got %+v, want %+v", i, got, want)
				}
			}
		})
	}
}

// TestTurnsOfGroups: the decode slots of each group take separate turns, for any number
// of groups.
func TestTurnsOfGroups(t *testing.T) {
	var rows []abi.Candidate
	for g := range uint32(20) {
		for i := range uint32(2) {
			rows = append(rows,
				abi.Candidate{Roles: abi.RolePrefill, Group: g + 1, Instance: g*10 + i + 1},
				abi.Candidate{Roles: abi.RoleDecode, Group: g + 1, Instance: g*10 + i + 5})
		}
	}
	hits := map[int32]int{}
	for turn := range uint64(400) {
		hits[Place(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Sequence: 1<<63 + turn, Candidates: rows}).Decode]++
	}
	for i := range rows {
		if want := 10 * (i % 2); hits[int32(i)] != want {
			t.Errorf("row %d: %d times decode, want %d", i, hits[int32(i)], want)
		}
	}
}
