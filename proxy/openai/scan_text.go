package openai

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
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

// multibyte reads the run of characters outside ASCII that begins at i.
func (s *scanner) multibyte(i int) int {
	b := s.b
	for {
		for len(b)-i >= 4 {
			n := shortRune(binary.LittleEndian.Uint32(b[i:]))
			if n == 0 {
				break
			}
			i += n
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

// shortRune returns the length of the character at the start of w (the lowest byte is
// the first) if it is a well-formed one of two or three bytes; else 0. Nearly all
// letters have that length.
func shortRune(w uint32) int {
	if w&0xC0C0F0 == 0x8080E0 {
		// 0: overlong; 0x200D: half of a surrogate pair.
		if edge := w & 0x200F; edge != 0 && edge != 0x200D {
			return 3
		}
	} else if w&0xC0E0 == 0x80C0 && w&0x1E != 0 {
		return 2
	}
	return 0
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
