package http1

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// exception is a kind of request that the proxy accepts and llhttp refuses. seen are the requests of
// the connection up to this one.
type exception struct {
	name, reason string
	applies      func(seen []message, difference string) bool
}

// exceptions are all kinds of requests that the proxy may accept although llhttp refuses them. No
// exception concerns the length of a body. There are none for net/http, and none for a request that
// llhttp accepts and reads in another way.
var exceptions = []exception{{
	name:   "unknown method",
	reason: "llhttp has a list of methods. The proxy answers 404 or 405 to others.",
	applies: func(seen []message, difference string) bool {
		return !slices.Contains(methods, last(seen).method) && refusedFor(difference, "HPE_INVALID_METHOD", "HPE_INVALID_VERSION: Expected HTTP/2 Connection Preface", "HPE_PAUSED_H2_UPGRADE")
	},
}, {
	name:   "minor version",
	reason: "RFC 9110 2.5: HTTP/1.2 is read as HTTP/1.1. The proxy refuses Transfer-Encoding there.",
	applies: func(seen []message, difference string) bool {
		return last(seen).proto != "HTTP/1.1" && last(seen).proto != "HTTP/1.0" && refusedFor(difference, "HPE_INVALID_VERSION: Invalid HTTP version")
	},
}, {
	name:   "characters of the target",
	reason: "llhttp refuses bytes from 0x80 on, and a target that is no path and no URL with ://. The proxy knows no such path and answers 404.",
	applies: func(seen []message, difference string) bool {
		t := last(seen).target
		return (strings.ContainsFunc(t, func(r rune) bool { return r > 0x7f }) || t[0] != '/' && !strings.Contains(t, "://")) && refusedFor(difference, "HPE_INVALID_URL")
	},
}, {
	name:   "chunk extension",
	reason: "llhttp checks the syntax of extensions, which have no meaning for the proxy. Size and line end are the same.",
	applies: func(_ []message, difference string) bool {
		return refusedFor(difference, "HPE_STRICT: Invalid character in chunk extensions")
	},
}, {
	name:   "close that only llhttp sees",
	reason: "llhttp takes Proxy-Connection: close, and Connection: close in a trailer, for the end of the connection. The request ends at the same byte.",
	applies: func(seen []message, difference string) bool {
		if len(seen) < 2 || !refusedFor(difference, "HPE_CLOSED_CONNECTION") {
			return false
		}
		before := seen[len(seen)-2]
		return slices.ContainsFunc(slices.Concat(before.fields, before.trailers), func(f string) bool {
			return strings.HasPrefix(f, "proxy-connection: ") || slices.Contains(before.trailers, f) && strings.HasPrefix(f, "connection: ")
		})
	},
}}

// methods are the methods of the streams that llhttp knows.
var methods = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"}

func last(seen []message) message { return seen[len(seen)-1] }

// judge compares what the proxy accepted with llhttp and with net/http. It returns the known
// exception that ended the comparison with llhttp, and a difference that no exception explains.
func judge(got observation, l reading, std observation) (*exception, string) {
	if d, n := got.compare(std.reading); d != "" {
		return nil, fmt.Sprintf("request %d is %v; for net/http it %s", n, got.messages[n], d)
	}
	d, n := got.compare(l)
	if d == "" {
		return nil, ""
	}
	for i, e := range exceptions {
		if e.applies(got.messages[:n+1], d) {
			return &exceptions[i], ""
		}
	}
	return nil, fmt.Sprintf("request %d is %v; for llhttp it %s", n, got.messages[n], d)
}

// otherProtocol reports that a stream begins with the preface of HTTP/2 (RFC 9113 3.4).
func otherProtocol(stream []byte) bool {
	return bytes.HasPrefix(stream, []byte("PRI * HTTP/2.0\r\n\r\n"))
}

func refusedFor(difference string, reasons ...string) bool {
	for _, r := range reasons {
		if strings.Contains(difference, "refused: "+r) || strings.Contains(difference, "has no end: "+r) {
			return true
		}
	}
	return false
}
