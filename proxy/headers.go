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

// lineName is the name by which a header line is judged: many servers read an
// underscore as a hyphen. name is in canonical form.
func lineName(name string) string {
	if strings.IndexByte(name, '_') < 0 {
		return name
	}
	return http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))
}

// ownLine reports whether a line is one of those by which the proxy tells of itself:
// neither clients nor engines write them. name is as lineName gives it.
func ownLine(name string) bool { return strings.HasPrefix(name, "X-Pdproxy-") }

// clientFields appends the client's header lines that every leg carries. The two
// lines that may hold an API key pass only where the proxy asks for none itself;
// PD lines (rank, x-override-*) only when the client is trusted.
func clientFields(dst []upstream.Field, h http.Header, keepKey, trust bool) []upstream.Field {
	// The body has been read as JSON; vLLM refuses any other name for it.
	dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	var named map[string]bool
	for _, v := range h["Connection"] {
		named = addNamed(named, v)
	}
	for k, vs := range h {
		name := lineName(k)
		if hopByHop(name) || endsHere(name) || named[name] || ownLine(name) ||
			!keepKey && (name == "Authorization" || name == "X-Api-Key") || !trust && connector.PDHeader(name) {
			continue
		}
		for _, v := range vs {
			dst = append(dst, upstream.Field{Name: k, Value: v})
		}
	}
	return dst
}

// addNamed adds the lines that the value of a Connection line names as hop-by-hop
// (RFC 9110 7.6.1), as lineName gives them; named stays nil for the usual values.
func addNamed(named map[string]bool, value string) map[string]bool {
	for name := range strings.SplitSeq(value, ",") {
		name = lineName(http.CanonicalHeaderKey(strings.TrimSpace(name)))
		if name == "" || name == "Keep-Alive" || name == "Close" {
			continue
		}
		if named == nil {
			named = make(map[string]bool)
		}
		named[name] = true
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
