package fleet

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// putScores sets the scores of the scorers.
func putScores(m *fleetpb.Placed, p *coordinator.Placement) {
	for i := range p.Facts.Scores {
		l := &p.Facts.Scores[i]
		to := more(&m.LegScores)
		to.Phases, to.Set = uint32(l.Phases), l.Set
		for n, s := range l.Scorers {
			to.Names, to.Weights, to.Units = append(to.Names, s.Name), append(to.Weights, s.Weight), append(to.Units, uint32(l.Units[n]))
		}
		for _, row := range l.Rows {
			to.Scores, to.Values = append(to.Scores, row.Score), append(to.Values, row.Value)
		}
	}
}

// readScores reads the scores of the scorers. known tells for each row of m whether the row is in
// g.Facts.Candidates. Scores that do not fit the rows are left out, because only explain shows them.
func (g *granted) readScores(m *fleetpb.Placed, known []bool, texts names) {
	g.Facts.Scores = g.Facts.Scores[:0]
	for _, l := range m.LegScores {
		n := len(l.Names)
		if len(l.Weights) != n || len(l.Units) != n || len(l.Scores) != n*len(known) || len(l.Values) != len(l.Scores) {
			continue
		}
		scorers := make([]abi.NamedScorer, n)
		for i := range scorers {
			scorers[i] = abi.NamedScorer{Name: texts.of(l.Names[i]), Weight: l.Weights[i]}
		}
		to := g.Facts.AddScores(abi.Role(l.Phases), texts.of(l.Set), scorers)
		for i := range to.Units {
			to.Units[i] = abi.Scale(l.Units[i])
		}
		rows := to.Rows[:0]
		for i := range l.Scores {
			if known[i%len(known)] {
				rows = append(rows, abi.RowScore{Score: l.Scores[i], Value: l.Values[i]})
			}
		}
	}
}
