package config

import (
	"fmt"
	"strings"
)

// Limits of one text of the configuration or of a list of engines, TOML or JSON. They are far
// above those of real files. The TOML library needs memory and time in proportion to the square of
// the nesting and of the parts of a key, and an entry becomes up to 5 KiB of memory: a short text
// could otherwise end the process.
const (
	maxText    = 4 << 20 // bytes
	maxNesting = 32      // tables and arrays inside each other
	maxParts   = 32      // parts of a dotted key
	maxEntries = 1 << 17 // keys, tables, and elements of arrays
	// maxProblems bounds the reported problems. The others are found after these are fixed.
	maxProblems = 1000
	// maxKeyText bounds, in bytes, the text of a key or a value that a problem repeats.
	maxKeyText = 200
)

// shape finds out, without a parser, how much memory a text would need: it reads the strings,
// comments, brackets and dots of TOML, of which JSON has a part. Of a malformed text it reads the
// part before the first error as a parser does.
type shape struct {
	text    string
	pos     int
	nesting int
	parts   int // dots since the last mark that is not part of a key
	entries int
}

// checkShape returns the problem of a text that exceeds the limits; nil: there is none.
func checkShape(text string) *Problem {
	if len(text) > maxText {
		return &Problem{Message: fmt.Sprintf("the text has more than %d bytes", maxText)}
	}
	s := &shape{text: text}
	for s.pos < len(s.text) {
		if message := s.next(); message != "" {
			return &Problem{Line: 1 + strings.Count(text[:min(s.pos, len(text))], "\n"), Message: message}
		}
	}
	return nil
}

// next reads one token. The result is not empty if the text exceeds a limit there.
func (s *shape) next() string {
	c := s.text[s.pos]
	s.pos++
	switch c {
	case '"', '\'':
		s.quoted(c)
		return ""
	case '#':
		if end := strings.IndexByte(s.text[s.pos:], '\n'); end >= 0 {
			s.pos += end
		} else {
			s.pos = len(s.text)
		}
		return ""
	case '.':
		s.parts++
		s.entries++
	case '[', '{':
		s.nesting++
		s.entries++
		s.parts = 0
	case ']', '}':
		s.nesting = max(s.nesting-1, 0)
		s.parts = 0
	case '=', ',', ':':
		s.entries++
		s.parts = 0
	case '\n':
		s.parts = 0
	}
	switch {
	case s.nesting > maxNesting:
		return fmt.Sprintf("tables and arrays are nested more than %d levels deep", maxNesting)
	case s.parts >= maxParts:
		return fmt.Sprintf("a key has more than %d parts", maxParts)
	case s.entries > maxEntries:
		return fmt.Sprintf("the text has more than %d keys, tables and elements of arrays", maxEntries)
	}
	return ""
}

// quoted skips the rest of a string. A string of one line ends at the line's end at the latest.
func (s *shape) quoted(quote byte) {
	triple := strings.Repeat(string(quote), 3)
	lines := strings.HasPrefix(s.text[s.pos-1:], triple)
	if lines {
		s.pos += 2
	}
	for s.pos < len(s.text) {
		c := s.text[s.pos]
		switch {
		case c == '\\' && quote == '"':
			s.pos++
		case c == '\n' && !lines:
			return
		case c == quote && !lines:
			s.pos++
			return
		case c == quote && strings.HasPrefix(s.text[s.pos:], triple):
			s.pos += 3
			for n := 0; n < 2 && s.pos < len(s.text) && s.text[s.pos] == quote; n++ {
				s.pos++ // one or two quotes directly before the closing three belong to the string
			}
			return
		}
		s.pos++
	}
}

// shortened bounds a text that a problem repeats.
func shortened(text string) string {
	if len(text) <= maxKeyText {
		return text
	}
	return strings.ToValidUTF8(text[:maxKeyText], "") + "…"
}
