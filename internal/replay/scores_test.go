package replay

import (
	"reflect"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestScoreTally: the contribution of the chosen target, and whether another target has the highest
// sum without the scorer.
func TestScoreTally(t *testing.T) {
	const closed, removed = abi.Closed, abi.Removed
	leg := func(phases abi.Role, rows ...float32) abi.LegScores {
		l := abi.LegScores{Phases: phases, Set: "s", Scorers: []abi.NamedScorer{{Name: "filter", Weight: 1}, {Name: "a", Weight: 2}, {Name: "b", Weight: 1}}}
		for _, score := range rows {
			l.Rows = append(l.Rows, abi.RowScore{Score: score})
		}
		return l
	}
	var tally scoreTally
	for range 2 {
		tally.add(&abi.PlaceFacts{Scores: []abi.LegScores{
			// The sums are 2.1, 2.0 and none. Without a, row 1 has the highest sum; without b, row 0 stays.
			leg(abi.RolePrefill, 0, 0, removed, 1, 0.75, closed, 0.1, 0.5, closed),
			leg(abi.RoleDecode, closed, 0, 0, closed, 0.5, 0.5, closed, 1, 0.5),
		}}, abi.PlaceDecision{Prefill: 0, Decode: 1})
	}
	want := []ScoreRow{
		{Leg: "prefill", Set: "s", Scorer: "filter", Weight: 1, Removed: 1},
		{Leg: "prefill", Set: "s", Scorer: "a", Weight: 2, Contribution: 2, Decisive: 1},
		{Leg: "prefill", Set: "s", Scorer: "b", Weight: 1, Contribution: float64(float32(0.1))},
		{Leg: "decode", Set: "s", Scorer: "filter", Weight: 1},
		{Leg: "decode", Set: "s", Scorer: "a", Weight: 2, Contribution: 1},
		{Leg: "decode", Set: "s", Scorer: "b", Weight: 1, Contribution: 1},
	}
	if got := tally.result(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}
