package proxy

import (
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// hopByHop reports whether a header line is of one connection (RFC 9110 7.6.1),
// or one that each side's client writes itself.
func hopByHop(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length":
		return true
	}
	return false
}

// endsHere reports whether a request line ends at the proxy: the body reaches
// engines plain and whole, and the answer must come back uncompressed.
func endsHere(name string) bool {
	switch name {
	case "Host", "Expect", "Accept-Encoding", "X-Request-Id", "Alt-Used", "Content-Type", "Content-Encoding":
		return true
	}
	return false
}

// clientFields appends the client's header lines that every leg carries. The two
// lines that may hold an API key pass only where the proxy asks for none itself;
// PD lines (rank, x-override-*) only when the client is trusted.
func clientFields(dst []upstream.Field, h http.Header, keepKey, trust bool) []upstream.Field {
	// The body has been read as JSON; vLLM refuses any other name for it.
	dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	named := connectionNamed(h)
	for k, vs := range h {
		if hopByHop(k) || endsHere(k) || named[k] ||
			!keepKey && (k == "Authorization" || k == "X-Api-Key") || !trust && connector.PDHeader(k) {
			continue
		}
		for _, v := range vs {
			dst = append(dst, upstream.Field{Name: k, Value: v})
		}
	}
	return dst
}

// connectionNamed returns the lines that the Connection header names as
// hop-by-hop; nil for the usual values.
func connectionNamed(h http.Header) map[string]bool {
	var named map[string]bool
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			name = http.CanonicalHeaderKey(strings.TrimSpace(name))
			if name == "" || name == "Keep-Alive" || name == "Close" {
				continue
			}
			if named == nil {
				named = make(map[string]bool)
			}
			named[name] = true
		}
	}
	return named
}

// without returns fields less every line of that name.
func without(fields []upstream.Field, name string) []upstream.Field {
	kept := fields[:0]
	for _, f := range fields {
		if !strings.EqualFold(f.Name, name) {
			kept = append(kept, f)
		}
	}
	return kept
}
