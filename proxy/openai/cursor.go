package openai

import (
	"bytes"
	"iter"
	"strconv"
	"sync"
	"unsafe"
)

// SyntaxError reports that bytes from an engine are not valid JSON for the scan.
type SyntaxError struct {
	Problem string // the error, without text of the bytes
	Offset  int    // its position
}

func (e *SyntaxError) Error() string {
	return "invalid JSON: " + e.Problem + ", at byte " + strconv.Itoa(e.Offset)
}

// Lookup returns the raw JSON of a nested member. Each step of the path is a key of an
// object, or the index of an element of an array in decimal. Lookup checks all of raw,
// as strictly as Parse, and builds no tree. ok is false if there is no such member; a
// null counts as found. The error is a *SyntaxError.
func Lookup(raw []byte, path ...string) (value []byte, ok bool, err error) {
	room := keyRooms.Get().(*[pairwiseKeys]keyRef)
	defer keyRooms.Put(room)
	s := scanner{b: raw, keys: room[:0]}
	if len(raw) > maxBody {
		s.fail(maxBody, "longer than 2 GiB")
	} else if i, _ := s.value(skipSpace(raw, 0), 1); s.tail(i) >= 0 {
		value, ok = Find(raw, path...)
		return value, ok, nil
	}
	return nil, false, &SyntaxError{Problem: s.problem, Offset: s.offset}
}

// keyRooms has memory for the keys of a scan.
var keyRooms = sync.Pool{New: func() any { return new([pairwiseKeys]keyRef) }}

// Elements checks raw as strictly as Parse, and returns the raw JSON of each element of
// the array in it. The error is a *SyntaxError.
func Elements(raw []byte) (iter.Seq[[]byte], error) {
	list, _, err := Lookup(raw)
	if err != nil {
		return nil, err
	}
	if list[0] != '[' {
		return nil, &SyntaxError{Problem: "not an array", Offset: skipSpace(raw, 0)}
	}
	return func(yield func([]byte) bool) {
		c := Cursor{Text: list}
		for c.Open('['); c.Next(']') && yield(c.Skip()); {
		}
	}, nil
}

// Find is Lookup in JSON that has been checked, such as a result of Lookup. In other bytes it
// finds nothing or a wrong value.
func Find(raw []byte, path ...string) (value []byte, ok bool) {
	c := Cursor{Text: raw}
	for _, step := range path {
		found := false
		switch c.Peek() {
		case '{':
			for c.Open('{'); !found && c.Next('}'); {
				if found = unescapedName(c.Key) == step; !found {
					c.Skip()
				}
			}
		case '[':
			index, err := strconv.Atoi(step)
			for c.Open('['); err == nil && !found && c.Next(']'); index-- {
				if found = index == 0; !found {
					c.Skip()
				}
			}
		}
		if !found {
			return nil, false
		}
	}
	value = c.Skip()
	return value, len(value) > 0
}

// Cursor reads JSON values one after the other, in place and without an allocation:
//
//	c := Cursor{Text: raw}
//	for c.Open('{'); c.Next('}'); {
//		switch string(c.Key) {
//		case "usage":
//			usage = c.Skip()
//		default:
//			c.Skip()
//		}
//	}
//
// It checks only the bytes that determine its position, so that it is several times as fast as
// the scan: its text has been scanned before, or comes from an engine and only a few values of it
// are needed. In invalid JSON it finds nothing or a wrong value, and ends. It belongs to one
// goroutine.
type Cursor struct {
	Text []byte
	// Key is the raw name of the member before the cursor, without its quotes. It points into
	// Text, and is valid until the next Next('}').
	Key []byte
	// Bad is set by a value that the cursor cannot read. From then on the cursor returns nothing and
	// does not advance. The reader may set it too.
	Bad bool

	at  int // position in Text
	key int // position of the opening quote of Key
}

// Peek returns the first byte of the next value, or the byte that is in its place; 0 at the end.
func (c *Cursor) Peek() byte {
	if c.at = skipSpace(c.Text, c.at); c.at < len(c.Text) {
		return c.Text[c.at]
	}
	return 0
}

// Open enters an array or object that begins with bracket.
func (c *Cursor) Open(bracket byte) {
	if c.Peek() != bracket || c.Bad {
		c.Bad = true
		return
	}
	c.at++
}

// Next moves to the next element of the array, or to the value of the next member of the object,
// that ends with bracket. After the last one it leaves the array or object and returns false.
func (c *Cursor) Next(bracket byte) bool {
	b := c.Peek()
	switch {
	case c.Bad:
		return false
	case b == bracket:
		c.at++
		return false
	case b == ',':
		c.at++
	case b == 0:
		c.Bad = true
		return false
	}
	if bracket != '}' {
		return true
	}
	if c.Peek() == '"' {
		if end := skipString(c.Text, c.at); end > 0 {
			c.key, c.Key = c.at, c.Text[c.at+1:end-1]
			if c.at = end; c.Peek() == ':' {
				c.at++
				return true
			}
		}
	}
	c.Bad = true
	return false
}

// Quoted reads a string and returns it raw, without its quotes.
func (c *Cursor) Quoted() []byte {
	if c.Peek() == '"' && !c.Bad {
		if end := skipString(c.Text, c.at); end > 0 {
			text := c.Text[c.at+1 : end-1]
			c.at = end
			return text
		}
	}
	c.Bad = true
	return nil
}

// Skip skips a value and returns its raw bytes. Their capacity is limited, so that appending to
// them cannot overwrite the text.
func (c *Cursor) Skip() []byte {
	first, b, end := c.Peek(), c.Text, c.at
	switch {
	case c.Bad:
	case first == '"':
		end = skipString(b, end)
	case first == '{' || first == '[':
		if list := numbersEnd(b, end); first == '[' && list > 0 {
			end = list
			break
		}
		for depth := 0; ; {
			if end >= len(b) || end < 0 {
				end = -1 // the value does not end
				break
			}
			switch b[end] {
			case '"':
				end = skipString(b, end)
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
			}
			if end++; depth == 0 {
				break
			}
		}
	default:
		for end < len(b) && b[end] > ' ' && b[end] != ',' && b[end] != ':' && b[end] != ']' && b[end] != '}' {
			end++
		}
	}
	if end <= c.at {
		c.Bad = true
		return nil
	}
	value := b[c.at:end:end]
	c.at = end
	return value
}

// numbersEnd returns the end of an array at i whose elements are numbers, as token ids are; 0 for
// another array. A list of ids may be longer than the rest of its text, so numbersEnd does not look at
// each element.
func numbersEnd(b []byte, i int) int {
	if i+1 >= len(b) || b[i+1]-'0' > 9 {
		return 0
	}
	n := bytes.IndexByte(b[i:], ']')
	if n < 0 {
		return 0
	}
	for _, c := range []byte("[{\"") {
		if bytes.IndexByte(b[i+1:i+n], c) >= 0 {
			return 0
		}
	}
	return i + n + 1
}

// Walk visits every value in the next value, which is checked JSON, at every depth, in one pass. key
// is the unescaped name of the member that contains the visited value, and lists the number of
// arrays of that member around it; the next value itself has the key and lists that Walk was given.
// A key with escapes of more than 1024 bytes is given as written. value is raw; for an object or an
// array it is the bytes from its start to the end of the text. visit reports whether to visit the
// value's content. A key is valid only while visit runs.
func (c *Cursor) Walk(key string, lists int, visit func(key string, lists int, value []byte) (enter bool)) {
	first := c.Peek()
	switch {
	case first != '{' && first != '[':
		if value := c.Skip(); !c.Bad {
			visit(key, lists, value)
		}
	case !visit(key, lists, c.Text[c.at:]):
		c.Skip()
	case first == '[':
		for c.Open('['); c.Next(']'); {
			c.Walk(key, lists+1, visit)
		}
	default:
		for c.Open('{'); c.Next('}'); {
			c.Walk(unescapedName(c.Key), 0, visit)
		}
	}
}

// unescapedName returns the text of a name between its quotes. It copies only a name with escapes. If
// such a name is longer than maxEscaped, it is returned as written, because no field and no value
// that the proxy knows is as long.
func unescapedName(raw []byte) string {
	if bytes.IndexByte(raw, '\\') >= 0 && len(raw) <= maxEscaped {
		return unescapedText(raw)
	}
	return unsafe.String(unsafe.SliceData(raw), len(raw))
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// skipString returns the index after the string that opens at i; -1 if it does not end. Most strings
// are keys and short values, so it searches for the next quote only after a few bytes.
func skipString(b []byte, i int) int {
	for i++; i < len(b); i++ {
		for end := min(i+16, len(b)); i < end; i++ {
			if b[i] == '"' {
				return i + 1
			}
			if b[i] == '\\' {
				i++
			}
		}
		if i >= len(b) {
			break
		}
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			break
		}
		slash := i + n
		for slash > i && b[slash-1] == '\\' {
			slash--
		}
		if i += n; (i-slash)&1 == 0 {
			return i + 1
		}
	}
	return -1
}
