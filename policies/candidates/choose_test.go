package candidates

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestCheapest(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Tokens: 5}, {Roles: abi.RolePrefill, Tokens: 4}, {Roles: abi.RoleDecode}, {Roles: abi.RolePrefill, Tokens: 4},
		{Roles: abi.RolePrefill, Tokens: 1, Trial: true, Requests: 1},
	}
	cost := func(c *abi.Candidate) float64 { return float64(c.Tokens) / 2 }
	for turn, want := range []int32{1, 3, 1, 3} {
		if got := Cheapest(rows, Prefill(), uint64(turn), cost); got != want {
			t.Errorf("turn %d: row %d, want %d", turn, got, want)
		}
	}
	if rows[0].Score != 2.5 || rows[4].Score != 0.5 || rows[2].Score != 0 {
		t.Errorf("scores of %+v", rows)
	}
	if got := Cheapest(rows[4:], Prefill(), 7, cost); got != 0 {
		t.Errorf("row %d, where there is but one", got)
	}
	if got := Cheapest(rows[2:3], Prefill(), 0, cost); got != -1 {
		t.Errorf("row %d, where none suits", got)
	}
}

func TestLegs(t *testing.T) {
	first := func(leg Leg, _ abi.Role) int32 { return -1 }
	if d := Legs(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1}, first); d != (abi.PlaceDecision{Prefill: -1, Decode: -1}) {
		t.Errorf("Legs = %+v", d)
	}
	var phases []abi.Role
	count := func(_ Leg, phase abi.Role) int32 { phases = append(phases, phase); return int32(len(phases)) }
	rows := make([]abi.Candidate, 9)
	for _, tt := range []struct {
		f    abi.PlaceFacts
		want abi.PlaceDecision
		role abi.Role // of the first leg that is chosen
	}{
		{abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1}, abi.PlaceDecision{Prefill: -1, Decode: 1}, abi.RoleBoth},
		{abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1}, abi.PlaceDecision{Prefill: 1, Decode: 2}, abi.RolePrefill},
		{abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: 7}, abi.PlaceDecision{Prefill: 7, Decode: 1}, abi.RoleDecode},
	} {
		phases, tt.f.Candidates = nil, rows
		if d := Legs(&tt.f, count); d != tt.want || phases[0] != tt.role {
			t.Errorf("%+v: %+v, phases %v", tt.f.Flow, d, phases)
		}
	}
}
