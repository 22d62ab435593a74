package openai

import (
	"bytes"
	"hash/maphash"
	"slices"
)

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

// scanner checks one JSON text in one pass; [Cursor] reads a text without checking it. Every method gets the index at which to
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

// tail checks that only white space follows a document's value.
func (s *scanner) tail(i int) int {
	if i < 0 {
		return -1
	}
	if i = skipSpace(s.b, i); i != len(s.b) {
		return s.fail(i, "bytes after the end of the value")
	}
	return i
}

// value reads any value; depth is the depth of the value if it is an array or object.
func (s *scanner) value(i, depth int) (int, kind) {
	if i >= len(s.b) {
		return s.fail(i, "unexpected end"), 0
	}
	switch s.b[i] {
	case '"':
		i, _ = s.str(i)
		return i, kindString
	case '{':
		return s.object(i, depth, nil), kindObject
	case '[':
		return s.array(i, depth), kindArray
	}
	word := words[s.b[i]]
	if word == "" {
		return s.number(i)
	}
	if len(s.b)-i < len(word) || string(s.b[i:i+len(word)]) != word {
		return s.fail(i, "not a value"), 0
	}
	if word == "null" {
		return i + len(word), kindNull
	}
	return i + len(word), kindBool
}

// words are the values that are neither strings nor numbers, by their first bytes.
var words = [256]string{'t': "true", 'f': "false", 'n': "null"}

// object reads the object that opens at i. If top is set, it stores the members there.
func (s *scanner) object(i, depth int, top *Object) int {
	if depth > maxDepth {
		return s.fail(i, "nested too deeply")
	}
	firstKey := len(s.keys)
	if i = skipSpace(s.b, i+1); i < len(s.b) && s.b[i] == '}' {
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
		if i = skipSpace(s.b, i); i >= len(s.b) || s.b[i] != ':' {
			return s.fail(i, "a colon is missing")
		}
		if top != nil {
			i = s.member(key, escaped, skipSpace(s.b, i+1), top)
		} else {
			i, _ = s.value(skipSpace(s.b, i+1), depth+1)
		}
		if i < 0 {
			return -1
		}
		if i = skipSpace(s.b, i); i >= len(s.b) {
			return s.fail(i, "unexpected end")
		}
		switch s.b[i] {
		case ',':
			i = skipSpace(s.b, i+1)
		case '}':
			if keys := s.keys[firstKey:]; len(keys) > pairwiseKeys && !s.distinct(keys, top != nil) {
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
	if i = skipSpace(s.b, i+1); i < len(s.b) && s.b[i] == ']' {
		s.last = sh
		return i + 1
	}
	for {
		if n, j := s.ints(i); n > 0 {
			sh.count += uint32(n)
			sh.kinds |= kindInt
			i = skipSpace(s.b, j)
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
		if i = skipSpace(s.b, i); i >= len(s.b) {
			return s.fail(i, "unexpected end")
		}
		switch s.b[i] {
		case ',':
			i = skipSpace(s.b, i+1)
		case ']':
			s.last = sh
			return i + 1
		default:
			return s.fail(i, "a comma is missing")
		}
	}
}

// pairwiseKeys is the number of keys up to which an object's keys are compared
// pairwise. The keys of a larger object are sorted once, by hashes.
const pairwiseKeys = 32

// keyRef is one key of an object that is still open: 32 bits of its hash, and the index of its
// opening quote. A key costs a scan 8 bytes, and the shortest member has 5 bytes in the body.
type keyRef uint64

const keySize = 8 // bytes of a keyRef

func (k keyRef) at() int { return int(uint32(k)) }

// keySeed makes the hashes unknown to clients, so that no body has many equal ones.
var keySeed = maphash.MakeSeed()

// take counts the memory for n entries of size bytes before the scan allocates them.
// Slices of at most free entries are not counted: each Object keeps them. On an error it
// returns false and sets full.
func (s *scanner) take(n, free int, size int64) bool {
	if s.memory == nil || n <= free {
		return true
	}
	if s.full = s.memory.TakeScratch(int64(n) * size); s.full != nil {
		s.fail(0, "no memory")
		return false
	}
	s.taken += int64(n) * size
	return true
}

const (
	duplicateKey = "a key occurs twice"
	tooManyKeys  = "too many members in objects"
)

// addKey reads the key that opens at i and adds it to the keys of the open object,
// which begin at first. top is set for the outermost object.
func (s *scanner) addKey(i, first int, top bool) (end int, escaped bool) {
	if end, escaped = s.str(i); end < 0 {
		return -1, escaped
	}
	k := keyRef(hashKey(s.b[i+1:end-1], escaped))<<32 | keyRef(i)
	if open := s.keys[first:]; len(open) < pairwiseKeys { // else distinct compares them
		for _, o := range open {
			if (o^k)>>32 == 0 && s.sameKey(o, k) {
				return s.duplicate(k, top, i), escaped
			}
		}
	}
	switch n := len(s.keys); n {
	case maxKeys:
		return s.fail(i, tooManyKeys), escaped
	case cap(s.keys):
		room := min(2*max(n, pairwiseKeys), maxKeys)
		if !s.take(room, keepScratch, keySize) {
			return -1, escaped
		}
		s.keys = append(make([]keyRef, 0, room), s.keys...)
	}
	s.keys = append(s.keys, k)
	return end, escaped
}

// distinct checks the keys of an object that is too large for pairwise comparison. It
// changes their order.
func (s *scanner) distinct(keys []keyRef, top bool) bool {
	slices.Sort(keys)
	for i, k := range keys {
		for j := i - 1; j >= 0 && (keys[j]^k)>>32 == 0; j-- { // equal hashes of other keys are rare
			if s.sameKey(keys[j], k) {
				s.duplicate(k, top, 0)
				return false
			}
		}
	}
	return true
}

// duplicate is fail for the second one of two equal keys.
func (s *scanner) duplicate(k keyRef, top bool, offset int) int {
	if top {
		key := s.key(k)
		s.field, s.inField = span{uint32(k.at()) + 1, uint32(k.at() + 1 + len(key))}, true
	}
	return s.fail(offset, duplicateKey)
}

// key returns the bytes of a key, as written.
func (s *scanner) key(k keyRef) []byte {
	return s.b[k.at()+1 : skipString(s.b, k.at())-1]
}

// sameKey compares two keys.
func (s *scanner) sameKey(j, k keyRef) bool {
	a, b := s.key(j), s.key(k)
	if bytes.IndexByte(a, '\\') < 0 && bytes.IndexByte(b, '\\') < 0 {
		return bytes.Equal(a, b)
	}
	for len(a) > 0 && len(b) > 0 {
		var left, right [4]byte
		x, y := 0, 0
		x, a = unescapeFirst(&left, a)
		y, b = unescapeFirst(&right, b)
		if x != y || left != right {
			return false
		}
	}
	return len(a) == len(b)
}

// hashKey hashes the unescaped text of a key.
func hashKey(key []byte, escaped bool) uint64 {
	if !escaped {
		return maphash.Bytes(keySeed, key)
	}
	var h maphash.Hash
	h.SetSeed(keySeed)
	for len(key) > 0 {
		var text [4]byte
		n := 0
		n, key = unescapeFirst(&text, key)
		_, _ = h.Write(text[:n]) // never fails
	}
	return h.Sum64()
}
