// Package scores places requests by the sums of weighted scores: the rule of policy.place =
// "scores". The scores come from scorers, which are policies of modules. This package asks them,
// adds their scores and chooses.
//
// The decisions behind this package are in docs/design/placement.md.
package scores

import (
	"sync"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Set is a set of scorers. It is constant and safe for concurrent use.
type Set struct {
	Name     string
	Weighted bool // the chance of a row is in proportion to its sum; else the row with the highest sum is chosen
	Prefill  Leg
	Decode   Leg // also of an aggregated request
}

// Leg has the scorers of a set for one leg.
type Leg struct {
	Scorers []abi.NamedScorer
	Parts   []Part // together they ask the scorers in their order
}

// Part asks scorers that follow each other and are in one module.
type Part struct {
	Scorers int
	// Ask writes the scores of the scorers. A reason other than "" means that there are none.
	Ask func(f *abi.ScoreFacts, rows []abi.RowScore, units []abi.Scale) (reason string)
}

// work is the memory of one decision.
type work struct {
	facts abi.ScoreFacts // the scorers may change facts.Open
	open  []bool         // of each row: it can take the leg, and no scorer has removed it
	sums  []float64      // of each row
}

var works = sync.Pool{New: func() any { return new(work) }}

// Place chooses the rows for the legs of a request. It writes the sums into the candidates, and the
// scores into f.Scores. A reason other than "" means that there is no decision. It does not allocate
// if the memory of f.Scores suffices.
func (s *Set) Place(f *abi.PlaceFacts) (d abi.PlaceDecision, reason string) {
	w := works.Get().(*work)
	defer works.Put(w)
	w.facts.PlaceFacts = f
	f.Scores = f.Scores[:0]
	for i := range f.Candidates {
		f.Candidates[i].Score = 0
	}
	d = abi.PlaceDecision{Prefill: -1, Decode: -1}
	switch {
	case f.Flow == abi.FlowAggregated:
		d.Decode, reason = s.choose(w, &s.Decode, candidates.Aggregated(), abi.RoleBoth)
	case f.Fixed >= 0:
		d.Prefill = f.Fixed
	default:
		d.Prefill, reason = s.choose(w, &s.Prefill, candidates.Prefill(), abi.RolePrefill)
	}
	if d.Prefill >= 0 && reason == "" {
		w.facts.Prefill = d.Prefill
		d.Decode, reason = s.choose(w, &s.Decode, candidates.Decode(f.Candidates, d.Prefill), abi.RoleDecode)
	}
	if w.facts.PlaceFacts = nil; reason != "" {
		f.Scores = f.Scores[:0]
		return abi.PlaceDecision{}, reason
	}
	f.Scored, f.Scale = true, abi.HighWins
	return d, ""
}

// choose returns the row for a leg, -1 if none can take it.
func (s *Set) choose(w *work, l *Leg, leg candidates.Leg, phases abi.Role) (row int32, reason string) {
	f := &w.facts
	f.Phases = phases
	if phases != abi.RoleDecode {
		f.Prefill = -1
	}
	if !w.begin(leg) {
		return -1, ""
	}
	n := len(f.Candidates)
	out := f.AddScores(phases, s.Name, l.Scorers)
	for i, at := 0, 0; i < len(l.Parts); i++ {
		p := &l.Parts[i]
		f.Open = append(f.Open[:0], w.open...)
		end := at + p.Scorers
		if reason = p.Ask(f, out.Rows[at*n:end*n], out.Units[at:end]); reason != "" {
			return -1, reason
		}
		for ; at < end; at++ {
			if !w.add(out.Of(at), float64(l.Scorers[at].Weight)) {
				f.Notes = append(f.Notes, l.Scorers[at].Name+" would remove all candidates, and removes none")
			}
		}
	}
	for i, open := range w.open {
		if open {
			f.Candidates[i].Score = float32(w.sums[i])
		}
	}
	random := f.Random + uint64(phases)<<32
	if s.Weighted {
		return w.draw(random), ""
	}
	return w.best(random), ""
}

// begin opens the rows that suit the leg and have the highest grade of all such rows. ok is false if
// there is none.
func (w *work) begin(leg candidates.Leg) (ok bool) {
	f, best := &w.facts, 0
	for i := range f.Candidates {
		if leg.Suits(&f.Candidates[i], i) {
			best = max(best, leg.Grade(&f.Candidates[i]))
		}
	}
	w.open, w.sums = w.open[:0], w.sums[:0]
	for i := range f.Candidates {
		c := &f.Candidates[i]
		w.open = append(w.open, leg.Suits(c, i) && leg.Grade(c) == best)
		w.sums = append(w.sums, 0)
	}
	return best > 0
}

// add adds the scores of one scorer to the sums, and closes the rows that the scorer removed. It returns
// false if the scorer would remove all rows. Then it removes none, and the score of each is 0.
func (w *work) add(rows []abi.RowScore, weight float64) bool {
	for i := range rows {
		if !w.open[i] {
			rows[i] = abi.RowScore{Score: abi.Closed}
		} else if rows[i].Score > 0 {
			w.sums[i] += weight * float64(rows[i].Score)
		}
	}
	if !abi.CloseRemoved(w.open, rows) {
		return true
	}
	for i := range rows {
		if w.open[i] {
			rows[i].Score = 0
		}
	}
	return false
}

// best returns the open row with the highest sum. Rows of equal sums have equal chances.
func (w *work) best(random uint64) int32 {
	best, drawn := int32(-1), uint64(0)
	for i, open := range w.open {
		if !open {
			continue
		}
		number := candidates.Draw(random, i)
		if best < 0 || w.sums[i] > w.sums[best] || w.sums[i] == w.sums[best] && number > drawn {
			best, drawn = int32(i), number
		}
	}
	return best
}

// draw returns an open row. The chance of a row is in proportion to its sum; if all sums are 0, the
// rows have equal chances.
func (w *work) draw(random uint64) int32 {
	total := 0.0
	for i, open := range w.open {
		if open {
			total += w.sums[i]
		}
	}
	if total <= 0 {
		return w.best(random)
	}
	left, last := total*float64(candidates.Draw(random, 0))/(1<<32), int32(-1)
	for i, open := range w.open {
		if !open || w.sums[i] <= 0 {
			continue
		}
		if last = int32(i); left < w.sums[i] {
			break
		}
		left -= w.sums[i]
	}
	return last
}
