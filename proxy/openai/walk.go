package openai

import (
	"bytes"
	"iter"
	"strconv"
	"unsafe"
)

// SyntaxError says that bytes from an engine are not JSON as the scan wants it.
type SyntaxError struct {
	Problem string // what is wrong; no text of the bytes
	Offset  int    // where
}

func (e *SyntaxError) Error() string {
	return "invalid JSON: " + e.Problem + ", at byte " + strconv.Itoa(e.Offset)
}

// valid scans one value that fills raw.
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

// Lookup gives the raw JSON of a nested member: each step of the path is a key
// of an object, or the index of an element of an array in decimal. It checks
// all of raw, as strictly as Parse, and builds nothing. ok is false where the
// path leads nowhere; a null is found. The error is a *SyntaxError.
func Lookup(raw []byte, path ...string) (value []byte, ok bool, err error) {
	if err := valid(raw); err != nil {
		return nil, false, err
	}
	value, ok = Find(raw, path...)
	return value, ok, nil
}

// Elements checks raw as strictly as Parse, and gives the raw JSON of each
// element of the array that it holds. The error is a *SyntaxError.
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

// What follows walks over bytes without checking them: they have been scanned
// before, or they are of an engine and only a number is wanted of them. On
// bytes that are not JSON it finds nothing or something odd, and ends.

// Find is Lookup in JSON that has been checked, as what Lookup gave has.
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

// child gives one member of an object or one element of an array.
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

// keyEqual compares a key as it is between its quotes with an unescaped one.
func keyEqual(key []byte, want string) bool {
	if bytes.IndexByte(key, '\\') < 0 {
		return string(key) == want
	}
	if len(key) > 6*len(want) { // an escape is six bytes for each byte of text at most
		return false
	}
	var room [64]byte
	s := scanner{b: append(append(append(room[:0], '"'), key...), '"')}
	if end, _ := s.str(0); end != len(s.b) {
		return false
	}
	return string(appendUnescaped(nil, key)) == want
}

// eachMember visits the members of the object that raw begins with; keys are
// as they are between their quotes.
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

// eachElement visits the elements of the array that raw begins with.
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

// skipString gives the index after the string that opens at i; len(b) if it
// does not end.
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

// skipValue gives the index after the value that begins at i; len(b) if it
// does not end.
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

// Walk visits every value in JSON that has been checked, at every depth, in one
// pass; the outermost is one of them. key is the unescaped name of the member that
// holds the value, and lists how many arrays of that member it lies in; the outermost
// has the key that Walk was given. value is raw; that of an object or an array only
// begins there, and runs to the end of raw. visit reports whether to go into it. A
// key is good only as long as visit runs.
func Walk(raw []byte, key string, visit func(key string, lists int, value []byte) (enter bool)) {
	w := walker{raw, visit}
	w.value(skipSpace(raw, 0), key, 0)
}

type walker struct {
	raw   []byte
	visit func(key string, lists int, value []byte) bool
}

// value visits the value at i, and gives the index after it.
func (w *walker) value(i int, key string, lists int) int {
	if i >= len(w.raw) {
		return i
	}
	c := w.raw[i]
	if c != '{' && c != '[' {
		end := skipValue(w.raw, i)
		w.visit(key, lists, w.raw[i:end:end])
		return end
	}
	if !w.visit(key, lists, w.raw[i:]) {
		return skipValue(w.raw, i)
	}
	for i = skipSpace(w.raw, i+1); i < len(w.raw) && w.raw[i] != c+2; { // the closing one is two behind
		if c == '[' {
			i = w.value(i, key, lists+1)
		} else {
			at := i
			i = skipString(w.raw, i)
			name := keyText(w.raw[at:i])
			i = w.value(skipSpace(w.raw, skipSpace(w.raw, i)+1), name, 0)
		}
		if i = skipSpace(w.raw, i); i >= len(w.raw) || w.raw[i] != ',' {
			break
		}
		i = skipSpace(w.raw, i+1)
	}
	return min(i+1, len(w.raw))
}

// keyText gives the text of a key with its quotes, which lies in the raw bytes
// unless it has escapes.
func keyText(quoted []byte) string {
	if bytes.IndexByte(quoted, '\\') >= 0 || len(quoted) < 2 {
		text, _ := String(quoted)
		return text
	}
	return unsafe.String(unsafe.SliceData(quoted[1:]), len(quoted)-2)
}
