package openai

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
)

// Limits of one body. They are far above the bodies of real clients, and bound the cost
// of a hostile body.
const (
	maxDepth   = 256       // nesting of objects and arrays
	maxMembers = 4096      // top-level members
	maxBody    = 1<<31 - 1 // bytes: offsets are kept in 32 bits
)

// pairwiseKeys is the number of keys up to which an object's keys are compared
// pairwise. The keys of a larger object are sorted once.
const pairwiseKeys = 32

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

// keyRef is one key of an object that is still open.
type keyRef struct {
	print   uint64 // equal for equal keys
	at      span   // in scanner.text if escaped, else in scanner.b
	escaped bool
}

// scanner checks one JSON text in one pass. Every method gets the index at which to
// continue and returns the index after the part that it has read. After an error it
// returns -1 and sets problem and offset.
type scanner struct {
	b    []byte
	keys []keyRef // keys of all open objects; the keys of the innermost object are the last
	text []byte   // escaped keys, unescaped
	last shape    // shape of the array that was closed last

	problem string // the error; empty: none
	offset  int    // position of the error
	field   keyRef // the top-level member with the error
	inField bool
}

func (s *scanner) fail(offset int, problem string) int {
	s.problem, s.offset = problem, offset
	return -1
}

// key returns the unescaped bytes of a key.
func (s *scanner) key(k keyRef) []byte {
	if k.escaped {
		return s.text[k.at.start:k.at.end]
	}
	return s.b[k.at.start:k.at.end]
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
	firstKey, firstText := len(s.keys), len(s.text)
	if i = s.space(i + 1); i < len(s.b) && s.b[i] == '}' {
		return i + 1
	}
	for {
		if i >= len(s.b) || s.b[i] != '"' {
			return s.fail(i, "a key is missing")
		}
		at := i
		if i = s.addKey(i, firstKey, top != nil); i < 0 {
			return -1
		}
		if i = s.space(i); i >= len(s.b) || s.b[i] != ':' {
			return s.fail(i, "a colon is missing")
		}
		if top != nil {
			i = s.member(at, s.space(i+1), top)
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
			if top == nil {
				s.text = s.text[:firstText]
			}
			return i + 1
		default:
			return s.fail(i, "a comma is missing")
		}
	}
}

// member reads the value of a top-level member and stores the member. at is the start
// of its key, which is the last one in keys, and i that of its value.
func (s *scanner) member(at, i int, top *Object) int {
	key := s.keys[len(s.keys)-1]
	end, kind := s.value(i, 2)
	if end < 0 {
		s.field, s.inField = key, true
		return -1
	}
	if len(top.members) == maxMembers {
		return s.fail(at, "too many members")
	}
	top.members = append(top.members, member{
		at: uint32(at), key: key, value: span{uint32(i), uint32(end)}, kind: kind, shape: s.last,
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

const duplicateKey = "a key occurs twice"

// addKey reads the key that opens at i and adds it to the keys of the open object,
// which begin at first. top is set for the outermost object.
func (s *scanner) addKey(i, first int, top bool) int {
	start := i + 1
	end, escaped := s.str(i)
	if end < 0 {
		return -1
	}
	k := keyRef{at: span{uint32(start), uint32(end - 1)}, escaped: escaped}
	if escaped {
		from := len(s.text)
		s.text = appendUnescaped(s.text, s.b[start:end-1])
		k.at = span{uint32(from), uint32(len(s.text))}
	}
	name := s.key(k)
	k.print = fingerprint(name)
	if open := s.keys[first:]; len(open) < pairwiseKeys {
		for _, o := range open {
			if o.print == k.print && bytes.Equal(s.key(o), name) {
				s.field, s.inField = k, top
				return s.fail(i, duplicateKey)
			}
		}
	}
	s.keys = append(s.keys, k)
	return end
}

// distinct checks the keys of an object that is too large for pairwise comparison. It
// changes their order. Sorting by the bytes bounds the cost for any keys that a client
// sends.
func (s *scanner) distinct(keys []keyRef, top bool) bool {
	if len(keys) <= pairwiseKeys {
		return true
	}
	slices.SortFunc(keys, func(a, b keyRef) int {
		return bytes.Compare(s.key(a), s.key(b))
	})
	for i, k := range keys[1:] {
		if bytes.Equal(s.key(keys[i]), s.key(k)) {
			s.field, s.inField = k, top
			return false
		}
	}
	return true
}

// fingerprint is cheap to compute and to compare. Equal keys have equal fingerprints.
func fingerprint(key []byte) uint64 {
	n := len(key)
	p := uint64(n) << 56
	switch {
	case n >= 8:
		first, final := binary.LittleEndian.Uint64(key), binary.LittleEndian.Uint64(key[n-8:])
		return p ^ first ^ bits.RotateLeft64(final, 29)
	case n >= 4:
		return p ^ uint64(binary.LittleEndian.Uint32(key)) ^ uint64(binary.LittleEndian.Uint32(key[n-4:]))<<24
	case n > 0:
		return p ^ uint64(key[0]) ^ uint64(key[n/2])<<8 ^ uint64(key[n-1])<<16
	}
	return p
}
