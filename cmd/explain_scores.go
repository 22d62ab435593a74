package cmd

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/journal"
)

// scoreTables returns a table for each leg that a set of scorers placed.
func scoreTables(e *journal.Explanation) string {
	var out strings.Builder
	for _, leg := range e.Scores {
		header := []string{strings.ToUpper(leg.Leg) + " BY SET " + leg.Set, "RANK", "SUM"}
		for _, s := range leg.Scorers {
			header = append(header, s.Name+" × "+rounded(s.Weight))
		}
		rows := [][]string{header}
		for _, c := range leg.Candidates {
			name := c.Engine
			if c.Chosen {
				name += " (chosen)"
			}
			row := []string{name, strconv.Itoa(c.Rank), orDash(c.Sum)}
			for i, s := range leg.Scorers {
				row = append(row, scoreCell(c.Scores, i, s.Unit))
			}
			rows = append(rows, row)
		}
		out.WriteString("\n" + plainTable(rows))
	}
	if len(e.Scores) > 0 {
		out.WriteString("a cell has weight × score, and in parentheses the score and the fact that it was made of\n")
	}
	return out.String()
}

// scoreCell returns the contribution of the i-th scorer, with the score and the value that it was
// made of. A filter contributes nothing.
func scoreCell(scores []journal.ExplainedScore, i int, unit string) string {
	if i >= len(scores) {
		return "-"
	}
	s := scores[i]
	value := ""
	switch {
	case unit == "share":
		value = ", " + rounded(100*s.Value) + " %"
	case unit != "":
		value = ", " + rounded(s.Value) + " " + unit
	case s.Value != 0 && s.Value != s.Score: // a fact in a unit that frames do not have
		value = ", " + rounded(s.Value)
	}
	if s.Removed {
		return "removed" + strings.Replace(value, ", ", ": ", 1)
	}
	return rounded(s.Contribution) + " (" + rounded(s.Score) + value + ")"
}
