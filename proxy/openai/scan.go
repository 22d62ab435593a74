package openai

// Limits of one body. They are far above the bodies of real clients, and bound the cost
// of a hostile body.
const (
	maxDepth   = 256       // nesting of objects and arrays
	maxMembers = 4096      // top-level members
	maxKeys    = 1 << 18   // members of all objects that are open at one place; a logit_bias may name each token of a vocabulary
	maxEscaped = 1024      // bytes of a top-level key with escapes, as written: such a key is unescaped at each use
	maxBody    = 1<<31 - 1 // bytes: offsets are kept in 32 bits
)

// kind is the type of a value, with one bit for each, so that the types of an array's
// elements can be combined.
type kind uint8

const (
	kindNull kind = 1 << iota
	kindBool
	kindInt   // no fraction, no exponent
	kindFloat // any other number
	kindString
	kindArray
	kindObject
)

// shape summarizes an array. It is sufficient to determine the form of a prompt.
type shape struct {
	count      uint32 // elements
	inner      uint32 // total elements of those elements that are arrays
	kinds      kind   // types of the elements
	innerKinds kind   // types of the elements of those arrays
}

// span is a part of a byte slice.
type span struct{ start, end uint32 }

// scanner checks one JSON text in one pass. Every method gets the index at which to
// continue and returns the index after the part that it has read. After an error it
// returns -1 and sets problem and offset.
type scanner struct {
	b    []byte
	keys []keyRef // keys of all open objects; the keys of the innermost object are the last
	last shape    // shape of the array that was closed last

	memory Memory // counts large scratch memory; nil: not counted
	taken  int64  // bytes that memory counts for this scan
	full   error  // the error of memory

	problem string // the error; empty: none
	offset  int    // position of the error
	field   span   // key of the top-level member with the error, as written
	inField bool
}

func (s *scanner) fail(offset int, problem string) int {
	s.problem, s.offset = problem, offset
	return -1
}

// space skips white space.
func (s *scanner) space(i int) int {
	for i < len(s.b) {
		switch s.b[i] {
		case ' ', '\n', '\t', '\r':
			i++
		default:
			return i
		}
	}
	return i
}

// document reads one value that must fill all of b.
func (s *scanner) document() int {
	i, _ := s.value(s.space(0), 1)
	return s.tail(i)
}

// tail checks that only white space follows a document's value.
func (s *scanner) tail(i int) int {
	if i < 0 {
		return -1
	}
	if i = s.space(i); i != len(s.b) {
		return s.fail(i, "bytes after the end of the value")
	}
	return i
}

// value reads any value; depth is the depth of the value if it is an array or object.
func (s *scanner) value(i, depth int) (int, kind) {
	if i >= len(s.b) {
		return s.fail(i, "unexpected end"), 0
	}
	switch c := s.b[i]; c {
	case '"':
		i, _ = s.str(i)
		return i, kindString
	case '{':
		return s.object(i, depth, nil), kindObject
	case '[':
		return s.array(i, depth), kindArray
	case 't':
		return s.literal(i, "true"), kindBool
	case 'f':
		return s.literal(i, "false"), kindBool
	case 'n':
		return s.literal(i, "null"), kindNull
	default:
		return s.number(i)
	}
}

func (s *scanner) literal(i int, word string) int {
	if len(s.b)-i < len(word) || string(s.b[i:i+len(word)]) != word {
		return s.fail(i, "not a value")
	}
	return i + len(word)
}

// object reads the object that opens at i. If top is set, it stores the members there.
func (s *scanner) object(i, depth int, top *Object) int {
	if depth > maxDepth {
		return s.fail(i, "nested too deeply")
	}
	firstKey := len(s.keys)
	if i = s.space(i + 1); i < len(s.b) && s.b[i] == '}' {
		return i + 1
	}
	for {
		if i >= len(s.b) || s.b[i] != '"' {
			return s.fail(i, "a key is missing")
		}
		key, escaped := span{start: uint32(i) + 1}, false
		if i, escaped = s.addKey(i, firstKey, top != nil); i < 0 {
			return -1
		}
		key.end = uint32(i) - 1
		if i = s.space(i); i >= len(s.b) || s.b[i] != ':' {
			return s.fail(i, "a colon is missing")
		}
		if top != nil {
			i = s.member(key, escaped, s.space(i+1), top)
		} else {
			i, _ = s.value(s.space(i+1), depth+1)
		}
		if i < 0 {
			return -1
		}
		if i = s.space(i); i >= len(s.b) {
			return s.fail(i, "unexpected end")
		}
		switch s.b[i] {
		case ',':
			i = s.space(i + 1)
		case '}':
			if !s.distinct(s.keys[firstKey:], top != nil) {
				return s.fail(i, duplicateKey)
			}
			s.keys = s.keys[:firstKey]
			return i + 1
		default:
			return s.fail(i, "a comma is missing")
		}
	}
}

// member reads the value at i of a top-level member and stores the member.
func (s *scanner) member(key span, escaped bool, i int, top *Object) int {
	end, kind := s.value(i, 2)
	if end < 0 {
		s.field, s.inField = key, true
		return -1
	}
	at := int(key.start) - 1
	switch n := len(top.members); {
	case n == maxMembers:
		return s.fail(at, "too many members")
	case escaped && key.end-key.start > maxEscaped:
		return s.fail(at, "a key with escapes is too long")
	case n == cap(top.members):
		room := 2 * max(n, firstMembers)
		if !s.take(room, keepScratch, memberSize) {
			return -1
		}
		top.members = append(make([]member, 0, room), top.members...)
	}
	top.members = append(top.members, member{
		key: key, value: span{uint32(i), uint32(end)}, kind: kind, escaped: escaped, shape: s.last,
	})
	return end
}

// array reads the array that opens at i and leaves its shape in last.
func (s *scanner) array(i, depth int) int {
	if depth > maxDepth {
		return s.fail(i, "nested too deeply")
	}
	var sh shape
	if i = s.space(i + 1); i < len(s.b) && s.b[i] == ']' {
		s.last = sh
		return i + 1
	}
	for {
		if n, j := s.ints(i); n > 0 {
			sh.count += uint32(n)
			sh.kinds |= kindInt
			i = s.space(j)
		}
		var k kind
		if i, k = s.value(i, depth+1); i < 0 {
			return -1
		}
		sh.count++
		sh.kinds |= k
		if k == kindArray {
			sh.inner += s.last.count
			sh.innerKinds |= s.last.kinds
		}
		if i = s.space(i); i >= len(s.b) {
			return s.fail(i, "unexpected end")
		}
		switch s.b[i] {
		case ',':
			i = s.space(i + 1)
		case ']':
			s.last = sh
			return i + 1
		default:
			return s.fail(i, "a comma is missing")
		}
	}
}
