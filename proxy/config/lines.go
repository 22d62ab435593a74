package config

import (
	"strings"

	"github.com/BurntSushi/toml"
)

// lineIndex maps a full key (engine[1].role) to the line, from 1, of its first
// occurrence.
type lineIndex map[string]int

// line returns the line of key. If key is missing, it returns the line of the name of its
// entry, which tells more than the line [[engine]], or that of the nearest table or array
// around key, or 0.
func (x lineIndex) line(key string) int {
	missing := false
	for key != "" {
		if n, found := x[key]; found {
			if name, named := x[joinKey(key, "name")]; named && missing && strings.HasSuffix(key, "]") {
				return name
			}
			return n
		}
		missing = true
		key = key[:max(strings.LastIndexAny(key, ".["), 0)]
	}
	return 0
}

// lineScanner walks the text of a TOML file and notes the line of each key. It is not a
// parser: a parser has already accepted the text. On malformed text it notes fewer keys
// but always reaches the end.
type lineScanner struct {
	text  string
	pos   int
	line  int            // the line of pos, from 1
	index lineIndex      // lines of the keys found so far
	count map[string]int // entries so far of each [[array]]
}

// scanLines returns the lines of all keys in text: those of tables, of array
// entries, of dotted, quoted and inline keys.
func scanLines(text string) lineIndex {
	for _, mark := range []string{"\xef\xbb\xbf", "\xff\xfe", "\xfe\xff"} {
		if rest, found := strings.CutPrefix(text, mark); found {
			text = rest
			break
		}
	}
	s := &lineScanner{text: text, line: 1, index: lineIndex{}, count: map[string]int{}}
	table := ""
	for s.blank(true); s.pos < len(s.text); s.blank(true) {
		switch start := s.pos; {
		case s.take("[["):
			table = s.header(s.keyParts(), true)
			s.take("]]")
		case s.take("["):
			table = s.header(s.keyParts(), false)
			s.take("]")
		default:
			s.pair(table)
			s.leave(start)
		}
	}
	return s.index
}

// note records key at line, unless it was seen before.
func (s *lineScanner) note(key string, line int) {
	if _, seen := s.index[key]; !seen {
		s.index[key] = line
	}
}

// header resolves the parts of a [table] or [[array]] header to the full key
// of the table that it opens: a part that names an array means its latest
// entry.
func (s *lineScanner) header(parts []string, array bool) string {
	path := ""
	for i, part := range parts {
		path = joinKey(path, part)
		s.note(path, s.line)
		if array && i == len(parts)-1 {
			s.count[path]++
		}
		if n := s.count[path]; n > 0 {
			path = indexKey(path, n-1)
			s.note(path, s.line)
		}
	}
	return path
}

// pair reads "key = value" in the table whose key is table, and notes the key and, for
// a dotted key, the tables that it implies.
func (s *lineScanner) pair(table string) {
	line, key := s.line, table
	for _, part := range s.keyParts() {
		key = joinKey(key, part)
		s.note(key, line)
	}
	s.blank(false)
	if s.take("=") {
		s.value(key)
	}
}

// value skips a value and notes the keys inside it.
func (s *lineScanner) value(key string) {
	s.blank(false)
	switch {
	case s.take("["):
		for i := 0; s.more("]"); i++ {
			entry := indexKey(key, i)
			s.note(entry, s.line)
			start := s.pos
			s.value(entry)
			s.leave(start)
		}
	case s.take("{"):
		for s.more("}") {
			start := s.pos
			s.pair(key)
			s.leave(start)
		}
	case s.pos < len(s.text) && (s.text[s.pos] == '"' || s.text[s.pos] == '\''):
		s.quoted()
	default:
		for s.pos < len(s.text) && !strings.ContainsRune(",]}#\r\n", rune(s.text[s.pos])) {
			s.next()
		}
	}
}

// more moves to the next entry of an array or inline table and reports whether there is
// one. If there is none, it skips the closing mark.
func (s *lineScanner) more(closing string) bool {
	s.blank(true)
	for s.take(",") {
		s.blank(true)
	}
	return s.pos < len(s.text) && !s.take(closing)
}

// leave skips one byte if nothing was read since start, so that malformed text also
// reaches its end.
func (s *lineScanner) leave(start int) {
	if s.pos == start {
		s.next()
	}
}

// keyParts reads a key with its dots: bare and quoted parts.
func (s *lineScanner) keyParts() []string {
	var parts []string
	for {
		s.blank(false)
		if s.pos < len(s.text) && (s.text[s.pos] == '"' || s.text[s.pos] == '\'') {
			parts = append(parts, unquote(s.quoted()))
		} else {
			start := s.pos
			for s.pos < len(s.text) && !strings.ContainsRune(" \t\r\n.=[]{},#\"'", rune(s.text[s.pos])) {
				s.next()
			}
			if start == s.pos {
				return parts
			}
			parts = append(parts, s.text[start:s.pos])
		}
		s.blank(false)
		if !s.take(".") {
			return parts
		}
	}
}

// quoted skips a string of any of the four kinds and returns it with its
// quotes.
func (s *lineScanner) quoted() string {
	start := s.pos
	quote := s.text[s.pos : s.pos+1]
	escapes := quote == `"`
	if s.take(strings.Repeat(quote, 3)) {
		quote = strings.Repeat(quote, 3)
	} else {
		s.next()
	}
	for s.pos < len(s.text) && !s.take(quote) {
		if escapes && s.text[s.pos] == '\\' {
			s.next()
		}
		s.next()
	}
	// One or two quotes directly before the closing three belong to the string.
	for range 2 {
		if len(quote) == 3 {
			s.take(quote[:1])
		}
	}
	return s.text[start:s.pos]
}

// unquote returns the text of a quoted key, or its source if it cannot be unquoted.
func unquote(quoted string) string {
	var key struct{ Text string }
	if _, err := toml.Decode("Text = "+quoted, &key); err != nil {
		return quoted
	}
	return key.Text
}

// blank skips spaces, and with lines also line ends and comments.
func (s *lineScanner) blank(lines bool) {
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; {
		case c == ' ' || c == '\t':
			s.next()
		case lines && (c == '\n' || c == '\r'):
			s.next()
		case lines && c == '#':
			for s.pos < len(s.text) && s.text[s.pos] != '\n' {
				s.next()
			}
		default:
			return
		}
	}
}

// take skips mark if mark is at pos.
func (s *lineScanner) take(mark string) bool {
	if !strings.HasPrefix(s.text[s.pos:], mark) {
		return false
	}
	for range len(mark) {
		s.next()
	}
	return true
}

// next moves one byte on, counting lines; at the end of the text it stays.
func (s *lineScanner) next() {
	if s.pos >= len(s.text) {
		return
	}
	if s.text[s.pos] == '\n' {
		s.line++
	}
	s.pos++
}
