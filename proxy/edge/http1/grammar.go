package http1

import "strings"

// Classes of bytes. A byte may be in several.
const (
	tokenByte  = 1 << iota // of methods and names (RFC 9110 5.6.2)
	valueByte              // of header values: tab, space, visible bytes, and those above ASCII
	targetByte             // of request targets: visible ASCII
	plainByte              // of request targets: stands for itself in a path
	hostByte               // of Host lines, as in net/http (httpguts.ValidHostHeader)
	digitByte
	quotedByte // in a quoted string, without a backslash before it (RFC 9110 5.6.4)
)

var classes = func() (t [256]uint8) {
	set := func(class uint8, bytes string) {
		for i := range len(bytes) {
			t[bytes[i]] |= class
		}
	}
	const alnum = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	set(digitByte, "0123456789")
	set(tokenByte, alnum+"!#$%&'*+-.^_`|~")
	set(plainByte, alnum+"-_.~$&+,/:;=@")
	set(hostByte, alnum+"!$%&()*+,-.:;=[']_~")
	for b := range 256 {
		if b == '\t' || b >= ' ' && b != 0x7f {
			t[b] |= valueByte
			if b != '"' && b != '\\' {
				t[b] |= quotedByte
			}
		}
		if b > ' ' && b < 0x7f {
			t[b] |= targetByte
		}
	}
	return t
}()

// all reports whether each byte of s is of the class.
func all(s string, class uint8) bool {
	for i := range len(s) {
		if classes[s[i]]&class == 0 {
			return false
		}
	}
	return true
}

// knownMethod reports whether s is a method that llhttp knows (constants.ts, METHODS_HTTP1). A
// server in front of the proxy that does not know a method may see another end of the request.
func knownMethod(s string) bool {
	switch s {
	case "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "LINK", "UNLINK",
		"COPY", "LOCK", "MKCOL", "MOVE", "PROPFIND", "PROPPATCH", "SEARCH", "UNLOCK", "BIND", "REBIND", "UNBIND", "ACL",
		"REPORT", "MKACTIVITY", "CHECKOUT", "MERGE", "M-SEARCH", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE",
		"MKCALENDAR", "PURGE", "SOURCE", "QUERY":
		return true
	}
	return false
}

// trim removes spaces and tabs at both ends.
func trim(s string) string { return strings.Trim(s, " \t") }

// hasToken reports whether a list of header lines has the token, in any case of letters.
func hasToken(lines []string, token string) bool {
	for _, line := range lines {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(trim(part), token) {
				return true
			}
		}
	}
	return false
}
