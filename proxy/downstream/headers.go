package downstream

import (
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// hopByHop reports whether a header line belongs to one connection (RFC 9110 7.6.1), or
// is one that the client of each side writes itself.
func hopByHop(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length":
		return true
	}
	return false
}

// endsHere reports whether a header line of a request is not for engines: engines get
// the body decoded and whole, and must not compress the answer.
func endsHere(name string) bool {
	switch name {
	case "Host", "Expect", "Accept-Encoding", "X-Request-Id", "Alt-Used", "Content-Type", "Content-Encoding":
		return true
	}
	return false
}

// Proxied reports whether the proxy itself sets, or removes, a header line of that
// canonical name in requests to engines.
func Proxied(name string) bool { return hopByHop(name) || endsHere(name) }

// lineName returns the name by which rules for header lines apply: many servers read an
// underscore as a hyphen. The given name is in canonical form.
func lineName(name string) string {
	if strings.IndexByte(name, '_') < 0 {
		return name
	}
	return http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))
}

// OwnLine reports whether only the proxy writes a header line: lines of clients and
// engines with that canonical name are dropped.
func OwnLine(name string) bool { return ownLine(lineName(name)) }

// ownLine is OwnLine for a result of lineName.
func ownLine(name string) bool { return strings.HasPrefix(name, "X-Pdproxy-") }

func appendFields(dst []upstream.Field, h http.Header, contentType string, keepKey, trust bool) []upstream.Field {
	// The type is that of the parser that has accepted the body: vLLM refuses any other.
	dst = append(dst, upstream.Field{Name: "Content-Type", Value: contentType})
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

// addNamed adds the names that the value of a Connection line has (RFC 9110 7.6.1), as
// results of lineName. For the usual values named stays nil.
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

// Without removes every line of that name from fields, which it overwrites.
func Without(fields []upstream.Field, name string) []upstream.Field {
	kept := fields[:0]
	for _, f := range fields {
		if !strings.EqualFold(f.Name, name) {
			kept = append(kept, f)
		}
	}
	return kept
}

// CopyHeader copies the header lines of an engine's answer, except those of the
// connection, those that the engine's Connection line names, those that the proxy sets
// itself, and those that let web pages read the answer: vLLM and SGLang allow each page, and
// only server.cors_origins decides.
func CopyHeader(dst http.Header, resp *upstream.Response) {
	var named map[string]bool
	for _, f := range resp.Header {
		if strings.EqualFold(f.Name, "Connection") {
			named = addNamed(named, f.Value)
		}
	}
	for _, f := range resp.Header {
		k := http.CanonicalHeaderKey(f.Name)
		name := lineName(k)
		if hopByHop(name) || named[name] || ownLine(name) || name == "X-Request-Id" || name == "Date" || name == "Alt-Svc" || strings.HasPrefix(name, "Access-Control-") {
			continue
		}
		if len(dst[k]) > 0 && strings.HasPrefix(name, "X-Ratelimit-") { // the budget of the client's tenant
			continue
		}
		dst[k] = append(dst[k], f.Value)
	}
}
