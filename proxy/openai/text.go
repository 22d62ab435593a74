package openai

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"strconv"
	"unicode/utf8"
	"unsafe"
)

// The scan reads eight bytes at a time: a word holds eight bytes of text.
const (
	ones = 0x0101010101010101
	tops = 0x8080808080808080
)

// stops marks, by its top bit, the first byte of w that ends plain text: a quote, a
// backslash, a control character or a byte outside ASCII. Marks above the lowest one
// may be wrong. Flipping bit 1 moves the quote next to the control characters, so that
// one subtraction finds both. Each byte outside ASCII keeps its top bit in at least one
// of the two terms.
func stops(w uint64) uint64 {
	return (((w ^ ones*('"'^' ')) - ones*(' '+1)) | ((w ^ ones*'\\') - ones)) & tops
}

// str reads the string whose opening quote is at i.
func (s *scanner) str(i int) (end int, escaped bool) {
	b := s.b
	i++
	for {
		// Nearly all bytes of a body pass through this loop. Escapes are frequent in
		// prompts, so the loop also handles the usual ones.
		for len(b)-i >= 17 {
			p := b[i : i+17 : i+17]
			at := 0
			m := stops(binary.LittleEndian.Uint64(p))
			if m == 0 {
				if m = stops(binary.LittleEndian.Uint64(p[8:])); m == 0 {
					i += 16
					continue
				}
				at = 8
			}
			at += bits.TrailingZeros64(m) >> 3
			i += at
			if p[at] != '\\' || !plainEscape[p[at+1]] {
				break
			}
			escaped = true
			i += 2
		}
		if i >= len(b) {
			return s.fail(i, "a string does not end"), escaped
		}
		switch c := b[i]; {
		case c == '"':
			return i + 1, escaped
		case c == '\\':
			escaped = true
			if len(b)-i >= 2 && plainEscape[b[i+1]] {
				i += 2
			} else if i = s.unicodeEscape(i); i < 0 {
				return -1, escaped
			}
		case c >= 0x80:
			if i = s.multibyte(i); i < 0 {
				return -1, escaped
			}
		case c < ' ':
			return s.fail(i, "a control character in a string"), escaped
		default:
			i++
		}
	}
}

// plainEscape marks the bytes that may follow a backslash, except u.
var plainEscape = [256]bool{'"': true, '\\': true, '/': true, 'b': true, 'f': true, 'n': true, 'r': true, 't': true}

// unicodeEscape reads \uXXXX, or two of them if they form a surrogate pair.
func (s *scanner) unicodeEscape(i int) int {
	r, ok := hexEscape(s.b[i:])
	if !ok {
		return s.fail(i, "a broken escape in a string")
	}
	if r < 0xD800 || r > 0xDFFF {
		return i + 6
	}
	low, ok := hexEscape(s.b[i+6:])
	if r >= 0xDC00 || !ok || low < 0xDC00 || low > 0xDFFF {
		return s.fail(i, "half of a surrogate pair in a string")
	}
	return i + 12
}

// hexEscape returns the number in the \uXXXX at the start of b.
func hexEscape(b []byte) (r rune, ok bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	for _, c := range b[2:6] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// multibyte reads the run of characters outside ASCII that begins at i. Nearly all letters have
// two or three bytes, which it checks as one word: the first byte is the lowest.
func (s *scanner) multibyte(i int) int {
	b := s.b
	for {
		for len(b)-i >= 4 {
			w := binary.LittleEndian.Uint32(b[i:])
			// An edge of 0 is overlong, and of 0x200D half of a surrogate pair.
			if edge := w & 0x200F; w&0xC0C0F0 == 0x8080E0 && edge != 0 && edge != 0x200D {
				i += 3
			} else if w&0xC0E0 == 0x80C0 && w&0x1E != 0 {
				i += 2
			} else {
				break
			}
		}
		if i >= len(b) || b[i] < utf8.RuneSelf {
			return i
		}
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n <= 1 {
			return s.fail(i, "a string is not UTF-8")
		}
		i += n
	}
}

// number reads a number.
func (s *scanner) number(i int) (int, kind) {
	b := s.b
	if b[i] == '-' {
		i++
	}
	j := digits(b, i)
	if j == i {
		return s.fail(i, "not a value"), 0
	}
	if b[i] == '0' && j > i+1 {
		return s.fail(i, "a number with a leading zero"), 0
	}
	k := kindInt
	if j < len(b) && b[j] == '.' {
		k = kindFloat
		if i, j = j+1, digits(b, j+1); i == j {
			return s.fail(i, "a number without digits after its point"), 0
		}
	}
	if j < len(b) && b[j]|0x20 == 'e' {
		k = kindFloat
		if j++; j < len(b) && (b[j] == '+' || b[j] == '-') {
			j++
		}
		if i, j = j, digits(b, j); i == j {
			return s.fail(i, "a number without digits in its exponent"), 0
		}
	}
	return j, k
}

// digits skips decimal digits.
func digits(b []byte, i int) int {
	for i < len(b) && b[i]-'0' <= 9 {
		i++
	}
	return i
}

// ints skips elements that are integers of fewer than eight digits, each followed by a
// comma and at most one space: all but the last element of an array of token ids. It
// returns their number and the start of the next element. It leaves all other elements
// to value.
func (s *scanner) ints(i int) (n, next int) {
	b := s.b
	for len(b)-i >= 10 {
		w := binary.LittleEndian.Uint64(b[i:])
		d := w ^ ones*'0'
		m := ((d + ones*(0x80-10)) | d) & tops // the first byte that is not a digit
		if m == 0 {
			break
		}
		width := bits.TrailingZeros64(m) >> 3
		if width == 0 || width > 1 && byte(w) == '0' || b[i+width] != ',' {
			break
		}
		n++
		i += width + 1
		if b[i] == ' ' {
			i++
		}
	}
	return n, i
}

// String returns the text of a raw JSON string. ok is false for any other value, and
// for a string that the scan would reject.
func String(raw []byte) (text string, ok bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	s := scanner{b: raw}
	end, escaped := s.str(0)
	switch {
	case end != len(raw):
		return "", false
	case escaped:
		return unescapedText(raw[1 : end-1]), true
	}
	return string(raw[1 : end-1]), true
}

// unescapedText returns the text between the quotes of a string, as one allocation of at most
// the same size.
func unescapedText(body []byte) string {
	text := appendUnescaped(make([]byte, 0, len(body)), body)
	return unsafe.String(unsafe.SliceData(text), len(text))
}

// maxDigits is the number of digits of the largest int64.
const maxDigits = 19

// Int64 returns the number in a raw JSON value. ok is false unless it is an integer,
// written without fraction and exponent, that fits.
func Int64(raw []byte) (n int64, ok bool) {
	digits := bytes.TrimPrefix(raw, []byte{'-'})
	if len(digits) == 0 || len(digits) > maxDigits || digits[0] == '+' || digits[0] == '0' && len(digits) > 1 {
		return 0, false
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return n, err == nil
}

// Bool returns the value of a raw JSON boolean. ok is false for any other value.
func Bool(raw []byte) (truth, ok bool) {
	switch string(raw) {
	case "true":
		return true, true
	case "false":
		return false, true
	}
	return false, false
}

// IsNull reports whether a raw value is null or missing (no bytes). Engines use the two
// interchangeably.
func IsNull(raw []byte) bool {
	return len(raw) == 0 || string(raw) == "null"
}

// appendUnescaped appends the text between the quotes of a string, up to an escape that the scan
// would reject.
func appendUnescaped(dst, body []byte) []byte {
	for len(body) > 0 {
		plain := bytes.IndexByte(body, '\\')
		if plain < 0 {
			return append(dst, body...)
		}
		dst = append(dst, body[:plain]...)
		var text [4]byte
		n := 0
		n, body = unescapeFirst(&text, body[plain:])
		dst = append(dst, text[:n]...)
	}
	return dst
}

// unescapeFirst returns the first character between the quotes of a string, with the number of its
// bytes, and the rest of the string. For an escape that the scan would reject it returns nothing.
func unescapeFirst(text *[4]byte, body []byte) (n int, rest []byte) {
	if body[0] != '\\' {
		_, n = utf8.DecodeRune(body)
		return copy(text[:], body[:n]), body[n:]
	}
	if len(body) > 1 && plainEscape[body[1]] {
		text[0] = unescaped(body[1])
		return 1, body[2:]
	}
	r, ok := hexEscape(body)
	if !ok {
		return 0, nil
	}
	body = body[6:]
	if r >= 0xD800 && r <= 0xDFFF {
		low, ok := hexEscape(body)
		if !ok {
			return 0, nil
		}
		body = body[6:]
		r = 0x10000 + (r-0xD800)<<10 + (low - 0xDC00)
	}
	return utf8.EncodeRune(text[:], r), body
}

// unescaped returns the meaning of a backslash followed by c.
func unescaped(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}

// AppendQuoted appends s as a JSON string. Bytes that are not UTF-8 become U+FFFD. Only
// characters that require it are escaped.
func AppendQuoted(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}
