package journal

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// scored returns a record whose set of scorers placed one leg on the last of n candidates. The filter
// removes the first one.
func scored(id string, n int) *Record {
	r := &Record{RequestID: id, scorings: []scoring{{phases: abi.RoleBoth, set: "s", scorers: []abi.NamedScorer{{Name: "filter", Weight: 1}, {Name: "a", Weight: 2}}, chosen: n - 1}}}
	r.units = []abi.Scale{0, abi.UnitTokens}
	r.scores = make([]abi.RowScore, 2*n)
	for i := range n {
		r.candidates = append(r.candidates, candidate{engine: fmt.Sprint("e", i)})
		r.scores[n+i] = abi.RowScore{Score: float32(i) / 4, Value: float32(100 * i)}
	}
	r.scores[0].Score, r.scores[n].Score = abi.Removed, abi.Closed
	return r
}

func TestExplainScores(t *testing.T) {
	r := scored("r", 3)
	r.scorings = append(r.scorings, scoring{phases: abi.RolePrefill, set: "empty", chosen: -1})
	got, err := json.Marshal(r.explain().Scores)
	const want = `[{"leg":"aggregated","set":"s","scorers":[{"name":"filter","weight":1},{"name":"a","weight":2,"unit":"tokens"}],"candidates":[` +
		`{"engine":"e0","rank":0,"sum":null,"scores":[{"score":0,"value":0,"contribution":0,"removed":true}]},` +
		`{"engine":"e1","rank":0,"sum":0.5,"scores":[{"score":0,"value":0,"contribution":0},{"score":0.25,"value":100,"contribution":0.5}]},` +
		`{"engine":"e2","rank":0,"chosen":true,"sum":1,"scores":[{"score":0,"value":0,"contribution":0},{"score":0.5,"value":200,"contribution":1}]}]},` +
		`{"leg":"prefill","set":"empty","scorers":[],"candidates":[{"engine":"e0","rank":0,"sum":0,"scores":[]},{"engine":"e1","rank":0,"sum":0,"scores":[]},{"engine":"e2","rank":0,"sum":0,"scores":[]}]}]`
	if err != nil || string(got) != want {
		t.Errorf("%v, got\n%s\nwant\n%s", err, got, want)
	}
}

// TestRingKeepsScores: the ring bounds the memory for scores, and says which are no longer kept.
func TestRingKeepsScores(t *testing.T) {
	var s Ring
	for n := range RingSize {
		s.put(scored(fmt.Sprint("r", n), 512)) // twice the scores for which there is memory
	}
	if s.scores.entries > maxScores {
		t.Errorf("memory for %d scores", s.scores.entries)
	}
	if e, ok := s.Get(fmt.Sprint("r", RingSize-1)); !ok || len(e.Scores) != 1 || len(e.Scores[0].Candidates) != 512 || len(e.Notes) != 0 {
		t.Errorf("the last record has %d scores and the notes %q", len(e.Scores), e.Notes)
	}
	if e, ok := s.Get(fmt.Sprint("r", RingSize-1000)); !ok || len(e.Scores) != 0 || len(e.Notes) != 1 {
		t.Errorf("an old record has %d scores and the notes %q", len(e.Scores), e.Notes)
	}
}
