// Package openai owns the dialects that clients and engines speak: which path
// is which API, what one request body says about its routing, the body's bytes
// with a few members exchanged, the framing of event streams, and errors in
// the shape that OpenAI clients expect.
//
// A body is read once, in place: the scan checks every rule of JSON and notes
// where each top-level member lies, and nothing is decoded but the few fields
// that routing needs. What a leg is sent is the client's bytes with some
// members cut out or put in ([Object.Append]), so that numbers, escapes, key
// order and white space reach the engine as they came.
//
// The scan is strict on purpose. A body that two parsers could read
// differently (duplicate keys, broken UTF-8, lone surrogates) would let a
// client show one request to the proxy and another to the engine; it is
// refused with 400.
package openai

// API is one route of the public surface, and with it the dialect of the
// bodies that travel on it. The zero value is no API.
type API uint8

// The routes that carry a body to an engine.
const (
	Completions  API = iota + 1 // OpenAI completions
	Chat                        // OpenAI chat completions
	Responses                   // OpenAI responses
	Messages                    // Anthropic messages
	Generate                    // SGLang's native route
	VLLMGenerate                // vLLM's tokens-in, tokens-out route
	Embeddings                  // OpenAI embeddings
	Tokenize                    // text to token ids
	Detokenize                  // token ids to text
)

// routes is indexed by API.
var routes = [...]struct{ name, path string }{
	{"unknown", ""},
	Completions:  {"completions", "/v1/completions"},
	Chat:         {"chat", "/v1/chat/completions"},
	Responses:    {"responses", "/v1/responses"},
	Messages:     {"messages", "/v1/messages"},
	Generate:     {"generate", "/generate"},
	VLLMGenerate: {"vllm_generate", "/inference/v1/generate"},
	Embeddings:   {"embeddings", "/v1/embeddings"},
	Tokenize:     {"tokenize", "/tokenize"},
	Detokenize:   {"detokenize", "/detokenize"},
}

// APIFor names the API served on a request path; ok is false for any other
// path. The match is exact: a trailing slash is another path.
func APIFor(path string) (api API, ok bool) {
	for i, r := range routes[1:] {
		if r.path == path {
			return API(i + 1), true
		}
	}
	return 0, false
}

// String gives the short lower-case name used in logs and in metric labels.
func (a API) String() string {
	if int(a) >= len(routes) {
		a = 0
	}
	return routes[a].name
}

// Path gives the request path, the same on the proxy and on the engines.
func (a API) Path() string {
	if int(a) >= len(routes) {
		a = 0
	}
	return routes[a].path
}

// Generates reports whether answers of this API are text that an engine
// produces token by token.
func (a API) Generates() bool {
	return a != 0 && a < Embeddings
}
