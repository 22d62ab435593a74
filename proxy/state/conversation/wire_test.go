package conversation

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// turnsThatTravel returns requests with and without an id that begin and continue
// conversations.
func turnsThatTravel() []Query {
	first := system + "What is the capital of France?"
	return []Query{
		{}, {ID: "x"}, {ID: "x"}, prompt(first), prompt(first + " Paris. And of Spain?"), prompt(first), {Chain: chain(system), First: true},
	}
}

// TestTurnsTravel: a turn that was encoded and decoded is recorded like the original
// turn.
func TestTurnsTravel(t *testing.T) {
	here, there := New(10), New(10)
	for i, q := range turnsThatTravel() {
		turn := here.Look(q)
		b, err := turn.Message().MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		var m fleetpb.Turn
		if err := fleetpb.Unmarshal(b, &m, 1); err != nil {
			t.Fatal(err)
		}
		got := ReadTurn(&m)
		turn.repeats = false // does not travel, because only a conversation's first placement uses it
		if got != turn {
			t.Fatalf("turn %d: %+v, want %+v", i, got, turn)
		}
		here.Record(turn, at(1), at(2), epoch)
		there.Record(got, at(1), at(2), epoch)
		if a, b := here.Look(q), there.Look(q); a != b {
			t.Errorf("turn %d is remembered as %+v and %+v", i, a, b)
		}
	}
}
