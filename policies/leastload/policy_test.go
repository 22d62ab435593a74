package leastload

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestPlace(t *testing.T) {
	row := func(role abi.Role, group, instance uint32, requests int32, tokens int64) abi.Candidate {
		return abi.Candidate{Roles: role, Group: group, Instance: instance, Requests: requests, Tokens: tokens}
	}
	for _, tt := range []struct {
		name  string
		flow  abi.Flow
		fixed int32
		rows  []abi.Candidate
		want  abi.PlaceDecision
	}{
		{"fewest tokens", abi.FlowConcurrent, -1, []abi.Candidate{
			row(abi.RolePrefill, 1, 1, 1, 500), row(abi.RolePrefill, 1, 2, 5, 400),
			row(abi.RoleDecode, 1, 3, 1, 20), row(abi.RoleDecode, 1, 4, 0, 30),
		}, abi.PlaceDecision{Prefill: 1, Decode: 2}},
		{"requests break a tie", abi.FlowPrefillFirst, -1, []abi.Candidate{
			row(abi.RolePrefill, 1, 1, 2, 0), row(abi.RolePrefill, 1, 2, 1, 0),
			row(abi.RoleDecode, 1, 3, 9, 7), row(abi.RoleDecode, 1, 4, 8, 7),
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"group binds decode", abi.FlowPrefillFirst, -1, []abi.Candidate{
			row(abi.RolePrefill, 1, 1, 0, 10), row(abi.RolePrefill, 2, 2, 0, 5),
			row(abi.RoleDecode, 1, 3, 0, 0), row(abi.RoleDecode, 2, 4, 0, 900),
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"fixed stays", abi.FlowPrefillFirst, 0, []abi.Candidate{
			row(abi.RolePrefill, 1, 1, 9, 900), row(abi.RolePrefill, 1, 2, 0, 0),
			row(abi.RoleDecode, 1, 3, 0, 5), row(abi.RoleDecode, 1, 4, 0, 4),
		}, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"other instance before lighter rank", abi.FlowPrefillFirst, -1, []abi.Candidate{
			row(abi.RoleBoth, 1, 1, 0, 0), row(abi.RoleBoth, 1, 1, 0, 1), row(abi.RoleBoth, 1, 2, 0, 99),
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"aggregated", abi.FlowAggregated, -1, []abi.Candidate{
			row(abi.RoleBoth, 1, 1, 0, 6), row(abi.RoleDecode, 2, 2, 0, 5),
		}, abi.PlaceDecision{Prefill: -1, Decode: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for random := range uint64(9) {
				got := Place(&abi.PlaceFacts{Flow: tt.flow, Fixed: tt.fixed, Random: random, Candidates: tt.rows})
				if got != tt.want {
					t.Fatalf("got %+v, want %+v", got, tt.want)
				}
			}
		})
	}
}

// TestEquals: idle candidates get equal shares, a busy one gets nothing.
func TestEquals(t *testing.T) {
	rows := make([]abi.Candidate, 5)
	for i := range rows {
		rows[i] = abi.Candidate{Roles: abi.RoleBoth, Instance: uint32(i)}
	}
	rows[1].Requests, rows[1].Tokens = 1, 1
	var hits [5]int
	for random := range uint64(2000) {
		hits[Place(&abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Random: random, Candidates: rows}).Decode]++
	}
	for i, n := range hits {
		if i == 1 && n != 0 || i != 1 && (n < 400 || n > 600) {
			t.Errorf("row %d: %d of 2000", i, n)
		}
	}
}

// TestAdapters: a target counts fewer tokens where the request's LoRA adapter runs, and more where
// the adapter needs to wait.
func TestAdapters(t *testing.T) {
	const unknown, running, free, waiting, full = abi.AdapterUnknown, abi.AdapterRunning, abi.AdapterFree, abi.AdapterWaiting, abi.AdapterFull
	for _, tt := range []struct {
		states [2]abi.AdapterState
		tokens int64 // on the second row
		want   int32
	}{
		{[2]abi.AdapterState{free, running}, 4000, 1},
		{[2]abi.AdapterState{free, running}, 4100, 0},
		{[2]abi.AdapterState{unknown, running}, 4000, 1},
		{[2]abi.AdapterState{unknown, free}, 1, 0},
		{[2]abi.AdapterState{full, free}, 32_000, 1},
		{[2]abi.AdapterState{full, free}, 33_000, 0},
		{[2]abi.AdapterState{full, waiting}, 16_000, 1},
		{[2]abi.AdapterState{7, 255}, 1, 0},
	} {
		rows := []abi.Candidate{{Roles: abi.RoleBoth, Instance: 1, Adapter: tt.states[0]}, {Roles: abi.RoleBoth, Instance: 2, Adapter: tt.states[1], Tokens: tt.tokens}}
		if d := Place(&abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Adapters: true, Candidates: rows}); d.Decode != tt.want {
			t.Errorf("%v with %d tokens: row %d, want %d", tt.states, tt.tokens, d.Decode, tt.want)
		}
	}
}
