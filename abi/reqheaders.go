package abi

import (
	"errors"
	"strconv"
	"strings"
)

// RequestHeader is a header of the request that a module has declared. Several lines of one
// name are one value, joined with ", ". The zero value is an absent header.
type RequestHeader struct {
	// Name is in lower case. DecodePlan and the other Decode functions leave Name empty,
	// because frames do not have names: a frame has the headers in the order of the
	// module's declaration.
	Name string
	// Value is UTF-8 of at most MaxHeaderValue bytes. Each run of bytes that are not UTF-8
	// is one "?".
	Value string
	// Present: the request has the header; its value may be empty.
	Present bool
	// Cut: the request's value is longer than Value.
	Cut bool
}

// Bounds of the headers that policies declare.
const (
	MaxHeaders     = 8   // names of one module
	MaxHeaderName  = 64  // bytes of a name
	MaxHeaderValue = 256 // bytes of a value in a frame
	MaxAllHeaders  = 32  // different names of all policies in use
)

// Header returns the value of a declared header of the request. ok is false if the request
// does not have the header, or if the module did not declare it. name is in lower case.
func (f *RequestFacts) Header(name string) (value string, ok bool) {
	h := findHeader(f.Headers, name)
	return h.Value, h.Present
}

func findHeader(list []RequestHeader, name string) RequestHeader {
	for i := range list {
		if list[i].Name == name {
			return list[i]
		}
	}
	return RequestHeader{}
}

// ParseHeaders reads the text of ExportHeaders: the name of one request header in each line.
// The result has the names in their order, in lower case. The error names a line that is not
// the name of a header, that occurs twice, or whose header carries credentials: the proxy
// never shows credentials to a policy.
func ParseHeaders(text string) (names []string, err error) {
	for line := range strings.Lines(text) {
		name := strings.ToLower(strings.TrimSpace(line))
		switch {
		case name == "":
			continue
		case len(name) > MaxHeaderName:
			return nil, errors.New("read headers: a name has at most " + strconv.Itoa(MaxHeaderName) + " bytes, found " + strconv.Quote(name[:MaxHeaderName]) + "...")
		case !isToken(name):
			return nil, errors.New("read headers: " + strconv.Quote(name) + " is not the name of a header")
		case carriesCredentials(name):
			return nil, errors.New("read headers: " + strconv.Quote(name) + " carries credentials, which the proxy never shows to a policy")
		case len(names) == MaxHeaders:
			return nil, errors.New("read headers: a module declares at most " + strconv.Itoa(MaxHeaders) + " headers")
		}
		for _, known := range names {
			if known == name {
				return nil, errors.New("read headers: " + strconv.Quote(name) + " is declared twice")
			}
		}
		names = append(names, name)
	}
	return names, nil
}

// isToken reports whether every byte may be part of the name of a header (RFC 9110, 5.6.2).
func isToken(name string) bool {
	for i := range len(name) {
		c := name[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return true
}

// carriesCredentials reports whether the header of that name carries keys, tokens or cookies,
// by its name. Some servers read an underscore as a hyphen. Clients send keys in these headers, among
// others: sec-websocket-protocol (Realtime API), ocp-apim-subscription-key (Azure API Management),
// x-auth-key (Cloudflare), x-registry-auth (container registries).
func carriesCredentials(name string) bool {
	name = strings.ReplaceAll(name, "_", "-")
	for _, part := range [...]string{
		"authorization", "cookie", "api-key", "apikey", "access-key", "secret", "password", "passwd", "credential", "jwt", "client-cert", "session-key",
		"auth-key", "subscription-key",
	} {
		if strings.Contains(name, part) {
			return true
		}
	}
	switch name {
	case "sec-websocket-protocol", "x-amzn-oidc-data", "token", "auth", "dpop":
		return true
	}
	return strings.HasSuffix(name, "-token") || strings.HasSuffix(name, "authtoken") || strings.HasSuffix(name, "-auth")
}

// headerRow is the size of a row of the headers table.
const headerRow = 16

// headerBytes returns the size in bytes of the headers table and of the values.
func (f *RequestFacts) headerBytes(names []string) int {
	size := len(names) * headerRow
	for _, name := range names {
		size += len(findHeader(f.Headers, name).Value)
	}
	return size
}

// headers appends the table of the headers with these names, and their values. at is the
// offset of the table's position in the facts.
func (w *writer) headers(at int, names []string, f *RequestFacts) {
	w.section(at+headersTable, len(names), headerRow)
	from := len(w.dst)
	w.dst = w.dst[:from+len(names)*headerRow]
	clear(w.dst[from:])
	for i, name := range names {
		h := findHeader(f.Headers, name)
		row := w.dst[from+i*headerRow:]
		put32(row, headerValue, uint32(len(w.dst)-w.base))
		put32(row, headerValue+4, uint32(len(h.Value)))
		var flags uint32
		if h.Present {
			flags |= flagPresent
		}
		if h.Cut {
			flags |= flagCut
		}
		put32(row, headerFlags, flags)
		w.dst = append(w.dst, h.Value...)
	}
}

// decodeHeaders appends the rows of the headers table, whose position is at that offset of
// the facts.
func decodeHeaders(b, facts []byte, at int, list []RequestHeader) (_ []RequestHeader, ok bool) {
	from, n, stride := int(get32(facts, at+headersTable)), int(get32(facts, at+headersTable+4)), int(get32(facts, at+headersTable+8))
	if n == 0 {
		return list, true
	}
	if stride < headerRow || from > len(b) || n > (len(b)-from)/stride {
		return list, false
	}
	for i := range n {
		row := b[from+i*stride:]
		flags := get32(row, headerFlags)
		h := RequestHeader{Present: flags&flagPresent != 0, Cut: flags&flagCut != 0}
		if h.Value, ok = textOf(b, row, headerValue); !ok {
			return list, false
		}
		list = append(list, h)
	}
	return list, true
}
