package http1

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// exception is a kind of request that the proxy accepts and llhttp refuses.
type exception struct {
	name, reason string
	refusals     []string                  // begin the reasons of llhttp
	applies      func(seen []message) bool // seen: the requests of the connection up to this one
}

// exceptions are all kinds of requests that the proxy may accept although llhttp refuses them. No
// exception concerns the length of a body. There is none for a request that llhttp accepts and reads
// in another way, and only one for net/http (judge).
var exceptions = []exception{{
	name:     "unknown method",
	reason:   "llhttp has a list of methods. The proxy answers 404 or 405 to others.",
	refusals: []string{"HPE_INVALID_METHOD", "HPE_INVALID_VERSION: Expected HTTP/2 Connection Preface", "HPE_PAUSED_H2_UPGRADE", "is not a whole head"}, // the last: PRI, for which llhttp awaits a preface
	applies:  func(seen []message) bool { return !slices.Contains(methods, last(seen).method) },
}, {
	name:     "minor version",
	reason:   "RFC 9110 2.5: HTTP/1.2 is read as HTTP/1.1. The proxy refuses Transfer-Encoding there.",
	refusals: []string{"HPE_INVALID_VERSION: Invalid HTTP version"},
	applies:  func(seen []message) bool { return last(seen).proto != "HTTP/1.1" && last(seen).proto != "HTTP/1.0" },
}, {
	name:     "characters of the target",
	reason:   "llhttp refuses bytes from 0x80 on, and allows only letters in a scheme. The proxy knows no such path and answers 404.",
	refusals: []string{"HPE_INVALID_URL"},
	applies: func(seen []message) bool {
		t := last(seen).target
		return strings.ContainsFunc(t, func(r rune) bool { return r > 0x7f }) || !strings.HasPrefix(t, "/")
	},
}, {
	name:     "chunk extension",
	reason:   "llhttp checks the syntax of extensions, which have no meaning for the proxy. Size and line end are the same.",
	refusals: []string{"HPE_STRICT: Invalid character in chunk extensions"},
	applies:  func([]message) bool { return true },
}, {
	name:     "close that only llhttp sees",
	reason:   "llhttp takes Proxy-Connection: close, Connection: close in a trailer, and close in a value that is no list, for the end of the connection. The request ends at the same byte.",
	refusals: []string{"HPE_CLOSED_CONNECTION"},
	applies: func(seen []message) bool {
		if len(seen) < 2 {
			return false
		}
		before := seen[len(seen)-2]
		has := func(lines []string, name string, ok func(value string) bool) bool {
			return slices.ContainsFunc(lines, func(line string) bool {
				value, is := strings.CutPrefix(line, name+": ")
				return is && ok(value)
			})
		}
		always := func(string) bool { return true }
		noList := func(value string) bool { return strings.Contains(strings.ReplaceAll(value, ", ", ","), " ") }
		return has(before.fields, "proxy-connection", always) || has(before.fields, "connection", noList) ||
			has(before.trailers, "connection", always) || has(before.trailers, "proxy-connection", always)
	},
}}

// methods are the methods of the streams that llhttp knows.
var methods = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"}

func last(seen []message) message { return seen[len(seen)-1] }

// judge compares what the proxy accepted with llhttp and with net/http. It returns the known
// exception that ended the comparison with llhttp, and a difference that no exception explains. If
// net/http ends the connection after a request, the proxy may accept a further one: net/http reads
// only one of several Connection lines, and finds tokens in a value that is no list.
func judge(got observation, l reading, std observation) (*exception, string) {
	if d, n := got.compare(std.reading); d != "" && !(n == len(std.messages) && std.refused == "" && std.closes()) {
		return nil, fmt.Sprintf("request %d is %v; for net/http it %s", n, got.messages[n], d)
	}
	d, n := got.compare(l)
	if d == "" {
		return nil, ""
	}
	seen := slices.Clone(got.messages[:n+1])
	for i := range seen {
		if seen[i].own && i < len(l.messages) {
			seen[i] = l.messages[i]
		}
	}
	for i, e := range exceptions {
		if e.refuses(d) && e.applies(seen) {
			return &exceptions[i], ""
		}
	}
	return nil, fmt.Sprintf("request %d is %v; for llhttp it %s", n, got.messages[n], d)
}

// otherProtocol reports whether a stream begins with the preface of HTTP/2 (RFC 9113 3.4).
func otherProtocol(stream []byte) bool {
	return bytes.HasPrefix(stream, []byte("PRI * HTTP/2.0\r\n\r\n"))
}

// refuses reports whether the exception covers a reason of llhttp. reason may be a difference that
// ends in one.
func (e exception) refuses(reason string) bool {
	return slices.ContainsFunc(e.refusals, func(r string) bool { return strings.Contains(reason, r) })
}

// judged reports whether an exception covers a reason for which llhttp refuses requests. Then
// TestRandomStreams judges such requests.
func judged(reason string) bool {
	return slices.ContainsFunc(exceptions, func(e exception) bool { return e.refuses(reason) })
}
