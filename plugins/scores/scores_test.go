package scores

import (
	"math/rand/v2"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// set returns a set of one scorer, which gives row i the score scores[i].
func set(weighted bool, scores ...float32) *Set {
	leg := Leg{Scorers: []abi.NamedScorer{{Name: "s", Weight: 2}}, Parts: []Part{{Scorers: 1, Ask: func(f *abi.ScoreFacts, rows []abi.RowScore, units []abi.Scale) string {
		for i := range rows {
			rows[i] = abi.RowScore{Score: scores[i]}
		}
		return ""
	}}}}
	return &Set{Name: "test", Weighted: weighted, Prefill: leg, Decode: leg}
}

// aggregated returns facts of one leg with n candidates.
func aggregated(n int) *abi.PlaceFacts {
	f := &abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1}
	for i := range n {
		f.Candidates = append(f.Candidates, abi.Candidate{Instance: uint32(i + 1), Roles: abi.RoleBoth})
	}
	return f
}

// shares returns how often each of n rows is chosen, in per cent.
func shares(t *testing.T, s *Set, f *abi.PlaceFacts) []int {
	t.Helper()
	const decisions = 20_000
	counts, rnd := make([]int, len(f.Candidates)), rand.New(rand.NewPCG(3, 4))
	for range decisions {
		f.Random = rnd.Uint64()
		d, reason := s.Place(f)
		if reason != "" || !f.Allows(d) {
			t.Fatalf("%+v, %q", d, reason)
		}
		counts[d.Decode]++
	}
	for i := range counts {
		counts[i] = (counts[i]*100 + decisions/2) / decisions
	}
	return counts
}

func TestPickers(t *testing.T) {
	for name, tt := range map[string]struct {
		set  *Set
		want []int // per cent
	}{
		"highest":             {set(false, 0.2, 0.9, 0.5), []int{0, 100, 0}},
		"equal sums":          {set(false, 0.9, 0.2, 0.9), []int{50, 0, 50}},
		"above 0 and removed": {set(false, -1, 0, 0), []int{0, 50, 50}},
		"weighted":            {set(true, 0.2, 0.6, 0.2), []int{20, 60, 20}},
		"weighted, removed":   {set(true, -1, 0.75, 0.25), []int{0, 75, 25}},
		"weighted without":    {set(true, 0, 0, 0), []int{33, 33, 33}},
		"all removed":         {set(false, -1, -1, -1), []int{33, 33, 33}},
		"no scorers":          {&Set{}, []int{33, 33, 33}},
	} {
		for i, got := range shares(t, tt.set, aggregated(3)) {
			if got < tt.want[i]-2 || got > tt.want[i]+2 {
				t.Errorf("%s: row %d has %d %%, want %d %%", name, i, got, tt.want[i])
			}
		}
	}
}

// TestGrades: the grade of a row comes before its sum, as in other place policies.
func TestGrades(t *testing.T) {
	f := aggregated(2)
	f.Candidates[0].Trial, f.Candidates[0].Requests = true, 1
	if d, _ := set(false, 1, 0.1).Place(f); d.Decode != 1 {
		t.Errorf("a target whose trial runs is chosen: %+v", d)
	}
	if row := f.Scores[0].Rows[0]; row.Score != abi.Closed || f.Candidates[0].Score != 0 {
		t.Errorf("scores %+v, %+v", row, f.Candidates[0])
	}
	f = &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: []abi.Candidate{
		{Instance: 1, Group: 1, Roles: abi.RoleBoth}, {Instance: 1, Rank: 1, Group: 1, Roles: abi.RoleBoth}, {Instance: 2, Group: 1, Roles: abi.RoleDecode}, {Instance: 3, Group: 2, Roles: abi.RoleDecode},
	}}
	d, reason := set(false, 1, 0.9, 0.1, 1).Place(f)
	if want := (abi.PlaceDecision{Prefill: 0, Decode: 2}); d != want || reason != "" || f.Candidates[2].Score != float32(2*0.1) {
		t.Errorf("%+v, %q, %+v", d, reason, f.Candidates)
	}
	f.Fixed = 1
	if d, _ := set(false, 1, 0.9, 0.1, 1).Place(f); d.Prefill != 1 || d.Decode != 2 || len(f.Scores) != 1 {
		t.Errorf("fixed prefill: %+v, %+v", d, f.Scores)
	}
	f.Candidates = f.Candidates[3:]
	f.Fixed = -1
	if d, reason := set(false, 1).Place(f); d.Prefill != -1 || d.Decode != -1 || reason != "" || f.Allows(d) {
		t.Errorf("without a target for prefill: %+v, %q", d, reason)
	}
}

// TestReason: without the scores of a module there is no decision, and nothing is shown.
func TestReason(t *testing.T) {
	s := set(false, 1, 1)
	s.Decode.Parts = append(s.Decode.Parts, Part{Ask: func(*abi.ScoreFacts, []abi.RowScore, []abi.Scale) string { return "trap" }})
	f := aggregated(2)
	if _, reason := s.Place(f); reason != "trap" || len(f.Scores) != 0 || f.Scored {
		t.Errorf("%q, %+v", reason, f.Scores)
	}
}
