package trtllmconversation

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestPlace(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Group: 1, Instance: 1, Tokens: 100},
		{Roles: abi.RolePrefill, Group: 1, Instance: 2, Tokens: 100},
		{Roles: abi.RolePrefill, Group: 1, Instance: 3, Tokens: 900, Requests: 90},
		{Roles: abi.RoleDecode, Group: 1, Instance: 4, Requests: 3, Tokens: 10},
		{Roles: abi.RoleDecode, Group: 1, Instance: 5, Requests: 2, Tokens: 9000},
	}
	place := func(sequence uint64) abi.PlaceDecision {
		return Place(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Sequence: sequence, Candidates: rows})
	}
	for sequence, want := range []int32{0, 1, 0} {
		if d := place(uint64(sequence)); d != (abi.PlaceDecision{Prefill: want, Decode: 4}) {
			t.Errorf("turn %d: %+v", sequence, d)
		}
	}
	rows[2].Home, rows[3].Home = abi.RolePrefill, abi.RoleDecode
	if d := place(0); d != (abi.PlaceDecision{Prefill: 2, Decode: 4}) {
		t.Errorf("home: %+v", d)
	}
}
