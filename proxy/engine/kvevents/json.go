package kvevents

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// cursor reads JSON values one after the other, in place. A value that the cursor cannot
// read sets bad. From then on the cursor returns zeroes and does not advance. To read the
// text only once, the cursor validates only the parts that determine its position.
type cursor struct {
	text []byte
	at   int
	bad  bool
}

// peek returns the first byte of the next value, 0 at the end.
func (c *cursor) peek() byte {
	for ; c.at < len(c.text); c.at++ {
		switch b := c.text[c.at]; b {
		case ' ', '\t', '\n', '\r':
		default:
			return b
		}
	}
	return 0
}

// open enters an array or object.
func (c *cursor) open(bracket byte) {
	if c.bad || c.peek() != bracket {
		c.bad = true
		return
	}
	c.at++
}

// next moves to the next element of the array or object that ends with bracket. If
// there is none it leaves the array or object and returns false.
func (c *cursor) next(bracket byte) bool {
	b := c.peek()
	switch {
	case c.bad:
		return false
	case b == bracket:
		c.at++
		return false
	case b == ',':
		c.at++
	case b == 0:
		c.bad = true
	}
	return !c.bad
}

// key reads the name of an object's member. It is valid until the next read.
func (c *cursor) key() []byte {
	name := c.quoted()
	if c.peek() != ':' {
		c.bad = true
		return nil
	}
	c.at++
	return name
}

// quoted reads a string in its raw form, without its quotes.
func (c *cursor) quoted() []byte {
	if c.bad || c.peek() != '"' {
		c.bad = true
		return nil
	}
	from := c.at + 1
	for i := from; i < len(c.text); i++ {
		switch c.text[i] {
		case '"':
			c.at = i + 1
			return c.text[from:i]
		case '\\':
			i++
		}
	}
	c.bad = true
	return nil
}

// str reads a string. It reuses *last if the text is the same.
func (c *cursor) str(last *string) string {
	raw := c.quoted()
	if bytes.IndexByte(raw, '\\') < 0 {
		return intern(last, raw)
	}
	if json.Unmarshal(c.text[c.at-len(raw)-2:c.at], last) != nil {
		c.bad = true
	}
	return *last
}

// integer reads a 64-bit integer, signed or unsigned, and returns its bits.
func (c *cursor) integer() uint64 {
	negative := c.peek() == '-'
	if negative {
		c.at++
	}
	from := c.at
	for c.at < len(c.text) && c.text[c.at]-'0' <= 9 {
		c.at++
	}
	digits := c.text[from:c.at]
	if c.bad || len(digits) == 0 || len(digits) > 20 {
		c.bad = true
		return 0
	}
	var n uint64
	for _, d := range digits {
		n = n*10 + uint64(d-'0')
	}
	if len(digits) == 20 {
		var err error
		if n, err = strconv.ParseUint(string(digits), 10, 64); err != nil {
			c.bad = true
		}
	}
	if negative {
		return -n
	}
	return n
}

// null skips a null and reports whether the next value was one.
func (c *cursor) null() bool {
	if c.peek() != 'n' {
		return false
	}
	c.skip()
	return true
}

// skip skips a value and returns its raw text.
func (c *cursor) skip() []byte {
	first := c.peek()
	from := c.at
	switch first {
	case '"':
		c.quoted()
	case '{', '[':
		c.skipNested()
	case 0, ',', ':', ']', '}':
		c.bad = true
	default:
		for c.at < len(c.text) && bytes.IndexByte([]byte(",:]} \t\r\n"), c.text[c.at]) < 0 {
			c.at++
		}
	}
	return c.text[from:c.at]
}

func (c *cursor) skipNested() {
	for depth := 0; c.at < len(c.text); {
		switch c.text[c.at] {
		case '"':
			if c.quoted(); c.bad {
				return
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		}
		c.at++
		if depth == 0 {
			return
		}
	}
	c.bad = true
}
