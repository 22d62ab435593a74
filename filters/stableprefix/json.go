package stableprefix

import "bytes"

// span is a range of bytes in a body. The zero value is no range.
type span struct{ start, end int }

func (s span) none() bool { return s.end == 0 }

// of returns the bytes of the span.
func (s span) of(b []byte) []byte { return b[s.start:s.end] }

// inner returns the content of a string without its quotes; none if s is none.
func (s span) inner() span {
	if s.end-s.start < 2 {
		return span{}
	}
	return span{s.start + 1, s.end - 1}
}

// cursor reads a body from its beginning to its end, once. It checks only what it needs to find the
// end of each value: the proxy checks the whole body afterwards.
type cursor struct {
	b   []byte
	i   int
	bad bool // the body is no JSON: no position is right
}

// next skips white space and returns the byte after it, 0 at the end.
func (c *cursor) next() byte {
	for ; c.i < len(c.b); c.i++ {
		if v := c.b[c.i]; v > ' ' {
			return v
		}
	}
	return 0
}

// fail notes that the body is no JSON.
func (c *cursor) fail() { c.bad, c.i = true, len(c.b) }

// value skips a value and returns its position.
func (c *cursor) value() span {
	first := c.next()
	start := c.i
	switch first {
	case '"':
		c.text()
	case '{', '[':
		c.container()
	default:
		for c.i < len(c.b) && c.b[c.i] > ' ' && c.b[c.i] != ',' && c.b[c.i] != '}' && c.b[c.i] != ']' {
			c.i++
		}
		if c.i == start {
			c.fail()
		}
	}
	return span{start, c.i}
}

// text skips a string. IndexByte is much faster in WebAssembly than a loop over the bytes.
func (c *cursor) text() {
	b, i := c.b, c.i+1
	for {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			c.fail()
			return
		}
		i += n
		escapes := i
		for b[escapes-1] == '\\' {
			escapes--
		}
		i++
		if (i-escapes)&1 != 0 {
			c.i = i
			return
		}
	}
}

// container skips an object or an array.
func (c *cursor) container() {
	for depth := 0; c.i < len(c.b); {
		switch c.b[c.i] {
		case '"':
			c.text()
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				c.i++
				return
			}
		}
		c.i++
	}
	c.fail()
}

// object calls f for each member of an object, with its name and the position where it begins. f
// reads the value. object skips another value than an object. The name is as in the body, without
// quotes: no rule finds a name with escapes.
func (c *cursor) object(f func(name []byte, at int)) {
	if c.next() != '{' {
		c.value()
		return
	}
	for c.i++; c.next() == '"'; {
		at := c.i
		c.text()
		name := span{at, c.i}
		if c.next() != ':' {
			break
		}
		c.i++
		c.next()
		f(name.inner().of(c.b), at)
		if c.next() == ',' {
			c.i++
		}
	}
	c.end('}')
}

// array calls f for each element of an array. f reads the element. array skips another value than
// an array. It returns the positions of the elements.
func (c *cursor) array(f func(list *[]span)) {
	if c.next() != '[' {
		c.value()
		return
	}
	list := new([]span)
	for c.i++; c.next() != ']' && !c.bad; {
		start := c.i
		f(list)
		*list = append(*list, span{start, c.i})
		if c.next() == ',' {
			c.i++
		} else if c.next() != ']' {
			c.fail()
		}
	}
	c.end(']')
}

// end reads the end of an object or an array.
func (c *cursor) end(want byte) {
	if c.bad || c.next() != want {
		c.fail()
		return
	}
	c.i++
}

// string returns the position of a string; none for another value, which it skips.
func (c *cursor) string() span {
	if c.next() != '"' {
		c.value()
		return span{}
	}
	return c.value()
}

// char decodes the character at i of the content of a string. size is its length in the body, 0
// at the end. c is 0 for a character that no rule has: one of several bytes, or a wrong escape.
func char(s []byte, i int) (c byte, size int) {
	switch {
	case i >= len(s):
		return 0, 0
	case s[i] != '\\':
		return s[i], 1
	case i+1 == len(s):
		return 0, 1
	}
	switch c := s[i+1]; c {
	case 'n':
		return '\n', 2
	case 't':
		return '\t', 2
	case 'r':
		return '\r', 2
	case '"', '\\', '/':
		return c, 2
	case 'u':
		return unicode(s, i)
	}
	return 0, 2
}

// unicode decodes the escape \uXXXX at i.
func unicode(s []byte, i int) (c byte, size int) {
	if i+6 > len(s) {
		return 0, len(s) - i
	}
	n := 0
	for _, d := range s[i+2 : i+6] {
		switch {
		case d >= '0' && d <= '9':
			n = n<<4 | int(d-'0')
		case d|0x20 >= 'a' && d|0x20 <= 'f':
			n = n<<4 | int(d|0x20-'a'+10)
		default:
			return 0, 6
		}
	}
	if n >= 0x80 {
		n = 0
	}
	return byte(n), 6
}

// follows returns the end of want at i of the content of a string, where characters may be
// escaped. ok is false if the string has other characters there.
func follows(s []byte, i int, want string) (end int, ok bool) {
	for k := range len(want) {
		c, size := char(s, i)
		if size == 0 || c != want[k] {
			return 0, false
		}
		i += size
	}
	return i, true
}

// lineEnd returns the end of the line at i: the position of its line feed, and the position after
// it. Both are the end of the string if there is none.
func lineEnd(s []byte, i int) (end, next int) {
	for {
		n := bytes.IndexByte(s[i:], '\\')
		if n < 0 {
			return len(s), len(s)
		}
		i += n
		c, size := char(s, i)
		if c == '\n' {
			return i, i + size
		}
		i += size
	}
}
