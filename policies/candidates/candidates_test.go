package candidates

import (
	"math/rand/v2"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestDraw: over many decisions each of a few rows draws the lowest number
// equally often.
func TestDraw(t *testing.T) {
	var hits [7]int
	random := rand.New(rand.NewPCG(1, 2))
	for range 7000 {
		number, lowest := random.Uint64(), 0
		for i := range hits {
			if Draw(number, i) < Draw(number, lowest) {
				lowest = i
			}
		}
		hits[lowest]++
	}
	for i, n := range hits {
		if n < 900 || n > 1100 {
			t.Errorf("row %d: %d of 7000", i, n)
		}
	}
	if Draw(1<<64-1, 1<<20)>>32 != 0 {
		t.Error("a draw has more than 32 bits")
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
		"trial possible":          {abi.Candidate{Roles: abi.RolePrefill, Trial: true}, abi.RolePrefill, -1, 4},
		"decode of another group": {abi.Candidate{Roles: abi.RoleDecode, Group: 2, Instance: 2}, abi.RoleDecode, 0, 0},
		"decode on another":       {abi.Candidate{Roles: abi.RoleDecode, Group: 1, Instance: 2}, abi.RoleDecode, 0, 4},
		"decode on prefill's own": {abi.Candidate{Roles: abi.RoleBoth, Group: 1, Instance: 1, Rank: 1}, abi.RoleDecode, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			rows := []abi.Candidate{prefill, tt.row}
			leg := Prefill()
			if tt.role == abi.RoleDecode {
				leg = Decode(rows, tt.prefill)
			}
			if got := grade(leg, rows, 1); got != tt.want {
				t.Errorf("grade %d, want %d", got, tt.want)
			}
		})
	}
	rows := []abi.Candidate{prefill}
	if grade(Decode(rows, 0), rows, 0) != 0 {
		t.Error("prefill's own row is graded for decode")
	}
	for roles := abi.RolePrefill; roles <= abi.RoleBoth; roles++ {
		if grade(Aggregated(), []abi.Candidate{{Roles: roles, Group: 7, Instance: 8}}, 0) != 4 {
			t.Errorf("an aggregated leg does not take a row of %v", roles)
		}
	}
}

// grade returns the grade of a row, 0 if the row does not suit the leg.
func grade(leg Leg, rows []abi.Candidate, i int) int {
	if !leg.Suits(&rows[i], i) {
		return 0
	}
	return leg.Grade(&rows[i])
}

func TestLighter(t *testing.T) {
	a, b, c := abi.Candidate{Tokens: 5, Requests: 9}, abi.Candidate{Tokens: 6}, abi.Candidate{Tokens: 6, Requests: 1}
	if !Lighter(&a, &b) || Lighter(&b, &a) || !Lighter(&b, &c) || Lighter(&b, &b) {
		t.Error("tokens count first, then requests")
	}
}
