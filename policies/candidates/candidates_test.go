package candidates

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestBits holds the first outputs of SplitMix64 for the seed 1234567 (Rosetta
// Code, "Pseudo-random numbers/Splitmix64").
func TestBits(t *testing.T) {
	for i, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		if got := Bits(1234567, uint64(i+1)); got != want {
			t.Errorf("output %d = %d, want %d", i, got, want)
		}
	}
}

func TestGrade(t *testing.T) {
	prefill := abi.Candidate{Roles: abi.RoleBoth, Group: 1, Instance: 1}
	for name, tt := range map[string]struct {
		row     abi.Candidate
		role    abi.Role
		prefill int32
		want    int
	}{
		"other role":              {abi.Candidate{Roles: abi.RoleDecode}, abi.RolePrefill, -1, 0},
		"prefill":                 {abi.Candidate{Roles: abi.RolePrefill}, abi.RolePrefill, -1, 4},
		"trial under way":         {abi.Candidate{Roles: abi.RolePrefill, Trial: true, Requests: 1}, abi.RolePrefill, -1, 3},
		"trial to be had":         {abi.Candidate{Roles: abi.RolePrefill, Trial: true}, abi.RolePrefill, -1, 4},
		"decode of another group": {abi.Candidate{Roles: abi.RoleDecode, Group: 2, Instance: 2}, abi.RoleDecode, 0, 0},
		"decode on another":       {abi.Candidate{Roles: abi.RoleDecode, Group: 1, Instance: 2}, abi.RoleDecode, 0, 4},
		"decode on prefill's own": {abi.Candidate{Roles: abi.RoleBoth, Group: 1, Instance: 1, Rank: 1}, abi.RoleDecode, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Grade([]abi.Candidate{prefill, tt.row}, 1, tt.role, tt.prefill); got != tt.want {
				t.Errorf("grade %d, want %d", got, tt.want)
			}
		})
	}
	if Grade([]abi.Candidate{prefill}, 0, abi.RoleDecode, 0) != 0 {
		t.Error("prefill's own row takes decode")
	}
}

func TestLighter(t *testing.T) {
	a, b, c := abi.Candidate{Tokens: 5, Requests: 9}, abi.Candidate{Tokens: 6}, abi.Candidate{Tokens: 6, Requests: 1}
	if !Lighter(&a, &b) || Lighter(&b, &a) || !Lighter(&b, &c) || Lighter(&b, &b) {
		t.Error("tokens count first, then requests")
	}
}
