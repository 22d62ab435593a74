package connector

import (
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// PD fields are what a proxy tells engines about a transfer. A client that
// could set them would name hosts that engines then connect to, read another
// request's KV blocks, or abort another request; so they are cut out of every
// leg, whatever the engine, unless the client is trusted. The lists, this one and
// that of [openai.PDField], hold the fields of all engines: which engine a request
// meets is decided after the client wrote it.

// PDHeader reports whether a request line of that name belongs to the protocol
// between proxy and engines, and is therefore not forwarded from a client that
// is not trusted. Names are compared without regard to case, and an underscore
// counts as a hyphen: many servers read the two alike. A line that has the name of a
// PD field of bodies, with or without "X-", is one.
//
// Sources: vLLM entrypoints/serve/engine/serving.py (X-Request-Id) and
// entrypoints/generate/base/serving.py (X-data-parallel-rank); SGLang
// entrypoints/request_headers.py (x-override-*) and
// entrypoints/openai/serving_base.py (X-Data-Parallel-Rank); TensorRT-LLM
// serve/openai_client.py and serve/disagg_auth.py (X-TRTLLM-*); the lines by
// which side-cars beside an engine are told its peers (x-prefiller-*,
// x-encoder-hosts-ports, x-kv-cache-source-*), its rank (x-data-parallel-*) and
// that their caller coordinates the phases (EPP-Profile).
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

// headerFamilies are the beginnings of names of which every line is of the protocol
// between proxy and engines.
var headerFamilies = [...]string{
	"x-override-", "x-data-parallel-", "x-prefiller-", "x-kv-", "x-bootstrap-", "x-disagg-", "x-trtllm-",
}

// prefixFold reports whether name begins with prefix, which is lower case.
func prefixFold(name, prefix string) bool {
	return len(name) >= len(prefix) && equalFold(name[:len(prefix)], prefix)
}

// equalFold compares names of lines; low is lower case, has no underscore and is as
// long as name.
func equalFold(name, low string) bool {
	for i := range len(low) {
		if lowered(name[i]) != low[i] {
			return false
		}
	}
	return true
}

// lowered is a byte of a line's name in lower case, a hyphen for an underscore.
func lowered(c byte) byte {
	switch {
	case c-'A' < 26:
		return c | 0x20
	case c == '_':
		return '-'
	}
	return c
}

// PDMember reports whether a top-level member of a leg's body with that value
// carries, or could carry, the transfer: a PD field, or one that vLLM takes its
// transfer parameters out of. The value may be empty.
func PDMember(key string, value []byte) bool {
	return openai.PDField(key) || openai.HoldsPD(key, value)
}

// cutPD adds to a leg's edits those that cut the client's PD fields out of a's
// body ([openai.CutPD]); none for a trusted client.
func cutPD(edits []openai.Edit, a *Attempt) []openai.Edit {
	if a.Trust {
		return edits
	}
	return openai.CutPD(edits, a.Request)
}
