package connector

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"unicode/utf16"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TRTLLM holds the operator's settings for the trtllm connector.
type TRTLLM struct {
	// AuthKey is the key that signs the address from which decode fetches the KV; "": no
	// signature.
	AuthKey string
	// PerfMetrics: the proxy requests the timing of each request from the workers.
	PerfMetrics bool
}

// headerAuth carries the signature. Source: serve/disagg_auth.py.
const headerAuth = "X-Trtllm-Disagg-Auth"

// signed adds a signature to a decode leg if there is a key. It signs the address in
// params from which decode fetches the KV. Without such an address there is no signature.
func signed(a *Attempt, leg Leg, params []byte) Leg {
	if a.TRTLLM.AuthKey == "" {
		return leg
	}
	endpoint, _ := openai.Find(params, "ctx_info_endpoint")
	state, _ := openai.Find(params, "encoded_opaque_state")
	if openai.IsNull(endpoint) && openai.IsNull(state) {
		return leg
	}
	leg.Header = append(leg.Header, Field{Name: headerAuth, Value: signature(a.TRTLLM.AuthKey, endpoint, state)})
	return leg
}

// signature is an HMAC of the two members in the form of Python's json.dumps. Source:
// tensorrt_llm/disagg_auth.py.
func signature(key string, endpoint, state []byte) string {
	text := appendPython([]byte(`{"ctx_info_endpoint":`), endpoint)
	text = appendPython(append(text, `,"encoded_opaque_state":`...), state)
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write(append(text, '}'))
	return "sha256=" + hex.EncodeToString(mac.Sum(nil))
}

// appendPython appends a JSON string, or null for any other value, as json.dumps writes
// it: short escapes where they exist, and \u for all else that is not printable ASCII.
func appendPython(dst, raw []byte) []byte {
	s, ok := openai.String(raw)
	if !ok {
		return append(dst, "null"...)
	}
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r == '\b':
			dst = append(dst, `\b`...)
		case r == '\f':
			dst = append(dst, `\f`...)
		case r >= ' ' && r <= '~':
			dst = append(dst, byte(r))
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			dst = appendUnit(appendUnit(dst, uint16(high)), uint16(low))
		default:
			dst = appendUnit(dst, uint16(r))
		}
	}
	return append(dst, '"')
}

// appendUnit appends one UTF-16 code unit as an escape.
func appendUnit(dst []byte, u uint16) []byte {
	return hex.AppendEncode(append(dst, `\u`...), []byte{byte(u >> 8), byte(u)})
}
