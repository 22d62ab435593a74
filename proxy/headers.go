package proxy

import (
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// hopByHop are the header lines of one connection (RFC 9110 7.6.1), and those
// that each side's client writes itself.
var hopByHop = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Proxy-Authenticate": true,
	"Proxy-Authorization": true, "Te": true, "Trailer": true, "Transfer-Encoding": true,
	"Upgrade": true, "Content-Length": true,
}

// notForwarded are request lines that end at the proxy: the body reaches
// engines plain and whole, and the answer must come back uncompressed.
var notForwarded = map[string]bool{
	"Host": true, "Expect": true, "Accept-Encoding": true, "X-Request-Id": true, "Alt-Used": true, "Content-Type": true,
}

// clientFields appends the client's header lines that every leg carries. The two
// lines that may hold an API key pass only where the proxy asks for none itself;
// PD lines (rank, x-override-*) only when the client is trusted.
func clientFields(dst []upstream.Field, h http.Header, keepKey, trust bool) []upstream.Field {
	// The body has been read as JSON; vLLM refuses any other name for it.
	dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	named := connectionNamed(h)
	for k, vs := range h {
		if hopByHop[k] || notForwarded[k] || named[k] ||
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
