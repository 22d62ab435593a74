package openai

import (
	"strconv"
	"unicode/utf8"
	"unsafe"
)

// Object is the scan of one JSON object. It refers to the scanned bytes and copies none
// of them: the Object and its values are valid until these bytes are changed or reused.
// The zero value is an object without members. Parse must be called by one goroutine at
// a time; the other methods may be called concurrently.
type Object struct {
	raw     []byte
	open    int // index of the opening brace
	members []member
	text    []byte   // escaped keys, unescaped
	keys    []keyRef // the scanner's memory, kept for the next scan
}

// member is one top-level member, in the order of the body.
type member struct {
	at    uint32 // position of the key's opening quote
	key   keyRef
	value span
	kind  kind
	shape shape // if kind is kindArray
}

// Scratch memory with more entries than this is dropped.
const keepScratch = 1024

// Reset drops the scanned bytes and keeps the memory for the next scan.
func (o *Object) Reset() {
	if cap(o.members) > keepScratch {
		o.members = nil
	}
	if cap(o.keys) > keepScratch {
		o.keys = nil
	}
	if cap(o.text) > keepScratch*8 {
		o.text = nil
	}
	*o = Object{members: o.members[:0], keys: o.keys[:0], text: o.text[:0]}
}

// Parse scans raw, which must contain one JSON object and otherwise only white space.
// It checks the grammar, that strings are UTF-8 without control characters or lone
// surrogates, that no object at any depth has two keys that are equal once unescaped,
// and that nothing is nested deeper than 256 levels. The error is an *Error with status
// 400 (413 from 2 GiB on) that names the invalid top-level member, if there is one; the
// Object is then empty.
func (o *Object) Parse(raw []byte) error {
	o.Reset()
	if len(raw) > maxBody {
		return NewError(CodeBodyTooLarge, "The body is 2 GiB or more.")
	}
	s := scanner{b: raw, keys: o.keys, text: o.text}
	i := s.space(0)
	if i == len(raw) {
		return NewError(CodeInvalidJSON, "The body is empty.")
	}
	if raw[i] != '{' {
		return NewError(CodeInvalidJSON, "The body is not a JSON object.")
	}
	end := s.tail(s.object(i, 1, o))
	o.raw, o.open, o.text, o.keys = raw, i, s.text, s.keys[:0]
	if end < 0 {
		o.Reset()
		return s.refusal()
	}
	o.dropScratch()
	return nil
}

// dropScratch frees large memory that only the scan needed. The widest object at any
// depth determines its size, and a request is kept much longer than its scan takes.
// Members have copies of their keys' references, so nothing refers to the scratch
// memory.
func (o *Object) dropScratch() {
	if cap(o.keys) > keepScratch {
		o.keys = nil
	}
	if cap(o.text) > max(keepScratch*8, 2*len(o.text)) {
		o.text = append([]byte(nil), o.text...)
	}
	if cap(o.members) > max(keepScratch, len(o.members)+len(o.members)/8) {
		o.members = append(make([]member, 0, len(o.members)), o.members...)
	}
}

// Size returns the bytes of memory that the scan keeps in addition to the scanned bytes
// until Reset. It grows with the number of top-level members.
func (o *Object) Size() int {
	return cap(o.members)*int(unsafe.Sizeof(member{})) + cap(o.keys)*int(unsafe.Sizeof(keyRef{})) + cap(o.text)
}

// refusal converts the scanner's error to the client's error.
func (s *scanner) refusal() *Error {
	e := NewError(CodeInvalidJSON, "The body is not valid JSON: "+s.problem+", at byte "+strconv.Itoa(s.offset)+".")
	if s.problem == duplicateKey {
		e.Code = CodeDuplicateKey
	}
	if s.inField {
		e.Param = clip(string(s.key(s.field)))
	}
	return e
}

// clip bounds the length of a client's key in an answer or a log.
func clip(key string) string {
	const most = 64
	if len(key) <= most {
		return key
	}
	n := most
	for !utf8.RuneStart(key[n]) {
		n--
	}
	return key[:n]
}

// Raw returns the scanned bytes.
func (o *Object) Raw() []byte { return o.raw }

// Len returns the number of top-level members.
func (o *Object) Len() int { return len(o.members) }

// Get returns the raw JSON of a top-level member. Keys are compared unescaped and
// case-sensitively. A member with the value null is present.
func (o *Object) Get(key string) (value []byte, ok bool) {
	for i := range o.members {
		if m := &o.members[i]; o.keyString(m) == key {
			return o.value(m), true
		}
	}
	return nil, false
}

// Members visits the top-level members in the order of the body, with unescaped keys. A
// key is valid as long as the scanned bytes, and until the next Parse: clone a key that
// is kept.
func (o *Object) Members(yield func(key string, value []byte) bool) {
	for i := range o.members {
		m := &o.members[i]
		if !yield(o.keyString(m), o.value(m)) {
			return
		}
	}
}

// keyString returns the unescaped key without copying it.
func (o *Object) keyString(m *member) string {
	from := o.raw
	if m.key.escaped {
		from = o.text
	}
	key := from[m.key.at.start:m.key.at.end]
	return unsafe.String(unsafe.SliceData(key), len(key))
}

// value limits the capacity, so that appending to it cannot overwrite the body.
func (o *Object) value(m *member) []byte {
	return o.raw[m.value.start:m.value.end:m.value.end]
}
