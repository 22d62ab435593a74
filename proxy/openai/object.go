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
	keys    []keyRef // the scanner's memory, kept for the next scan

	// Memory counts the memory of a scan while the scan runs, from 1024 members on; nil: not
	// counted. Reset keeps Memory.
	Memory Memory
}

// member is one top-level member, in the order of the body.
type member struct {
	key     span // between its quotes
	value   span
	kind    kind
	escaped bool  // the key has escapes
	shape   shape // if kind is kindArray
}

const (
	memberSize   = int64(unsafe.Sizeof(member{}))
	firstMembers = 16   // room that a new Object gets
	keepScratch  = 1024 // scratch memory with more entries is dropped
)

// Memory counts the scratch memory of scans.
type Memory interface {
	// TakeScratch counts n bytes until ReleaseMemory. On an error it counts nothing.
	TakeScratch(n int64) error
	// ReleaseMemory gives back n bytes.
	ReleaseMemory(n int64)
}

// Reset drops the scanned bytes and keeps the memory for the next scan.
func (o *Object) Reset() {
	if cap(o.members) > keepScratch {
		o.members = nil
	}
	if cap(o.keys) > keepScratch {
		o.keys = nil
	}
	*o = Object{members: o.members[:0], keys: o.keys[:0], Memory: o.Memory}
}

// Parse scans raw, which must contain one JSON object and otherwise only white space.
// It checks the grammar, that strings are UTF-8 without control characters or lone
// surrogates, that no object at any depth has two keys that are equal once unescaped,
// and that nothing is nested deeper than 256 levels. Objects that contain each other have
// at most 262,144 members together, in addition to the 4096 members of the outermost one;
// the scan uses 4 MiB at most. The error is an *Error with status 400 (413 from 2 GiB on)
// that names the invalid top-level member, if there is one, or the error of Memory. The
// Object is then empty.
func (o *Object) Parse(raw []byte) error {
	o.Reset()
	if len(raw) > maxBody {
		return NewError(CodeBodyTooLarge, "The body is 2 GiB or more.")
	}
	s := scanner{b: raw, keys: o.keys, memory: o.Memory}
	i := skipSpace(raw, 0)
	if i == len(raw) {
		return NewError(CodeInvalidJSON, "The body is empty.")
	}
	if raw[i] != '{' {
		return NewError(CodeInvalidJSON, "The body is not a JSON object.")
	}
	end := s.tail(s.object(i, 1, o))
	o.raw, o.open, o.keys = raw, i, s.keys[:0]
	if s.taken > 0 {
		s.memory.ReleaseMemory(s.taken)
	}
	if end < 0 {
		o.Reset()
		if s.full != nil {
			return s.full
		}
		return s.refusal()
	}
	// The widest object at any depth determines the size of the scratch memory, and a request is
	// kept much longer than its scan takes.
	if cap(o.keys) > keepScratch {
		o.keys = nil
	}
	if cap(o.members) > max(keepScratch, len(o.members)+len(o.members)/8) {
		o.members = append(make([]member, 0, len(o.members)), o.members...)
	}
	return nil
}

// Size returns the bytes of memory that the scan keeps in addition to the scanned bytes
// until Reset. It grows with the number of top-level members.
func (o *Object) Size() int {
	return cap(o.members)*int(memberSize) + cap(o.keys)*keySize
}

// refusal converts the scanner's error to the client's error.
func (s *scanner) refusal() *Error {
	e := NewError(CodeInvalidJSON, "The body is not valid JSON: "+s.problem+", at byte "+strconv.Itoa(s.offset)+".")
	if s.problem == duplicateKey {
		e.Code = CodeDuplicateKey
	}
	if s.inField {
		e.Param = clipKey(s.b[s.field.start:s.field.end])
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

// clipKey is clip for a key as written.
func clipKey(key []byte) string {
	var text []byte
	for len(key) > 0 && len(text) <= 2*utf8.UTFMax*16 {
		var c [4]byte
		n := 0
		n, key = unescapeFirst(&c, key)
		text = append(text, c[:n]...)
	}
	return clip(string(text))
}

// Raw returns the scanned bytes.
func (o *Object) Raw() []byte { return o.raw }

// Len returns the number of top-level members.
func (o *Object) Len() int { return len(o.members) }

// Get returns the raw JSON of a top-level member. Keys are compared unescaped and
// case-sensitively. A member with the value null is present.
func (o *Object) Get(key string) (value []byte, ok bool) {
	for i := range o.members {
		if name, value := o.at(i); name == key {
			return value, true
		}
	}
	return nil, false
}

// Members visits the top-level members in the order of the body, with unescaped keys. A
// key is valid as long as the scanned bytes: clone a key that is kept.
func (o *Object) Members(yield func(key string, value []byte) bool) {
	for i := range o.members {
		if !yield(o.at(i)) {
			return
		}
	}
}

// at returns member i: its unescaped key and its value. It copies only a key with escapes, which
// maxEscaped bounds. The capacity of the value is limited, so that appending to it cannot overwrite
// the body.
func (o *Object) at(i int) (key string, value []byte) {
	m := &o.members[i]
	raw := o.raw[m.key.start:m.key.end]
	if m.escaped {
		key = unescapedText(raw)
	} else {
		key = unsafe.String(unsafe.SliceData(raw), len(raw))
	}
	return key, o.raw[m.value.start:m.value.end:m.value.end]
}

// Edit is one change of a top-level member: a new value or the removal. An edit without a
// value and without a removal changes nothing.
type Edit struct {
	Key    string // unescaped
	Value  []byte // raw JSON, copied unchanged
	Remove bool   // remove the member; Value is ignored
	cut    bool   // cut the transfer parameters out of the member; Value is ignored
}

// Append appends the object with the edits applied. Present members are replaced in
// place; absent ones are put first, in the order of the edits; a removed member is cut
// together with one comma. All other bytes are kept, including white space before and
// after the object. Of several edits of one key the last counts. The Object itself is
// not changed. An Object that was not parsed counts as {}.
func (o *Object) Append(dst []byte, edits ...Edit) []byte {
	s := splicer{raw: o.raw, from: o.open + 1}
	if s.raw == nil {
		s.raw = []byte("{}")
	}
	s.out = append(dst, s.raw[:s.from]...)
	for i := range edits {
		if e := &edits[i]; !e.Remove && !e.cut && editOf(edits, e.Key) == e {
			if _, ok := o.Get(e.Key); !ok {
				s.add(e)
			}
		}
	}
	for i := range o.members {
		m := &o.members[i]
		key, _ := o.at(i)
		s.member(editOf(edits, key), int(m.key.start)-1, int(m.value.start), int(m.value.end))
	}
	return append(s.out, s.raw[s.from:]...)
}

// AppendEdited is [Object.Append] for an object inside a scanned body: raw is one valid
// JSON object with any number of members. It builds no list of the members, and reads
// raw once, and once more for each edit.
func AppendEdited(dst, raw []byte, edits ...Edit) []byte {
	c := Cursor{Text: raw}
	c.Open('{')
	s := splicer{raw: raw, out: append(dst, raw[:c.at]...), from: c.at}
	for i := range edits {
		if e := &edits[i]; !e.Remove && !e.cut && editOf(edits, e.Key) == e {
			if _, ok := Find(raw, e.Key); !ok {
				s.add(e)
			}
		}
	}
	for c.Next('}') {
		at, e := c.key, editOf(edits, unescapedName(c.Key))
		value := c.Skip()
		s.member(e, at, c.at-len(value), c.at)
	}
	return append(s.out, raw[s.from:]...)
}

// editOf returns the edit that applies to a key, or nil.
func editOf(edits []Edit, key string) *Edit {
	for i := len(edits) - 1; i >= 0; i-- {
		if e := &edits[i]; e.Key == key && (e.Remove || e.cut || len(e.Value) > 0) {
			return e
		}
	}
	return nil
}

// splicer copies an object, with other members. It copies the bytes between two changes at once.
type splicer struct {
	raw  []byte
	out  []byte
	from int // start of the uncopied rest of raw
	kept int // end of the last member that stays; 0: none

	comma bool // the added members need a comma before the next member that stays
}

// add appends a member that the object does not have, before all others.
func (s *splicer) add(e *Edit) {
	if s.comma {
		s.out = append(s.out, ',')
	}
	s.out = append(AppendQuoted(s.out, e.Key), ':')
	s.out = append(s.out, e.Value...)
	s.comma = true
}

// member applies an edit, or none, to the next member: raw[at:end] with the value raw[value:end].
func (s *splicer) member(e *Edit, at, value, end int) {
	if e != nil && e.Remove {
		s.remove(at, end)
		return
	}
	s.kept = end
	if s.comma {
		s.out, s.comma = append(s.out, ','), false
	}
	if e == nil {
		return
	}
	s.out = append(s.out, s.raw[s.from:value]...)
	s.from = end
	if e.cut { // without a copy of the old value, which may be most of the body
		s.out = appendCut(s.out, s.raw[value:end], "")
	} else {
		s.out = append(s.out, e.Value...)
	}
}

// remove omits the member raw[at:end], with the comma before it, or with the one behind it if no
// member before it stays.
func (s *splicer) remove(at, end int) {
	if s.kept > 0 {
		at = max(s.kept, s.from)
	} else if i := skipSpace(s.raw, end); i < len(s.raw) && s.raw[i] == ',' {
		end = skipSpace(s.raw, i+1)
	}
	s.out = append(s.out, s.raw[s.from:at]...)
	s.from = end
}
