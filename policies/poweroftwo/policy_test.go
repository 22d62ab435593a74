package poweroftwo

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestNeverTheHeaviest: the most loaded of all candidates is never chosen, and every other
// candidate is chosen in some draws, because the two drawn rows differ.
func TestNeverTheHeaviest(t *testing.T) {
	rows := make([]abi.Candidate, 6)
	for i := range rows {
		rows[i] = abi.Candidate{Roles: abi.RoleBoth, Instance: uint32(i), Tokens: int64(i)}
	}
	var hits [6]int
	for random := range uint64(3000) {
		hits[Place(&abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Random: random, Candidates: rows}).Decode]++
	}
	// The chance of rank i of 6 to be the lighter of a random pair is
	// (5-i)/15.
	for i, n := range hits {
		want := 3000 * (5 - i) / 15
		if n < want*8/10 || n > want*12/10 {
			t.Errorf("row %d: %d of 3000, want about %d", i, n, want)
		}
	}
}

// TestPair: each phase is drawn among its own rows, and decode inside prefill's
// group.
func TestPair(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Group: 1, Instance: 1}, {Roles: abi.RolePrefill, Group: 2, Instance: 2},
		{Roles: abi.RoleDecode, Group: 1, Instance: 3}, {Roles: abi.RoleDecode, Group: 2, Instance: 4},
	}
	var hits [2]int
	for random := range uint64(400) {
		d := Place(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Random: random, Candidates: rows})
		if d.Decode != d.Prefill+2 {
			t.Fatalf("got %+v", d)
		}
		hits[d.Prefill]++
	}
	if hits[0] < 150 || hits[1] < 150 {
		t.Errorf("prefill rows were drawn %v times", hits)
	}
	if d := Place(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: rows[2:]}); d.Prefill != -1 {
		t.Errorf("got %+v without a prefill row", d)
	}
}

// TestGrades: a row of a lower grade is not chosen, whatever its load.
func TestGrades(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RoleBoth, Instance: 1, Tokens: 500}, {Roles: abi.RoleBoth, Instance: 2, Trial: true, Requests: 1},
	}
	for random := range uint64(100) {
		if d := Place(&abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Random: random, Candidates: rows}); d.Decode != 0 {
			t.Fatalf("got %+v", d)
		}
	}
}
