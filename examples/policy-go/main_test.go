package main

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestPlace(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Group: 1, Instance: 1, Requests: 3}, {Roles: abi.RolePrefill, Group: 1, Instance: 2, Requests: 2},
		{Roles: abi.RoleDecode, Group: 1, Instance: 3, Requests: 5}, {Roles: abi.RoleDecode, Group: 2, Instance: 4},
	}
	for _, tt := range []struct {
		name  string
		flow  abi.Flow
		fixed int32
		want  abi.PlaceDecision
	}{
		{"pair", abi.FlowConcurrent, -1, abi.PlaceDecision{Prefill: 1, Decode: 2}},
		{"fixed", abi.FlowPrefillFirst, 0, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"aggregated", abi.FlowAggregated, -1, abi.PlaceDecision{Prefill: -1, Decode: 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := place(&abi.PlaceFacts{Flow: tt.flow, Fixed: tt.fixed, Candidates: rows}); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}
