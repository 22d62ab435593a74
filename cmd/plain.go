package cmd

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// plain formats texts of clients, engines and files as fmt.Sprintf does, without the characters
// that would move the cursor or change the terminal.
func plain(format string, args ...any) string {
	for i, arg := range args {
		switch v := arg.(type) {
		case string:
			args[i] = printable(v)
		case error, fmt.Stringer:
			args[i] = printable(fmt.Sprint(v))
		}
	}
	return fmt.Sprintf(format, args...)
}

// printable replaces characters that would move the cursor or change the terminal: clients choose
// request ids, engines choose the names of models and the texts of errors.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}

// printableLines is printable for a text of several lines.
func printableLines(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = printable(strings.ReplaceAll(line, "\t", "    "))
	}
	return strings.Join(lines, "\n")
}

const (
	tableWidth = 100 // columns of a table whose last column has long texts
	lastWidth  = 30  // columns of the last column, if the others leave fewer
)

// plainTable returns rows with aligned columns, as plain does. The last column continues on further
// lines.
func plainTable(rows [][]string) string {
	var out strings.Builder
	widths := make([]int, len(rows[0])-1)
	indent := 0
	for i := range widths {
		for _, row := range rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
		widths[i] += 2
		indent += widths[i]
	}
	for _, row := range rows {
		begin := ""
		for i, width := range widths {
			begin += fmt.Sprintf("%-*s", width, printable(row[i]))
		}
		for _, text := range wrapped(printable(row[len(widths)]), max(tableWidth-indent, lastWidth)) {
			out.WriteString(strings.TrimRight(begin+text, " ") + "\n")
			begin = strings.Repeat(" ", indent)
		}
	}
	return out.String()
}

// wrapped splits a text between its words into lines of at most width columns. A longer word is a
// line of its own.
func wrapped(text string, width int) (lines []string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			lines, line = append(lines, line), word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
