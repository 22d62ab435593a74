package openai

import (
	"bytes"
	"iter"
	"strconv"
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

// valid scans one value that must fill raw.
func valid(raw []byte) error {
	var room [pairwiseKeys]keyRef
	s := scanner{b: raw, keys: room[:0]}
	if len(raw) > maxBody {
		s.fail(maxBody, "longer than 2 GiB")
	} else if s.document() >= 0 {
		return nil
	}
	return &SyntaxError{Problem: s.problem, Offset: s.offset}
}

// Lookup returns the raw JSON of a nested member. Each step of the path is a key of an
// object, or the index of an element of an array in decimal. Lookup checks all of raw,
// as strictly as Parse, and builds no tree. ok is false if there is no such member; a
// null counts as found. The error is a *SyntaxError.
func Lookup(raw []byte, path ...string) (value []byte, ok bool, err error) {
	if err := valid(raw); err != nil {
		return nil, false, err
	}
	value, ok = Find(raw, path...)
	return value, ok, nil
}

// Elements checks raw as strictly as Parse, and returns the raw JSON of each element of
// the array in it. The error is a *SyntaxError.
func Elements(raw []byte) (iter.Seq[[]byte], error) {
	if err := valid(raw); err != nil {
		return nil, err
	}
	open := skipSpace(raw, 0)
	if raw[open] != '[' {
		return nil, &SyntaxError{Problem: "not an array", Offset: open}
	}
	return func(yield func([]byte) bool) { eachElement(raw, yield) }, nil
}

// The following functions walk over bytes without checking them: the bytes have been
// scanned before, or they come from an engine and only a number is needed. On invalid
// JSON they find nothing or a wrong value, and end.

// Find is Lookup in JSON that has been checked, such as a result of Lookup.
func Find(raw []byte, path ...string) (value []byte, ok bool) {
	if i := skipSpace(raw, 0); i < len(raw) {
		value = raw[i:skipValue(raw, i)]
	}
	for _, step := range path {
		if value, ok = child(value, step); !ok {
			return nil, false
		}
	}
	return value, len(value) > 0
}

// child returns one member of an object or one element of an array.
func child(raw []byte, step string) (value []byte, ok bool) {
	if len(raw) == 0 {
		return nil, false
	}
	switch raw[0] {
	case '{':
		eachMember(raw, func(key, v []byte) bool {
			if ok = keyEqual(key, step); ok {
				value = v
			}
			return !ok
		})
	case '[':
		index, err := strconv.Atoi(step)
		if err != nil {
			return nil, false
		}
		eachElement(raw, func(v []byte) bool {
			if ok = index == 0; ok {
				value = v
			}
			index--
			return !ok
		})
	}
	return value, ok
}

// keyEqual compares a raw key without its quotes with an unescaped one.
func keyEqual(key []byte, want string) bool {
	if bytes.IndexByte(key, '\\') < 0 {
		return string(key) == want
	}
	if len(key) > 6*len(want) { // an escape has at most six bytes for each byte of text
		return false
	}
	var room [64]byte
	s := scanner{b: append(append(append(room[:0], '"'), key...), '"')}
	if end, _ := s.str(0); end != len(s.b) {
		return false
	}
	return string(appendUnescaped(nil, key)) == want
}

// eachMember visits the members of the object at the start of raw. Keys are raw,
// without their quotes.
func eachMember(raw []byte, visit func(key, value []byte) bool) {
	i := skipSpace(raw, 1)
	for i < len(raw) && raw[i] == '"' {
		start := i + 1
		end := skipString(raw, i)
		if i = skipSpace(raw, end); i >= len(raw) || raw[i] != ':' {
			return
		}
		i = skipSpace(raw, i+1)
		v := i
		i = skipValue(raw, i)
		if !visit(raw[start:end-1], raw[v:i:i]) {
			return
		}
		if i = skipSpace(raw, i); i >= len(raw) || raw[i] != ',' {
			return
		}
		i = skipSpace(raw, i+1)
	}
}

// eachElement visits the elements of the array at the start of raw.
func eachElement(raw []byte, visit func(value []byte) bool) {
	i := skipSpace(raw, skipSpace(raw, 0)+1)
	for i < len(raw) && raw[i] != ']' {
		v := i
		i = skipValue(raw, i)
		if !visit(raw[v:i:i]) {
			return
		}
		if i = skipSpace(raw, i); i >= len(raw) || raw[i] != ',' {
			return
		}
		i = skipSpace(raw, i+1)
	}
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// skipString returns the index after the string that opens at i; len(b) if it does not
// end.
func skipString(b []byte, i int) int {
	for i++; i < len(b); i++ {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			break
		}
		i += n
		slash := i
		for b[slash-1] == '\\' {
			slash--
		}
		if (i-slash)&1 == 0 {
			return i + 1
		}
	}
	return len(b)
}

// skipValue returns the index after the value that begins at i; len(b) if it does not
// end.
func skipValue(b []byte, i int) int {
	if i < len(b) && b[i] == '"' {
		return skipString(b, i)
	}
	depth := 0
	for i < len(b) {
		switch b[i] {
		case '"':
			i = skipString(b, i)
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			} else if depth < 0 {
				return i
			}
		case ',', ' ', '\n', '\r', '\t':
			if depth == 0 {
				return i
			}
		}
		i++
	}
	return len(b)
}

// Walk visits every value in checked JSON, at every depth, in one pass, including the
// outermost value. key is the unescaped name of the member that contains the value, and
// lists the number of arrays of that member around it. The outermost value has the key
// that Walk was given. value is raw; for an object or an array it is the bytes from its
// start to the end of raw. visit reports whether to visit the value's content. A key is
// valid only while visit runs.
func Walk(raw []byte, key string, visit func(key string, lists int, value []byte) (enter bool)) {
	walkValue(raw, visit, skipSpace(raw, 0), key, 0)
}

// walkValue visits the value at i and returns the index after it. The arguments are no
// fields of a struct: visit would then escape to the heap together with raw.
func walkValue(raw []byte, visit func(key string, lists int, value []byte) bool, i int, key string, lists int) int {
	if i >= len(raw) {
		return i
	}
	c := raw[i]
	if c != '{' && c != '[' {
		end := skipValue(raw, i)
		visit(key, lists, raw[i:end:end])
		return end
	}
	if !visit(key, lists, raw[i:]) {
		return skipValue(raw, i)
	}
	for i = skipSpace(raw, i+1); i < len(raw) && raw[i] != c+2; { // the closing bracket is two code points after the opening one
		if c == '[' {
			i = walkValue(raw, visit, i, key, lists+1)
		} else {
			at := i
			i = skipString(raw, i)
			name := keyText(raw[at:i])
			i = walkValue(raw, visit, skipSpace(raw, skipSpace(raw, i)+1), name, 0)
		}
		if i = skipSpace(raw, i); i >= len(raw) || raw[i] != ',' {
			break
		}
		i = skipSpace(raw, i+1)
	}
	return min(i+1, len(raw))
}

// keyText returns the text of a key with its quotes. It points into the raw bytes
// unless the key has escapes.
func keyText(quoted []byte) string {
	if bytes.IndexByte(quoted, '\\') >= 0 || len(quoted) < 2 {
		text, _ := String(quoted)
		return text
	}
	return unsafe.String(unsafe.SliceData(quoted[1:]), len(quoted)-2)
}
