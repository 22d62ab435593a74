package replay

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/pdproxy/pdproxy/abi"
)

// ScoreRow is what one scorer of a set did for one leg of the requests.
type ScoreRow struct {
	Leg    string  `json:"leg"` // prefill or decode
	Set    string  `json:"set"`
	Scorer string  `json:"scorer"`
	Weight float64 `json:"weight"`
	// Contribution is the mean of weight × score of the chosen target.
	Contribution float64 `json:"mean_contribution"`
	// Decisive is the share of decisions in which another target has the highest sum without the
	// scorer. A filter is in no sum: see Removed.
	Decisive float64 `json:"decisive"`
	// Removed is the share of decisions in which the scorer removed a target.
	Removed float64 `json:"removed"`
}

// scoreTally adds up what the scorers of each leg did.
type scoreTally struct {
	legs [2]legTally // prefill, decode
	sums []float64   // memory
}

type legTally struct {
	set       string
	decisions int
	scorers   []abi.NamedScorer
	rows      []scorerTally
}

// scorerTally is what one scorer did.
type scorerTally struct {
	contribution      float64
	decisive, removed int // decisions
}

// add counts the scores of a decision.
func (t *scoreTally) add(f *abi.PlaceFacts, d abi.PlaceDecision) {
	for i := range f.Scores {
		l, leg, chosen := &f.Scores[i], &t.legs[1], d.Decode
		if l.Phases == abi.RolePrefill {
			leg, chosen = &t.legs[0], d.Prefill
		}
		if leg.rows == nil {
			leg.set, leg.scorers = l.Set, l.Scorers
			leg.rows = make([]scorerTally, len(l.Scorers))
		}
		leg.decisions++
		t.count(leg, l, int(chosen))
	}
}

// count counts the scores of a leg whose target is the row chosen.
func (t *scoreTally) count(leg *legTally, l *abi.LegScores, chosen int) {
	n := len(l.Rows) / max(1, len(l.Scorers))
	t.sums = t.sums[:0]
	for row := range n {
		sum := 0.0
		for i, s := range l.Scorers {
			score := l.Of(i)[row].Score
			if score < 0 {
				sum = -1 // removed, or no target for the leg
				break
			}
			sum += float64(s.Weight) * float64(score)
		}
		t.sums = append(t.sums, sum)
	}
	best := chosen // with the picker weighted_random, another target may have the highest sum
	for row, sum := range t.sums {
		if sum > t.sums[best] {
			best = row
		}
	}
	for i, s := range l.Scorers {
		scores, r := l.Of(i), &leg.rows[i]
		r.contribution += float64(s.Weight) * float64(max(scores[chosen].Score, 0))
		without := func(row int) float64 { return t.sums[row] - float64(s.Weight)*float64(scores[row].Score) }
		other, removed := false, false
		for row := range scores {
			other = other || t.sums[row] >= 0 && without(row) > without(best)+1e-9
			removed = removed || scores[row].Score == abi.Removed
		}
		if other {
			r.decisive++
		}
		if removed {
			r.removed++
		}
	}
}

// result returns a row for each scorer of each leg.
func (t *scoreTally) result() (list []ScoreRow) {
	for i, leg := range t.legs {
		for n, r := range leg.rows {
			all := float64(leg.decisions)
			list = append(list, ScoreRow{
				Leg: [...]string{"prefill", "decode"}[i], Set: leg.set, Scorer: leg.scorers[n].Name, Weight: float64(leg.scorers[n].Weight),
				Contribution: r.contribution / all, Decisive: float64(r.decisive) / all, Removed: float64(r.removed) / all,
			})
		}
	}
	return list
}

// writeScores writes the scores of the policies that have them.
func (r *Report) writeScores(w io.Writer) error {
	for _, row := range r.Rows {
		if len(row.Scores) == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%s: the scores of the chosen targets\n\n", row.Policy)
		t := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "leg\tscorer\tweight\tmean contribution\tdecisive\tremoved a target\t")
		for _, s := range row.Scores {
			fmt.Fprintf(t, "%s\t%s\t%g\t%.3f\t%.1f%%\t%.1f%%\t\n", s.Leg, s.Scorer, s.Weight, s.Contribution, 100*s.Decisive, 100*s.Removed)
		}
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(w, "\ndecisive: without the scorer, another target has the highest sum")
	}
	return nil
}
