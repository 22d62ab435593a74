package downstream

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// RequestID returns the client's X-Request-Id, or a new one where the client sent none
// that is fit for a line of the log.
func RequestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if id == "" || len(id) > 128 {
		return RandomHex(16)
	}
	for i := range len(id) {
		if id[i] <= ' ' || id[i] > '~' {
			return RandomHex(16)
		}
	}
	return id
}

// RandomHex returns n random bytes, 16 at most, in hexadecimal.
func RandomHex(n int) string {
	var raw [16]byte
	var text [2 * len(raw)]byte
	rand.Read(raw[:n]) // never fails (crypto/rand)
	return string(text[:hex.Encode(text[:], raw[:n])])
}

// AppendFields appends the client's header lines that every leg carries, with that
// Content-Type. The two lines that may hold an API key are included only if keepKey is set,
// and PD lines (rank, x-override-*) only if trust is set.
func (c *Client) AppendFields(dst []upstream.Field, contentType string, keepKey, trust bool) []upstream.Field {
	// The type is that of the parser that has accepted the body: vLLM refuses any other.
	dst = append(dst, upstream.Field{Name: "Content-Type", Value: contentType})
	var named map[string]bool
	for _, v := range c.r.Header["Connection"] {
		named = addNamed(named, v)
	}
	for k, vs := range c.r.Header {
		name := lineName(k)
		if hopByHop(name) || endsHere(name) || named[name] || strings.HasPrefix(name, ownPrefix) ||
			!keepKey && (name == "Authorization" || name == "X-Api-Key") || !trust && connector.PDHeader(name) {
			continue
		}
		for _, v := range vs {
			dst = append(dst, upstream.Field{Name: k, Value: v})
		}
	}
	return dst
}

// CopyHeader copies the header lines of an engine's answer to the client's answer.
func (c *Client) CopyHeader(resp *upstream.Response) { CopyHeader(c.w.Header(), resp) }

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
		if hopByHop(name) || named[name] || strings.HasPrefix(name, ownPrefix) || name == "X-Request-Id" || name == "Date" || name == "Alt-Svc" || strings.HasPrefix(name, "Access-Control-") {
			continue
		}
		if len(dst[k]) > 0 && strings.HasPrefix(name, "X-Ratelimit-") { // the budget of the client's tenant
			continue
		}
		dst[k] = append(dst[k], f.Value)
	}
}

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

// lineName returns the name by which rules for a header line with an underscore apply: many
// servers read it as a hyphen. The given name is in canonical form.
func lineName(name string) string {
	if strings.IndexByte(name, '_') < 0 {
		return name
	}
	return http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))
}

// OwnLine reports whether only the proxy writes a header line: lines of clients and
// engines with that canonical name are dropped.
func OwnLine(name string) bool { return strings.HasPrefix(lineName(name), ownPrefix) }

// ownPrefix begins the names of lines that only the proxy writes.
const ownPrefix = "X-Pdproxy-"

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
