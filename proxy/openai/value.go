package openai

import (
	"bytes"
	"unicode/utf8"
	"unsafe"
)

// String returns the text of a raw JSON string. ok is false for any other value, and
// for a string that the scan would reject.
func String(raw []byte) (text string, ok bool) {
	if !isString(raw) {
		return "", false
	}
	body := raw[1 : len(raw)-1]
	if bytes.IndexByte(body, '\\') < 0 {
		return string(body), true
	}
	return unescapedText(body), true
}

// unescapedText returns the text between the quotes of a string that the scan has accepted, as one
// allocation of at most the same size.
func unescapedText(body []byte) string {
	text := appendUnescaped(make([]byte, 0, len(body)), body)
	return unsafe.String(unsafe.SliceData(text), len(text))
}

// isString reports whether raw is exactly one string.
func isString(raw []byte) bool {
	if len(raw) < 2 || raw[0] != '"' {
		return false
	}
	s := scanner{b: raw}
	end, _ := s.str(0)
	return end == len(raw)
}

// Int64 returns the number in a raw JSON value. ok is false unless it is an integer,
// written without fraction and exponent, that fits.
func Int64(raw []byte) (n int64, ok bool) {
	digits, negative := raw, len(raw) > 0 && raw[0] == '-'
	if negative {
		digits = raw[1:]
	}
	if len(digits) == 0 || len(digits) > 1 && digits[0] == '0' {
		return 0, false
	}
	for _, c := range digits {
		d := int64(c) - '0'
		// Counted down, because negative numbers reach one further.
		if d < 0 || d > 9 || n < (-1<<63+d)/10 {
			return 0, false
		}
		n = n*10 - d
	}
	if !negative {
		if n == -1<<63 {
			return 0, false
		}
		n = -n
	}
	return n, true
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

// appendUnescaped appends the text between the quotes of a string that the scan has
// accepted.
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

// unescapeFirst returns the first character of a string that the scan has accepted, with the
// number of its bytes, and the rest of the string.
func unescapeFirst(text *[4]byte, body []byte) (n int, rest []byte) {
	if body[0] != '\\' {
		_, n = utf8.DecodeRune(body)
		return copy(text[:], body[:n]), body[n:]
	}
	if body[1] != 'u' {
		text[0] = unescaped(body[1])
		return 1, body[2:]
	}
	r, _ := hexEscape(body)
	body = body[6:]
	if r >= 0xD800 && r <= 0xDFFF {
		low, _ := hexEscape(body)
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
	for i := 0; i < len(s); {
		if c := s[i]; c < utf8.RuneSelf {
			i++
			switch {
			case c == '"' || c == '\\':
				dst = append(dst, '\\', c)
			case c == '\n':
				dst = append(dst, `\n`...)
			case c == '\r':
				dst = append(dst, `\r`...)
			case c == '\t':
				dst = append(dst, `\t`...)
			case c < 0x20:
				dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			default:
				dst = append(dst, c)
			}
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		dst = utf8.AppendRune(dst, r)
		i += n
	}
	return append(dst, '"')
}
