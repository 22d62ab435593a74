package kvevents

import (
	"bytes"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// cursor reads the values of events.
type cursor struct{ openai.Cursor }

// str reads a string. It reuses *last if the text is the same.
func (c *cursor) str(last *string) string {
	raw := c.Skip()
	switch {
	case len(raw) < 2 || raw[0] != '"':
		c.Bad = true
	case bytes.IndexByte(raw, '\\') < 0:
		intern(last, raw[1:len(raw)-1])
	default:
		text, ok := openai.String(raw)
		c.Bad = !ok
		*last = text
	}
	return *last
}

// integer reads a 64-bit integer, signed or unsigned, and returns its bits.
func (c *cursor) integer() uint64 {
	raw := c.Skip()
	digits := bytes.TrimPrefix(raw, []byte("-"))
	if len(digits) == 0 || len(digits) > 20 {
		c.Bad = true
		return 0
	}
	var n uint64
	for _, d := range digits {
		c.Bad = c.Bad || d-'0' > 9
		n = n*10 + uint64(d-'0')
	}
	if len(digits) == 20 {
		var err error
		if n, err = strconv.ParseUint(string(digits), 10, 64); err != nil {
			c.Bad = true
		}
	}
	if len(digits) < len(raw) {
		return -n
	}
	return n
}

// null skips a null and reports whether the next value was one.
func (c *cursor) null() bool {
	if c.Peek() != 'n' {
		return false
	}
	c.Skip()
	return true
}

// hash reads a block hash: a number, or the hexadecimal digits of a digest, of which
// the first sixteen count, as in v2_sha256_64.
func (c *cursor) hash() uint64 {
	if c.Peek() != '"' {
		return c.integer()
	}
	digits := c.Quoted()
	n, err := strconv.ParseUint(string(digits[:min(len(digits), 16)]), 16, 64)
	if err != nil {
		c.Bad = true
	}
	return n
}
