package cmd

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// cell is a text that needs some attention.
type cell struct {
	text      string
	attention int
}

type line []cell

// section is a table of a status. Rows that need attention come first.
type section struct {
	name     string
	head     []string
	numbers  string // # for each column that is aligned to the right
	rows     []sectionRow
	unlisted int // how many rows are left out
}

type sectionRow struct {
	state     string // without further words, for the summary
	attention int
	cells     []string
}

func (t *section) add(state string, attention int, cells ...string) {
	t.rows = append(t.rows, sectionRow{state, attention, cells})
	slices.SortStableFunc(t.rows, func(a, b sectionRow) int { return b.attention - a.attention })
}

// summary counts the rows of each state, the worst ones first.
func (t *section) summary() line {
	all := line{{text: fmt.Sprintf("%-10s%d", t.name, len(t.rows)+t.unlisted)}}
	counts, levels, order := map[string]int{}, map[string]int{}, []string(nil)
	for _, r := range t.rows {
		if counts[r.state]++; counts[r.state] == 1 {
			order = append(order, r.state)
		}
		levels[r.state] = max(levels[r.state], r.attention)
	}
	separator := ": "
	for _, state := range order {
		all = append(all, cell{text: separator}, cell{fmt.Sprintf("%d %s", counts[state], state), levels[state]})
		separator = ", "
	}
	return all
}

// limit leaves out rows, so that the table has n lines below its head.
func (t *section) limit(n int) {
	if len(t.rows) <= n {
		return
	}
	if n > 1 {
		n-- // one line says how many are left out
		t.unlisted += len(t.rows) - n
	}
	t.rows = t.rows[:n]
}

// table returns the lines with aligned columns. The first column marks rows that need attention,
// for terminals without colors.
func (t *section) table() []line {
	widths := make([]int, len(t.head))
	for i, name := range t.head {
		widths[i] = len(name)
		for _, r := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(r.cells[i]))
		}
	}
	row := func(mark string, cells []string, attention int) line {
		text := mark
		for i, c := range cells {
			space := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
			if t.numbers[i] == '#' {
				c = space + c
			} else {
				c += space
			}
			text += c + "  "
		}
		return line{{strings.TrimRight(text, " "), attention}}
	}
	all := []line{row("  ", t.head, good)}
	for _, r := range t.rows {
		mark := "  "
		if r.attention == bad {
			mark = "! "
		}
		all = append(all, row(mark, r.cells, r.attention))
	}
	if t.unlisted > 0 {
		all = append(all, line{{text: fmt.Sprintf("  %d more", t.unlisted)}})
	}
	return all
}

// text returns a line as text that fits into the terminal.
func (v statusView) text(l line) string {
	var b strings.Builder
	left := v.columns
	for _, c := range l {
		text := printable(c.text)
		if n := utf8.RuneCountInString(text); v.columns > 0 {
			if n > left {
				text = string([]rune(text)[:max(left-1, 0)]) + "…"
				n = left
			}
			left -= n
		}
		if code := colors[c.attention]; v.color && code != "" {
			text = "\x1b[" + code + "m" + text + "\x1b[m"
		}
		b.WriteString(text)
		if v.columns > 0 && left <= 0 {
			break
		}
	}
	return b.String()
}

// colors are the ECMA-48 attributes of each attention: none, yellow, bold red.
var colors = [...]string{good: "", doubtful: "33", bad: "1;31"}

// share divides n lines among sections that want so many each: an equal part, and what others
// leave to the first ones.
func share(n int, wanted []int) []int {
	parts, left := make([]int, len(wanted)), max(n, 0)
	for i, w := range wanted {
		parts[i] = min(w, max(n, 0)/len(wanted))
		left -= parts[i]
	}
	for i, w := range wanted {
		more := min(w-parts[i], left)
		parts[i], left = parts[i]+more, left-more
	}
	return parts
}
