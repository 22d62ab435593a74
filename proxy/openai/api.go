// Package openai implements the API dialects of clients and engines: the routes, the
// routing fields of a request body, the replacement of a few members of a body, the
// framing of event streams, and errors in the form that OpenAI clients expect.
//
// A body is read once, in place. The scan checks every rule of JSON and notes the
// position of each top-level member. It decodes only the few fields that routing needs. A
// leg's body consists of the client's bytes with some members removed or inserted
// ([Object.Append]). Therefore numbers, escapes, key order and white space reach the
// engine unchanged.
//
// The scan is strict on purpose. Two parsers could read some bodies differently
// (duplicate keys, broken UTF-8, lone surrogates). With such a body a client could make
// the engine see another request than the proxy. The proxy rejects such a body with 400.
//
// The decisions behind this package are in docs/design/request.md.
package openai

import "strings"

// API is one route of the public surface, and the dialect of its bodies. The zero value
// is no API.
type API uint8

// The routes that carry a body to an engine. The routes from Embeddings on are whole routes:
// one engine answers the request alone.
const (
	Completions      API = iota + 1 // OpenAI completions
	Chat                            // OpenAI chat completions
	Responses                       // OpenAI responses
	Messages                        // Anthropic messages
	Generate                        // SGLang's native route
	VLLMGenerate                    // vLLM's tokens-in, tokens-out route
	Embeddings                      // OpenAI embeddings
	Tokenize                        // text to token ids
	Detokenize                      // token ids to text
	Rerank                          // order of documents for a query, the form of Jina and Cohere
	RerankV1                        // the same
	RerankV2                        // the same
	Score                           // similarity of pairs of texts
	ScoreV1                         // the same; SGLang's score has other fields
	Classify                        // classes of texts
	ClassifyV1                      // the same, only in SGLang
	Pooling                         // pooled outputs of a model
	CountTokens                     // Anthropic's count of the tokens of messages
	Transcriptions                  // OpenAI speech to text
	Translations                    // OpenAI speech to English text
	Speech                          // OpenAI text to speech
	ImageGenerations                // OpenAI images
	ImageEdits                      // OpenAI changes of images
	// EngineRoute is any other route of an engine, which the configuration lists or a gateway
	// may pass. Request.Target is its path.
	EngineRoute
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
	Rerank:       {"rerank", "/rerank"},
	RerankV1:     {"rerank", "/v1/rerank"},
	RerankV2:     {"rerank", "/v2/rerank"},
	Score:        {"score", "/score"},
	ScoreV1:      {"score", "/v1/score"},
	Classify:     {"classify", "/classify"},
	ClassifyV1:   {"classify", "/v1/classify"},
	Pooling:      {"pooling", "/pooling"},
	CountTokens:  {"count_tokens", "/v1/messages/count_tokens"},

	Transcriptions:   {"transcriptions", "/v1/audio/transcriptions"},
	Translations:     {"translations", "/v1/audio/translations"},
	Speech:           {"speech", "/v1/audio/speech"},
	ImageGenerations: {"image_generations", "/v1/images/generations"},
	ImageEdits:       {"image_edits", "/v1/images/edits"},
	EngineRoute:      {"engine_route", ""},
}

// APIFor returns the API of a request path; ok is false for any other path. The match
// is exact: a trailing slash makes another path.
func APIFor(path string) (api API, ok bool) {
	api, ok = apis[path]
	return api, ok
}

// apis is indexed by the path of a route.
var apis = func() map[string]API {
	m := make(map[string]API)
	for i, r := range routes[1:EngineRoute] {
		m[r.path] = API(i + 1)
	}
	return m
}()

// String returns the short lower-case name for logs and metric labels. Routes that differ
// only in their version have one name.
func (a API) String() string {
	if int(a) >= len(routes) {
		a = 0
	}
	return routes[a].name
}

// Path returns the request path, which is the same on the proxy and on the engines; "" for
// EngineRoute.
func (a API) Path() string {
	if int(a) >= len(routes) {
		a = 0
	}
	return routes[a].path
}

// Generates reports whether answers of this API are text that an engine
// produces token by token. All other routes are whole routes.
func (a API) Generates() bool {
	return a != 0 && a < Embeddings
}

// Anthropic reports whether this API is one of Anthropic's, whose clients expect errors in
// another form.
func (a API) Anthropic() bool { return a == Messages || a == CountTokens }

// TakesForm reports whether a body of this API may be a form instead of a JSON object.
func (a API) TakesForm() bool {
	return a == Transcriptions || a == Translations || a == ImageEdits || a == EngineRoute
}

// CheckContentType checks that a Content-Type is that of JSON, or of a form where the API takes
// forms. vLLM and SGLang have the same rule (validate_json_request in vLLM
// entrypoints/serve/utils/api_utils.py and SGLang entrypoints/http_server.py): a web page can send
// every other type, and a body without a type, to any server without asking the server first. The
// error is an *Error with status 415.
func CheckContentType(api API, contentType string) error {
	if contentType == "application/json" {
		return nil
	}
	if isJSON(contentType) || api.TakesForm() && isForm(contentType) {
		return nil
	}
	text := "Unsupported Media Type: Only 'application/json' is allowed"
	if api.TakesForm() {
		text = "Unsupported Media Type: Only 'application/json' and 'multipart/form-data' are allowed"
	}
	return NewFieldError(CodeUnsupportedMediaType, "Content-Type", text)
}

// isJSON reports whether a Content-Type is that of JSON.
func isJSON(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return media == "application/json" || strings.HasPrefix(media, "application/") && strings.HasSuffix(media, "+json")
}

// PromptKind is the form in which a request carries its prompt.
type PromptKind uint8

// The forms of a prompt.
const (
	PromptNone       PromptKind = iota // none, or one that the proxy does not know
	PromptText                         // one string
	PromptTokens                       // one list of token ids
	PromptTexts                        // a list of strings
	PromptTokenLists                   // a list of lists of token ids
	PromptMessages                     // messages of a conversation, or input items
)

// Span is a part of a body: the bytes from Start up to, but not including, End.
type Span struct{ Start, End int }

// forms is a set of PromptKinds, with one bit for each.
type forms uint8

const (
	text       forms = 1 << PromptText
	tokenIDs   forms = 1 << PromptTokens
	texts      forms = 1 << PromptTexts
	tokenLists forms = 1 << PromptTokenLists
	messages   forms = 1 << PromptMessages
)

// formNames is indexed by PromptKind.
var formNames = [...]string{
	PromptText:       "a string",
	PromptTokens:     "a list of token ids",
	PromptTexts:      "a list of strings",
	PromptTokenLists: "a list of lists of token ids",
	PromptMessages:   "a list of objects",
}

func (f forms) String() string {
	var names []string
	for kind, name := range formNames {
		if f&(1<<kind) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, " or ")
}

// promptForms has the members that may be the prompt of an API, with the forms of each.
var promptForms = [EngineRoute + 1]map[string]forms{
	Completions:  {"prompt": text | texts | tokenIDs | tokenLists},
	Chat:         {"messages": messages},
	Responses:    {"input": text | messages},
	Messages:     {"messages": messages},
	Generate:     {"text": text | texts, "input_ids": tokenIDs | tokenLists},
	VLLMGenerate: {"token_ids": tokenIDs},
	Embeddings:   {"input": text | texts | tokenIDs | tokenLists, "messages": messages}, // messages only in vLLM
	Tokenize:     {"prompt": text, "messages": messages},                                // messages only in vLLM
	Detokenize:   {"tokens": tokenIDs},
	CountTokens:  {"messages": messages},
}
