package upstream

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// check rejects a request that could not be written without changing its meaning.
func (r *Request) check() error {
	if r.Method != "" && !isToken(r.Method) {
		return errBadMethod
	}
	if !isPath(r.Path) {
		return errBadPath
	}
	for i := range r.Header {
		f := &r.Header[i]
		if !ValidField(*f) {
			return errBadField
		}
		if sameName(f.Name, "Transfer-Encoding") {
			return errBadCoding
		}
	}
	return nil
}

// untilSent returns limit (0: none), or the time left until by (Request.SendBy) if that
// is less.
func untilSent(by time.Time, limit time.Duration) time.Duration {
	if by.IsZero() {
		return limit
	}
	left := max(1, time.Until(by))
	if limit > 0 {
		left = min(left, limit)
	}
	return left
}

// ValidField reports whether a header field can be written unchanged: its name is a
// token, and its value has no control character but tab.
func ValidField(f Field) bool { return isToken(f.Name) && isFieldValue(f.Value) }

func (r *Request) method() string {
	if r.Method == "" {
		return http.MethodGet
	}
	return r.Method
}

// bodySize returns the length of the whole body in bytes.
func (r *Request) bodySize() int {
	n := 0
	for _, b := range r.Body {
		n += len(b)
	}
	return n
}

// appendHead appends the request's head in wire form. The request must have passed
// check.
func (r *Request) appendHead(b []byte, host string, size int) []byte {
	b = append(b, r.method()...)
	b = append(b, ' ')
	b = append(b, r.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, host...)
	b = append(b, "\r\n"...)
	for i := range r.Header {
		f := &r.Header[i]
		if ownField(f.Name) {
			continue
		}
		b = append(b, f.Name...)
		b = append(b, ": "...)
		b = append(b, f.Value...)
		b = append(b, "\r\n"...)
	}
	if r.sendsLength(size) {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, int64(size), 10)
		b = append(b, "\r\n"...)
	}
	return append(b, "\r\n"...)
}

// sendsLength reports whether the head has a Content-Length: always with a body;
// without one only for methods with which servers expect a body (RFC 9110, 8.6).
func (r *Request) sendsLength(size int) bool {
	return size > 0 || r.Method == http.MethodPost || r.Method == http.MethodPut || r.Method == http.MethodPatch
}

// ownField reports whether the client itself writes the field of that name.
func ownField(name string) bool {
	return sameName(name, "Host") || sameName(name, "Content-Length")
}

// isToken reports whether s is a token of RFC 9110, 5.6.2.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c|0x20 && c|0x20 <= 'z', '0' <= c && c <= '9':
		case strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return len(s) > 0
}

// isFieldValue reports whether s has no control character but tab: above all no
// CR, LF or NUL.
func isFieldValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// isPath reports whether s is valid in a request line.
func isPath(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c == 0x7f {
			return false
		}
	}
	return s != "" && s[0] == '/'
}
