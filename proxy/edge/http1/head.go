package http1

import (
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
)

// head is what the connection needs to know of a request's head beside the http.Request.
type head struct {
	length    int64 // of the body in bytes; -1: chunked
	continues bool  // the client may wait for 100 Continue
	close     bool  // the client wants no further request on the connection
	keep      bool  // a client of HTTP/1.0 wants further requests
}

// parseHead reads a whole head, whose lines all end in CRLF, into r, which is empty. The strings of
// r share the memory of text, except for values of a large one. u is the memory of r.URL.
//
// It accepts only heads that net/http and llhttp (npm, without lenient flags) accept too, so that no
// server in front of the proxy sees another request in the same bytes.
func parseHead(text string, r *http.Request, u *url.URL) (h head, err error) {
	line, rest, _ := strings.Cut(text, "\r\n")
	if err = parseRequestLine(line, r, u); err != nil {
		return h, err
	}
	if err = parseFields(rest, &r.Header); err != nil {
		return h, err
	}
	if err = takeHost(r); err != nil {
		return h, err
	}
	if h.length, err = bodyLength(r); err != nil {
		return h, err
	}
	if lines := r.Header["Expect"]; len(lines) > 0 && lines[0] != "" { // net/http reads one line
		if !hasToken(lines[:1], "100-continue") {
			return h, BadExpectation
		}
		h.continues = r.ProtoMinor > 0 && h.length != 0
	}
	connection := r.Header["Connection"]
	h.close = hasToken(connection, "close") || hasToken(r.Header["Proxy-Connection"], "close")
	if r.ProtoMinor == 0 {
		h.keep = !h.close && len(connection) > 0 && hasToken(connection[:1], "keep-alive") // net/http reads one line
		h.close = !h.keep
	}
	r.Close = h.close
	return h, nil
}

func parseRequestLine(line string, r *http.Request, u *url.URL) error {
	method, rest, ok := strings.Cut(line, " ")
	target, proto, ok2 := strings.Cut(rest, " ")
	if !ok || !ok2 || method == "" || !all(method, tokenByte) {
		return Malformed
	}
	switch proto {
	case "HTTP/1.1":
		r.ProtoMinor = 1
	case "HTTP/1.0":
	default:
		if len(proto) == len("HTTP/x.y") && proto[:5] == "HTTP/" && digit(proto[5]) && proto[6] == '.' && digit(proto[7]) {
			return UnknownVersion
		}
		return Malformed
	}
	if !knownMethod(method) {
		return UnknownMethod
	}
	r.Method, r.RequestURI, r.Proto, r.ProtoMajor = method, target, proto, 1
	return parseTarget(target, r, u)
}

func digit(b byte) bool { return '0' <= b && b <= '9' }

// parseTarget reads the four forms of a target (RFC 9112 3.2).
func parseTarget(target string, r *http.Request, u *url.URL) (err error) {
	r.URL = u
	if target == "" || !all(target, targetByte) {
		return Malformed
	}
	switch {
	case target[0] == '/':
		path, query, found := strings.Cut(target, "?")
		if all(path, plainByte) && !(found && query == "") {
			u.Path, u.RawQuery = path, query
			return nil
		}
		r.URL, err = url.ParseRequestURI(target)
	case r.Method == "CONNECT":
		if !all(target, hostByte) {
			return Malformed
		}
		if r.URL, err = url.ParseRequestURI("http://" + target); err == nil {
			r.URL.Scheme = ""
		}
	case target == "*":
		u.Path = "*"
	default:
		scheme, rest, found := strings.Cut(target, "://")
		host := rest
		if i := strings.IndexAny(rest, "/?"); i >= 0 {
			host = rest[:i]
		}
		user, server, named := strings.Cut(host, "@")
		if !named {
			user, server = "", host
		}
		if !found || !letters(scheme) || !all(user, hostByte) || !all(server, hostByte) {
			return Malformed
		}
		r.URL, err = url.ParseRequestURI(target)
	}
	if err != nil {
		return Malformed
	}
	return nil
}

func letters(s string) bool {
	for i := range len(s) {
		if b := s[i] | 0x20; b < 'a' || b > 'z' {
			return false
		}
	}
	return s != ""
}

// parseFields reads header lines up to the empty line. All values share one array: a value that
// is appended to a line gets a new one.
func parseFields(text string, to *http.Header) error {
	n := strings.Count(text, "\n") - 1 // the empty line
	h := make(http.Header, min(n, 64)) // a head may repeat one name
	values := make([]string, n)
	*to = h
	large := len(text) > maxShared
	for {
		line, rest, _ := strings.Cut(text, "\r\n")
		if line == "" {
			return nil
		}
		text = rest
		if line[0] == ' ' || line[0] == '\t' { // folds the line before
			return BadLine
		}
		key, value, ok := strings.Cut(line, ":")
		switch {
		case ok && strings.IndexByte(key, ' ') >= 0:
			return BadName
		case !ok || key == "" || !all(key, tokenByte) || !all(value, valueByte):
			return Malformed
		}
		name := textproto.CanonicalMIMEHeaderKey(key)
		switch name {
		case "Content-Length", "Transfer-Encoding":
			if strings.IndexByte(value, '\t') >= 0 || name[0] == 'C' && len(line) > longestLength { // llhttp refuses tabs
				return UnclearLength
			}
		}
		if value = trim(value); large {
			value = strings.Clone(value)
		}
		if lines, ok := h[name]; ok {
			h[name] = append(lines, value)
			continue
		}
		values[0] = value
		h[name], values = values[:1:1], values[1:]
	}
}

// maxShared is the size in bytes of the largest head whose values share its memory: a value that is kept
// for long, such as the id of a request, keeps no more than this.
const maxShared = 2 << 10

// longestLength is the size of the longest Content-Length line. A longer one has more zeros or
// spaces than any client sends.
const longestLength = 64

// takeHost moves the Host line from the header to r.Host. The host of an absolute target has
// precedence (RFC 9112 3.2.2).
func takeHost(r *http.Request) error {
	lines := r.Header["Host"]
	switch {
	case len(lines) > 1:
		return Malformed
	case len(lines) == 1 && !all(lines[0], hostByte):
		return BadHost
	case len(lines) == 0 && r.ProtoMinor > 0:
		return NoHost
	case len(lines) == 1:
		r.Host = lines[0]
		delete(r.Header, "Host")
	}
	if r.URL.Host != "" {
		r.Host = r.URL.Host
	}
	return nil
}

// bodyLength returns the length of the body in bytes, -1 if it is chunked, and sets the fields of r
// for it.
func bodyLength(r *http.Request) (int64, error) {
	lengths, codings := r.Header["Content-Length"], r.Header["Transfer-Encoding"]
	connect := r.Method == http.MethodConnect // llhttp reads no body behind it
	if codings != nil {
		if lengths != nil || r.ProtoMinor == 0 || connect {
			return 0, UnclearLength
		}
		if len(codings) > 1 || !strings.EqualFold(codings[0], "chunked") {
			return 0, UnknownCoding
		}
		delete(r.Header, "Transfer-Encoding")
		r.TransferEncoding, r.ContentLength = []string{"chunked"}, -1
		return -1, announceTrailer(r)
	}
	if lengths == nil {
		return 0, nil
	}
	if len(lengths) > 1 {
		return 0, UnclearLength
	}
	n, ok := parseLength(lengths[0])
	if !ok || connect && n > 0 {
		return 0, UnclearLength
	}
	r.ContentLength = n
	return n, nil
}

// parseLength reads digits, at most as many as an int64 has.
func parseLength(s string) (int64, bool) {
	if len(s) > 19 || !all(s, digitByte) { // ParseInt refuses an empty one
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil
}

// announceTrailer moves the names of the Trailer lines to r.Trailer.
func announceTrailer(r *http.Request) error {
	lines := r.Header["Trailer"]
	if lines == nil {
		return nil
	}
	delete(r.Header, "Trailer")
	r.Trailer = make(http.Header)
	for _, line := range lines {
		for name := range strings.SplitSeq(line, ",") {
			if name = trim(name); name == "" {
				continue
			}
			if name = textproto.CanonicalMIMEHeaderKey(name); frames(name) {
				return Malformed
			}
			r.Trailer[name] = nil
		}
	}
	return nil
}

// frames reports whether a field with this canonical name behind a body may show another server
// another end of the body.
func frames(name string) bool {
	return name == "Content-Length" || name == "Transfer-Encoding" || name == "Trailer"
}

// forbiddenTrailer reports whether a field with this canonical name has no meaning behind an answer,
// because it is needed to find the body or the next request (RFC 9110 6.5.1).
func forbiddenTrailer(name string) bool {
	switch name {
	case "Transfer-Encoding", "Content-Length", "Trailer", "Host", "Connection", "Upgrade":
		return true
	}
	return false
}
