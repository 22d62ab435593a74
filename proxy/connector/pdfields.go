package connector

import (
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// PD fields describe a transfer to engines. A client that could set them could name hosts that
// engines then connect to, read another request's KV blocks, or abort another request. So
// connectors remove them from every leg, for every engine, unless the client is trusted. The lists
// here and in [openai.PDField] contain the fields of all engines, because the client does not know
// which engine will get the request.

// PDHeader reports whether a request line of that name belongs to the protocol between
// proxy and engines. Such a line is not forwarded from an untrusted client. Case does not
// matter, and an underscore counts as a hyphen, because many servers treat the two alike.
// A header line with the name of a PD field of bodies, with or without "X-", also counts.
//
// Sources: vLLM entrypoints/serve/engine/serving.py (X-Request-Id) and
// entrypoints/generate/base/serving.py (X-data-parallel-rank); SGLang
// entrypoints/request_headers.py (x-override-*) and entrypoints/openai/serving_base.py
// (X-Data-Parallel-Rank); TensorRT-LLM serve/openai_client.py and serve/disagg_auth.py
// (X-TRTLLM-*); the lines by which a caller gives an engine's sidecar its peers
// (x-prefiller-*, x-encoder-hosts-ports, x-kv-cache-source-*) and its rank
// (x-data-parallel-*), and states that the caller coordinates the phases (EPP-Profile).
func PDHeader(name string) bool {
	for i := range headerFamilies {
		if prefixFold(name, headerFamilies[i]) {
			return true
		}
	}
	switch len(name) {
	case len("epp-profile"):
		if equalFold(name, "epp-profile") {
			return true
		}
	case len("x-encoder-hosts-ports"):
		if equalFold(name, "x-encoder-hosts-ports") {
			return true
		}
	}
	var room [32]byte
	if prefixFold(name, "x-") {
		name = name[len("x-"):]
	}
	if len(name) > len(room) {
		return false
	}
	field := room[:len(name)]
	for i := range len(name) {
		if field[i] = lowered(name[i]); field[i] == '-' {
			field[i] = '_'
		}
	}
	return openai.PDField(unsafe.String(unsafe.SliceData(field), len(field)))
}

// headerFamilies are prefixes. Every line whose name begins with one belongs to the
// protocol between proxy and engines.
var headerFamilies = [...]string{
	"x-override-", "x-data-parallel-", "x-prefiller-", "x-kv-", "x-bootstrap-", "x-disagg-", "x-trtllm-",
}

// prefixFold reports whether name begins with prefix, which must be in lower case.
func prefixFold(name, prefix string) bool {
	return len(name) >= len(prefix) && equalFold(name[:len(prefix)], prefix)
}

// equalFold compares names of lines. low must be in lower case, have no underscore and
// be as long as name.
func equalFold(name, low string) bool {
	for i := range len(low) {
		if lowered(name[i]) != low[i] {
			return false
		}
	}
	return true
}

// lowered returns a byte of a line's name in lower case, and a hyphen for an
// underscore.
func lowered(c byte) byte {
	switch {
	case c-'A' < 26:
		return c | 0x20
	case c == '_':
		return '-'
	}
	return c
}

// PDMember reports whether a top-level member of a leg's body with that value may carry
// the transfer: a PD field, or a member out of which vLLM reads its transfer
// parameters. The value may be empty.
func PDMember(key string, value []byte) bool {
	return openai.PDField(key) || openai.HoldsPD(key, value)
}
