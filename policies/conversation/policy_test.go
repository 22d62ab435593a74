package conversation

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// fleet returns two prefill and two decode instances with two ranks each.
func fleet() []abi.Candidate {
	var rows []abi.Candidate
	for i := range 8 {
		role := abi.RolePrefill
		if i >= 4 {
			role = abi.RoleDecode
		}
		rows = append(rows, abi.Candidate{Roles: role, Group: 1, Instance: uint32(1 + i/2), Rank: int32(i % 2)})
	}
	return rows
}

func facts(turn int32, sequence uint64, rows []abi.Candidate) *abi.PlaceFacts {
	return &abi.PlaceFacts{Request: abi.RequestFacts{Turn: turn}, Flow: abi.FlowPrefillFirst, Fixed: -1, Sequence: sequence, Random: sequence * 0x9e3779b97f4a7c15, Candidates: rows}
}

// TestFirstTurns: first turns go to all slots in turn.
func TestFirstTurns(t *testing.T) {
	p, rows := Defaults(), fleet()
	for sequence := range uint64(12) {
		if d := p.Place(facts(1, sequence, rows)); d.Prefill != int32(sequence%4) {
			t.Errorf("turn %d: %+v", sequence, d)
		}
	}
	rows[1].Tokens = 15_000
	if d := p.Place(facts(1, 1, rows)); d.Prefill != 1 {
		t.Errorf("the policy skipped a row with little load: %+v", d)
	}
	rows[1].Tokens = 200_000 // the others are idle
	if d := p.Place(facts(1, 1, rows)); d.Prefill != 2 {
		t.Errorf("the policy did not skip a row with much load: %+v", d)
	}
	rows[0].Tokens, rows[2].Tokens, rows[3].Tokens = 150_000, 200_000, 200_000
	if d := p.Place(facts(1, 2, rows)); d.Prefill != 2 {
		t.Errorf("the policy skipped a row with the most common load: %+v", d)
	}
	rows[4].Tokens, rows[5].Tokens, rows[7].Tokens = 1, 1, 1
	if d := p.Place(facts(1, 2, rows)); d.Decode != 6 {
		t.Errorf("decode did not go to the idle row: %+v", d)
	}
}

// TestLaterTurns: each phase of a later turn goes to the phase's home, unless the home is
// overloaded.
func TestLaterTurns(t *testing.T) {
	for _, tt := range []struct {
		name   string
		turn   int32
		home   int64 // tokens at the home of prefill
		others int64
		away   bool
	}{
		{name: "home", turn: 2},
		{name: "turn not known", turn: 0},
		{name: "busier than others", turn: 2, home: 90_000},
		{name: "overloaded", turn: 2, home: 600_000, away: true},
		{name: "home has many times the least load, and so do other targets", turn: 2, home: 700_000, others: 250_000},
		{name: "the first turn of a sub-agent", turn: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, rows := Defaults(), fleet()
			rows[2].Home, rows[5].Home = abi.RolePrefill, abi.RoleDecode
			for i := range 4 {
				rows[i].Tokens = tt.others
			}
			rows[2].Tokens += tt.home
			rows[5].Tokens = 3
			d := p.Place(facts(tt.turn, 0, rows))
			if (d.Prefill != 2) != tt.away {
				t.Errorf("p.Place(facts(tt.turn, 0, rows)) = %+v", d)
			}
			if d.Decode != 5 {
				t.Errorf("decode of %+v", d)
			}
		})
	}
}

// TestHomeOfTheOtherPhase: the home of decode has no effect on the choice of prefill.
func TestHomeOfTheOtherPhase(t *testing.T) {
	var rows []abi.Candidate
	for i := range 4 {
		rows = append(rows, abi.Candidate{Roles: abi.RoleBoth, Group: 1, Instance: uint32(i + 1)})
	}
	rows[3].Home = abi.RoleDecode
	p := Defaults()
	if d := p.Place(facts(2, 0, rows)); d != (abi.PlaceDecision{Prefill: 0, Decode: 3}) {
		t.Errorf("p.Place(facts(2, 0, rows)) = %+v", d)
	}
	f := facts(2, 0, rows)
	f.Flow = abi.FlowAggregated
	if d := p.Place(f); d != (abi.PlaceDecision{Prefill: -1, Decode: 3}) {
		t.Errorf("aggregated: %+v", d)
	}
}

// TestBrokenHome: a home whose circuit is half open with a running trial
// request is not chosen.
func TestBrokenHome(t *testing.T) {
	p, rows := Defaults(), fleet()
	rows[2].Home, rows[2].Trial, rows[2].Requests = abi.RolePrefill, true, 1
	for sequence := range uint64(8) {
		if d := p.Place(facts(4, sequence, rows)); d.Prefill == 2 || d.Prefill < 0 {
			t.Errorf("p.Place(facts(4, sequence, rows)) = %+v", d)
		}
	}
}
