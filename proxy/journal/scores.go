package journal

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// scoring is how a set of scorers chose the target of a leg. The scores of a record are those of its
// scorings, one after the other: for each scorer one of each candidate.
type scoring struct {
	phases  abi.Role
	set     string
	scorers []abi.NamedScorer // constant
	chosen  int               // candidate; -1: none
}

// noteScores copies the scores of a placement.
func (j *Journal) noteScores(p *coordinator.Placement) {
	j.scorings, j.scores, j.units = j.scorings[:0], j.scores[:0], j.units[:0]
	for i := range p.Facts.Scores {
		l := &p.Facts.Scores[i]
		chosen := p.Decode
		if l.Phases == abi.RolePrefill {
			chosen = p.Prefill
		}
		j.scorings = append(j.scorings, scoring{l.Phases, l.Set, l.Scorers, rowOf(p.Targets, chosen)})
		j.scores = append(j.scores, l.Rows...)
		j.units = append(j.units, l.Units...)
	}
}

func rowOf(targets []engine.Target, t engine.Target) int {
	for i := range targets {
		if targets[i] == t {
			return i
		}
	}
	return -1
}

// ExplainedScores is how a set of scorers chose the target of one leg.
type ExplainedScores struct {
	Leg        string                     `json:"leg"` // prefill, decode or aggregated
	Set        string                     `json:"set"`
	Scorers    []ExplainedScorer          `json:"scorers"`
	Candidates []ExplainedScoredCandidate `json:"candidates"`
}

// ExplainedScorer is one scorer of a set. Unit is that of the values of its scores.
type ExplainedScorer struct {
	Name   string  `json:"name"`
	Weight float64 `json:"weight"`
	Unit   string  `json:"unit,omitempty"`
}

// ExplainedScoredCandidate is a candidate that can take the leg. Sum is the sum of the contributions;
// null: a filter removed the candidate.
type ExplainedScoredCandidate struct {
	Engine string           `json:"engine"`
	Rank   int              `json:"rank"`
	Chosen bool             `json:"chosen,omitempty"`
	Sum    *float64         `json:"sum"`
	Scores []ExplainedScore `json:"scores"` // of each scorer; after a filter that removed the candidate there are none
}

// ExplainedScore is the score of a scorer, from 0 to 1, and the score multiplied by the weight. Value
// is the fact that it was made of. Removed: the scorer removes the candidate.
type ExplainedScore struct {
	Score        float64 `json:"score"`
	Value        float64 `json:"value"`
	Contribution float64 `json:"contribution"`
	Removed      bool    `json:"removed,omitempty"`
}

// explainScores returns the scores of each leg that a set of scorers placed.
func (r *Record) explainScores() (list []ExplainedScores) {
	n, scores, units := len(r.candidates), r.scores, r.units
	for _, s := range r.scorings {
		if cells := n * len(s.scorers); len(scores) < cells || n == 0 {
			return list // they are no longer kept
		}
		leg := ExplainedScores{Leg: legName(s.phases), Set: s.set, Scorers: []ExplainedScorer{}, Candidates: []ExplainedScoredCandidate{}}
		for i, named := range s.scorers {
			leg.Scorers = append(leg.Scorers, ExplainedScorer{Name: named.Name, Weight: float64(named.Weight), Unit: units[i].Unit()})
		}
		for row := range r.candidates {
			if c, ok := r.explainRow(&s, scores, row); ok {
				leg.Candidates = append(leg.Candidates, c)
			}
		}
		list = append(list, leg)
		scores, units = scores[n*len(s.scorers):], units[len(s.scorers):]
	}
	return list
}

// explainRow returns the scores of a candidate. ok is false if the candidate cannot take the leg.
func (r *Record) explainRow(s *scoring, scores []abi.RowScore, row int) (c ExplainedScoredCandidate, ok bool) {
	n, sum := len(r.candidates), 0.0
	c = ExplainedScoredCandidate{Engine: r.candidates[row].engine, Rank: int(r.candidates[row].facts.Rank), Chosen: row == s.chosen, Scores: []ExplainedScore{}}
	for i, named := range s.scorers {
		cell := scores[i*n+row]
		if cell.Score == abi.Closed {
			return c, i > 0
		}
		e := ExplainedScore{Score: float64(max(cell.Score, 0)), Value: float64(cell.Value), Removed: cell.Score < 0}
		e.Contribution = e.Score * float64(named.Weight)
		sum += e.Contribution
		c.Scores = append(c.Scores, e)
	}
	if last := len(s.scorers) - 1; last < 0 || scores[last*n+row].Score >= 0 {
		c.Sum = &sum
	}
	return c, true
}

func legName(phases abi.Role) string {
	switch phases {
	case abi.RolePrefill, abi.RoleDecode:
		return phases.String()
	}
	return "aggregated"
}
