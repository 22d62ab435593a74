package stableprefix

import "bytes"

// maxLine is the length of the longest line that a rule matches, in bytes of the body. The lines
// of the agents have less than 120.
const maxLine = 256

// find returns the parts of the content of a string that the rule matches, in their order.
func (r *Rule) find(s []byte, list []span) []span {
	if r.extent == pairs {
		if end, ok := headerEnd(s, r.begin); ok {
			list = append(list, span{0, end})
		}
		return list
	}
	for i := 0; i < len(s); {
		end, next := lineEnd(s, i)
		if from, ok := follows(s, blanks(s, i), r.begin); ok && from <= end {
			switch {
			case r.extent == rest:
				return append(list, span{i, len(s)})
			case next-i <= maxLine && endsWith(s[from:end], r.tail):
				list = append(list, span{i, next})
			}
		}
		i = next
	}
	return list
}

// headerEnd returns the end of a header at the beginning of a text: its name, one or more pairs
// of the form " key=value;", and the line feeds after them. A sentence about the header has
// another form.
func headerEnd(s []byte, name string) (end int, ok bool) {
	i, ok := follows(s, 0, name)
	if !ok {
		return 0, false
	}
	for {
		next, found := pairEnd(s, blanks(s, i))
		if !found {
			break
		}
		i, end = next, next
	}
	if end == 0 {
		return 0, false
	}
	for end = blanks(s, end); ; {
		c, size := char(s, end)
		if c != '\n' {
			return end, true
		}
		end += size
	}
}

// pairEnd returns the end of "key=value;" at i. The last pair of a text may end without a
// semicolon.
func pairEnd(s []byte, i int) (end int, ok bool) {
	start := i
	for i < len(s) && (s[i] == '_' || s[i] == '-' || s[i] >= '0' && s[i] <= '9' || s[i]|0x20 >= 'a' && s[i]|0x20 <= 'z') {
		i++
	}
	if i == start || i == len(s) || s[i] != '=' {
		return 0, false
	}
	for i++; i < len(s); i++ {
		switch c := s[i]; {
		case c == ';':
			return i + 1, i-start <= maxLine
		case c <= ' ' || c == '\\':
			return 0, false
		}
	}
	return i, i-start <= maxLine
}

// blanks returns the first position from i that is neither a space nor a tab.
func blanks(s []byte, i int) int {
	for {
		c, size := char(s, i)
		if c != ' ' && c != '\t' {
			return i
		}
		i += size
	}
}

// endsWith reports whether a line ends with tail, before white space.
func endsWith(line []byte, tail string) bool {
	if tail == "" {
		return true
	}
	for i := range line {
		if end, ok := follows(line, i, tail); ok && blanks(line, end) == len(line) {
			return true
		}
	}
	return false
}

// firsts are the different first bytes of the texts of agents.
var firsts = func() (all []byte) {
	for _, a := range agents {
		for _, begin := range a.texts {
			if !bytes.Contains(all, []byte{begin[0]}) {
				all = append(all, begin[0])
			}
		}
	}
	return all
}()

// Mentions reports whether a string in the first bytes of a body begins like a system text of an
// agent. It may be a text of a user: recognize decides when the whole body is known.
func Mentions(first []byte) bool {
	for _, c := range firsts { // IndexByte is much faster in WebAssembly than a loop over the bytes
		for i := 1; i < len(first); i++ {
			n := bytes.IndexByte(first[i:], c)
			if n < 0 {
				break
			}
			if i += n; first[i-1] == '"' && recognize(first[i:]) != 0 {
				return true
			}
		}
	}
	return false
}

// recognize returns the agent whose system text begins like s.
func recognize(s []byte) Agents {
	for _, a := range agents {
		for _, begin := range a.texts {
			if _, ok := follows(s, 0, begin); ok {
				return a.agent
			}
		}
	}
	return 0
}
