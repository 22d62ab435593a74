package openai

import (
	"net/http"
	"strconv"
	"unicode/utf8"
	"unsafe"
)

// Object is one scan of one JSON object. It refers to the bytes that were
// scanned and copies nothing of them: it, and every value it hands out, is
// good as long as those bytes are neither changed nor reused. The zero value
// is an object without members. An Object may be read by several goroutines
// at once, but parsed by one.
type Object struct {
	raw     []byte
	open    int // index of the opening brace
	members []member
	text    []byte   // escaped keys, unescaped
	keys    []keyRef // scratch of the scanner, kept for the next scan
}

// member is one top-level member in the order of the body.
type member struct {
	at    uint32 // the key's opening quote
	key   keyRef
	value span
	kind  kind
	shape shape // if kind is kindArray
}

// Scratch of more than this many entries is dropped rather than kept.
const keepScratch = 1024

// Reset forgets the scanned bytes and keeps the room for the next scan.
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

// Parse scans raw, which must hold one JSON object and nothing else but white
// space. All of it is checked: the grammar, that strings are UTF-8 without
// control characters or lone surrogates, that no object at any depth has two
// keys that are equal once unescaped, and that nothing nests deeper than 256.
// The error is an *Error with status 400 (413 from 2 GiB on) that names the
// top-level member at fault, if there is one; the Object is then empty.
func (o *Object) Parse(raw []byte) error {
	o.Reset()
	if len(raw) > maxBody {
		return &Error{Status: http.StatusRequestEntityTooLarge, Code: "body_too_large", Message: "The body is 2 GiB or more."}
	}
	s := scanner{b: raw, keys: o.keys, text: o.text}
	i := s.space(0)
	if i == len(raw) {
		return &Error{Status: http.StatusBadRequest, Code: "invalid_json", Message: "The body is empty."}
	}
	if raw[i] != '{' {
		return &Error{Status: http.StatusBadRequest, Code: "invalid_json", Message: "The body is not a JSON object."}
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

// dropScratch gives up the room that only the scan needed. The widest object at any
// depth sets its size, and a request is held much longer than its scan takes.
// Members hold copies of their keys' references, so nothing refers to the scratch.
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

// Size is how many bytes of memory the scan keeps beside the scanned bytes until
// Reset. It grows with the number of top-level members.
func (o *Object) Size() int {
	return cap(o.members)*int(unsafe.Sizeof(member{})) + cap(o.keys)*int(unsafe.Sizeof(keyRef{})) + cap(o.text)
}

// refusal is the scanner's fault as the client sees it.
func (s *scanner) refusal() *Error {
	e := &Error{
		Status:  http.StatusBadRequest,
		Code:    "invalid_json",
		Message: "The body is not valid JSON: " + s.problem + ", at byte " + strconv.Itoa(s.offset) + ".",
	}
	if s.problem == duplicateKey {
		e.Code = "duplicate_key"
	}
	if s.inField {
		e.Param = clip(string(s.key(s.field)))
	}
	return e
}

// clip keeps a key that a client chose from filling an answer or a log.
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

// Raw gives the bytes that were scanned.
func (o *Object) Raw() []byte { return o.raw }

// Len gives the number of top-level members.
func (o *Object) Len() int { return len(o.members) }

// Get gives the raw JSON of a top-level member. Keys are compared as they are
// after unescaping, by case; a member whose value is null is there.
func (o *Object) Get(key string) (value []byte, ok bool) {
	for i := range o.members {
		if m := &o.members[i]; o.keyString(m) == key {
			return o.value(m), true
		}
	}
	return nil, false
}

// Members visits the top-level members in the order of the body. Keys are
// unescaped. A key is good only as long as the scanned bytes, and until the
// next Parse: clone one that is kept.
func (o *Object) Members(yield func(key string, value []byte) bool) {
	for i := range o.members {
		m := &o.members[i]
		if !yield(o.keyString(m), o.value(m)) {
			return
		}
	}
}

// keyString gives the unescaped key without copying it.
func (o *Object) keyString(m *member) string {
	from := o.raw
	if m.key.escaped {
		from = o.text
	}
	key := from[m.key.at.start:m.key.at.end]
	return unsafe.String(unsafe.SliceData(key), len(key))
}

// value is cut in capacity, so that appending to it cannot reach the body.
func (o *Object) value(m *member) []byte {
	return o.raw[m.value.start:m.value.end:m.value.end]
}
