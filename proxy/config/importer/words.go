package importer

import (
	"path"
	"slices"
	"strings"
)

// A flag file is a command line as in a shell or a service file: words, quotes,
// backslashes at line ends, comments. One flag on each line is the same with other line
// ends, and so are the "- --flag" lines of a Kubernetes manifest.

// word is one argument.
type word struct {
	text string
	line int
	// quoted: a part of the word was in quotes. Then "-" or ">" is literal.
	quoted bool
	// operator: the word is a shell operator that ends the command.
	operator bool
	// open names an expansion that only a shell could make.
	open string
}

// wordReader splits a flag file.
type wordReader struct {
	*report
	file  string
	text  string
	at    int
	line  int
	words []word
	// script: a line end also ends a command, as in a shell. In a file of flags each line may
	// hold one flag.
	script bool
}

// split returns the words of a file.
func (w *wordReader) split() []word {
	for w.at < len(w.text) {
		switch c := w.text[w.at]; {
		case c == '\n':
			if w.script {
				w.words = append(w.words, word{line: w.line, operator: true})
			}
			w.line++
			w.at++
		case c == ' ' || c == '\t' || c == '\r':
			w.at++
		case c == '#':
			for w.at < len(w.text) && w.text[w.at] != '\n' {
				w.at++
			}
		case c == '\\' && w.lineEnd(w.at+1) > 0:
			w.at += 1 + w.lineEnd(w.at+1)
			w.line++
		case strings.IndexByte("<>|&;()", c) >= 0:
			w.words = append(w.words, word{line: w.line, operator: true})
			w.at++
		default:
			w.word()
		}
	}
	return w.words
}

// lineEnd returns the length of the line end at i, or 0.
func (w *wordReader) lineEnd(i int) int {
	switch rest := w.text[min(i, len(w.text)):]; {
	case strings.HasPrefix(rest, "\n"):
		return 1
	case strings.HasPrefix(rest, "\r\n"):
		return 2
	}
	return 0
}

// word reads one word.
func (w *wordReader) word() {
	var b strings.Builder
	out := word{line: w.line}
	var quote byte
	for ; w.at < len(w.text); w.at++ {
		c := w.text[w.at]
		switch {
		case quote == 0 && strings.IndexByte(" \t\r\n<>|&;()", c) >= 0:
			out.text = b.String()
			w.words = append(w.words, out)
			return
		case quote == 0 && (c == '\'' || c == '"'):
			quote, out.quoted = c, true
		case c == quote:
			quote = 0
		case quote != '\'' && c == '$':
			out.open = "the shell would replace this variable: write its value"
			b.WriteByte(c)
		case quote != '\'' && c == '`':
			out.open = "the shell would run this command: write the output of the command"
		case quote != '\'' && c == '\\' && w.lineEnd(w.at+1) > 0:
			w.at += w.lineEnd(w.at + 1)
			w.line++
		case quote != '\'' && c == '\\' && w.at+1 < len(w.text):
			w.at++
			b.WriteByte(w.text[w.at])
		default:
			if c == '\n' {
				w.line++
			}
			b.WriteByte(c)
		}
	}
	if quote != 0 {
		w.problem(w.file, out.line, "", "a quote is not closed")
	}
	out.text = b.String()
	w.words = append(w.words, out)
}

// arguments returns the words after the program's name, up to the end of the command.
func arguments(words []word, programs []string) []word {
	start := 0
	for i, w := range words {
		name := path.Base(w.text)
		after := i == 0 || !strings.HasPrefix(words[i-1].text, "-") || words[i-1].text == "-m" || words[i-1].text == "-"
		if after && slices.Contains(programs, name) {
			start = i + 1
			break
		}
	}
	words = words[start:]
	// Words before the first flag start the program: cargo run --release --.
	if i := slices.IndexFunc(words, func(w word) bool { return w.text == "--" }); i >= 0 {
		words = words[i+1:]
	}
	if i := slices.IndexFunc(words, isFlag); i >= 0 && !slices.ContainsFunc(words[:i], func(w word) bool { return w.operator }) {
		words = words[i:]
	}
	if i := slices.IndexFunc(words, func(w word) bool { return w.operator }); i >= 0 {
		// The number before a redirection is a descriptor.
		if i > 0 && words[i-1].text == "2" && !words[i-1].quoted {
			i--
		}
		words = words[:i]
	}
	return slices.DeleteFunc(slices.Clone(words), func(w word) bool { return w.text == "-" && !w.quoted })
}
