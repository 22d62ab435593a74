package openai

import (
	"bytes"
	"math"
	"net/url"
	"strings"
	"unicode/utf8"
)

// MaxModel is the maximum length of a model's name in bytes. By default engines use the
// model's path as its name, and no path is longer (PATH_MAX of Linux).
const MaxModel = 4096

// Request holds the facts that routing needs about one request body. Like the Object
// that it embeds, it refers to the body's bytes. It is designed for reuse in a pool.
type Request struct {
	Object
	API      API
	Model    string // decoded
	HasModel bool   // false: absent, null or empty

	// Target is the path and the query of an EngineRoute; else empty. ReadTarget sets it.
	Target string

	Stream       bool
	IncludeUsage bool // stream_options.include_usage

	// MaxTokens is the limit of generated tokens for each sequence; -1 if the client
	// set none. It is 0 only for requests that generate nothing: on SGLang's native
	// route, and for completions with echo.
	MaxTokens int64
	// N is the number of answers for each prompt; 1 by default.
	N int64
	// BestOf is the number of sequences that the engine computes for each prompt, at
	// least N. A beam search counts as at least 2, because the engine forks its
	// sequences with any width.
	BestOf int64
	// BeamSearch is use_beam_search.
	BeamSearch bool

	Prompt     PromptKind
	PromptSpan Span // position of the prompt's raw value in the body
	// PromptCount is the number of prompts. For a list of texts or of token lists it is
	// the length of the list. Without a prompt it is 0, otherwise 1.
	PromptCount int
	// PromptTokens is the length of all prompts together, in tokens: exact for token
	// ids, otherwise a quarter of the bytes. On a whole route whose prompt the proxy does
	// not know, it is a quarter of the bytes of the body.
	PromptTokens int64
	// MessageCount is the number of messages or input items.
	MessageCount int

	// EngineField is a field with which the client changes an engine, or makes the engine run
	// code of the client; "": there is none.
	EngineField string

	fixedLimit  bool       // MaxTokens comes from max_completion_tokens
	contentType string     // of a form; "": the body is a JSON object
	modelAt     Span       // value of the part of a form that names the model; zero: none
	formEdits   []formEdit // edits that cut the PD fields of a form, in its order
	adapters    bool       // a field selects an adapter
	outside     []Adapter  // those of a form or of a query
}

// Path returns the path of the request on an engine, with the query of an EngineRoute.
func (r *Request) Path() string {
	if r.Target != "" {
		return r.Target
	}
	return r.API.Path()
}

// ReadTarget sets Target for a request to an EngineRoute of that path. The query loses its PD
// fields, and names the model if the body does not. The error is an *Error with status 400.
func (r *Request) ReadTarget(path, query string) error {
	r.Target = path
	if query == "" {
		return nil
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return NewFieldError(CodeInvalidType, "query", "The query of the request is malformed.")
	}
	for name := range values {
		base, _, _ := strings.Cut(name, "[")
		if held, _ := named(pdContainers[:], base); held || PDField(base) {
			delete(values, name)
		}
	}
	for name, list := range values {
		if err := r.readParameter(name, list); err != nil {
			return err
		}
	}
	if len(values) > 0 {
		r.Target += "?" + values.Encode()
	}
	return nil
}

// readParameter reads one parameter of the query of an EngineRoute. It refuses each parameter that
// could name another model to the engine than to the proxy.
func (r *Request) readParameter(name string, values []string) error {
	base, _, _ := strings.Cut(name, "[")
	switch {
	case !strings.EqualFold(base, "model"):
		for _, v := range values {
			r.noteMember(name, []byte(v))
		}
		return nil
	case name != "model":
		return NewFieldError(CodeInvalidName, clip(name), "The query of the request must name the model as 'model'.")
	case len(values) > 1:
		return NewFieldError(CodeDuplicateKey, "model", "The query of the request has the parameter 'model' twice.")
	}
	model := values[0]
	switch {
	case model == "" || r.HasModel && r.Model == model:
		return nil
	case r.HasModel:
		return NewFieldError(CodeDuplicateKey, "model", "The query and the body of the request name different models.")
	}
	if err := checkModel([]byte(model)); err != nil {
		return err
	}
	r.Model, r.HasModel = model, true
	return nil
}

// checkModel checks the name of a model that is not in a JSON object. The texts of JSON objects are
// always UTF-8, and only UTF-8 has a place in spans.
func checkModel(name []byte) error {
	switch {
	case len(name) > MaxModel:
		return tooLong("model", MaxModel)
	case !utf8.Valid(name):
		return mistyped("model", "UTF-8")
	}
	return nil
}

// CheckContentType checks that a Content-Type is that of JSON, or of a form where the API takes
// forms. vLLM and SGLang have the same rule (validate_json_request in vLLM
// entrypoints/serve/utils/api_utils.py and SGLang entrypoints/http_server.py): a web page can send
// every other type, and a body without a type, to any server without asking the server first. The
// error is an *Error with status 415.
func CheckContentType(api API, contentType string) error {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	if media == "application/json" || strings.HasPrefix(media, "application/") && strings.HasSuffix(media, "+json") || api.TakesForm() && IsForm(contentType) {
		return nil
	}
	text := "Unsupported Media Type: Only 'application/json' is allowed"
	if api.TakesForm() {
		text = "Unsupported Media Type: Only 'application/json' and 'multipart/form-data' are allowed"
	}
	return NewFieldError(CodeUnsupportedMediaType, "Content-Type", text)
}

// ReadRequest is ParseForm for a form that the API takes, otherwise ParseRequest.
func ReadRequest(api API, contentType string, body []byte, r *Request) error {
	if api.TakesForm() && IsForm(contentType) {
		return ParseForm(api, contentType, body, r)
	}
	return ParseRequest(api, body, r)
}

// ParseRequest scans a body, as strictly as [Object.Parse], and fills r. It reads the
// routing fields of the API and rejects those of a wrong type, because an engine may
// read a lenient value ("true", 1.0) differently than the proxy. A routing field that
// is null counts as absent. Other fields are left to the engine. The error is an *Error
// that names the field; r is then not usable.
//
// It allocates only for a model name that differs from that of r's previous request,
// and for objects with more than 32 members.
func ParseRequest(api API, body []byte, r *Request) error {
	*r = Request{Object: r.Object, API: api, Model: r.Model, MaxTokens: -1, N: 1, BestOf: 1}
	if err := r.Parse(body); err != nil {
		return err
	}
	for i := range r.members {
		m := &r.members[i]
		if err := checkPDName(r.keyString(m)); err != nil { // for any value, including null
			return err
		}
		if m.kind == kindNull {
			continue
		}
		if err := r.read(m); err != nil {
			return err
		}
	}
	if !r.HasModel {
		r.Model = ""
	}
	if r.BeamSearch {
		r.BestOf = max(r.BestOf, 2)
	}
	r.BestOf = max(r.BestOf, r.N)
	return r.checkPrompt()
}

// Reset drops the body, so that a pooled Request does not keep it in memory. The
// model's name is kept as a string for the next ParseRequest.
func (r *Request) Reset() {
	r.Object.Reset()
	*r = Request{Object: r.Object, Model: r.Model}
}

// Size is [Object.Size] with the memory of the copies that a leg of VLLMGenerate makes of its
// sampling parameters: one without transfer parameters, one of extra_args without them and one
// with new ones, and the edited whole.
func (r *Request) Size() int {
	n := r.Object.Size()
	if r.API == VLLMGenerate {
		params, _ := r.Get("sampling_params")
		n += 4 * len(params)
	}
	return n
}

// checkPrompt rejects a body without the prompt that its API requires. On the other
// routes engines accept alternatives.
func (r *Request) checkPrompt() error {
	if r.Prompt != PromptNone {
		return nil
	}
	switch r.API {
	case Completions:
		if v, _ := r.Get("prompt_embeds"); IsNull(v) { // vLLM's alternative form
			return missing("prompt")
		}
	case Chat, Messages, CountTokens:
		return missing("messages")
	}
	if !r.API.Generates() {
		r.PromptTokens = int64(len(r.raw)+3) / 4
	}
	return nil
}

// read reads one member that is not null.
func (r *Request) read(m *member) (err error) {
	key, v := r.keyString(m), r.value(m)
	switch key {
	case "model":
		err = r.readModel(v)
	case "stream":
		r.Stream, err = readBool("stream", v)
	case "stream_options":
		err = r.readStreamOptions(m, v)
	case "prompt", "messages", "input", "text", "input_ids", "token_ids", "tokens":
		if allowed := promptForms(r.API, key); allowed != 0 {
			err = r.readPrompt(key, m, allowed)
		}
	case "sampling_params":
		err = r.readSamplingParams(m, v)
	case "vllm_xargs", "extra_args":
		err = checkPDHolder(key, v)
	case "n", "best_of", "use_beam_search":
		if r.API == Completions || r.API == Chat {
			err = r.readSequences(key, v)
		}
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		err = r.readLimit(key, v)
	default:
		r.noteMember(key, nil)
	}
	return err
}

func (r *Request) readModel(v []byte) error {
	if v[0] != '"' {
		return mistyped("model", "a string")
	}
	name := v[1 : len(v)-1]
	if len(name) > 6*MaxModel { // an escape has at most six bytes for each byte of text
		return tooLong("model", MaxModel)
	}
	if bytes.IndexByte(name, '\\') >= 0 {
		name = appendUnescaped(nil, name)
	}
	if len(name) > MaxModel {
		return tooLong("model", MaxModel)
	}
	if string(name) != r.Model {
		r.Model = string(name)
	}
	r.HasModel = len(name) > 0
	return nil
}

func (r *Request) readStreamOptions(m *member, v []byte) (err error) {
	if m.kind != kindObject {
		return mistyped("stream_options", "an object")
	}
	value, _ := Find(v, "include_usage")
	if !IsNull(value) {
		r.IncludeUsage, err = readBool("stream_options.include_usage", value)
	}
	return err
}

func (r *Request) readSequences(key string, v []byte) (err error) {
	switch key {
	case "n":
		r.N, err = readCount(key, v, 1)
	case "best_of":
		r.BestOf, err = readCount(key, v, 1)
	case "use_beam_search":
		r.BeamSearch, err = readBool(key, v)
	}
	return err
}

// readLimit reads the top-level limit of tokens. An API has one such field; chat has
// two, of which max_completion_tokens takes precedence in every engine.
func (r *Request) readLimit(key string, v []byte) error {
	least, wins := int64(1), false
	switch {
	case key == "max_tokens" && r.API == Completions:
		if echo, _ := r.Get("echo"); string(echo) == "true" {
			least = 0
		}
	case key == "max_tokens" && (r.API == Chat || r.API == Messages):
	case key == "max_completion_tokens" && r.API == Chat:
		wins = true
	case key == "max_output_tokens" && r.API == Responses:
	default:
		return nil
	}
	n, err := readCount(key, v, least)
	if err == nil && (wins || !r.fixedLimit) {
		r.MaxTokens, r.fixedLimit = n, wins
	}
	return err
}

// readSamplingParams reads the object in which the two native routes have these fields.
// SGLang also accepts a list, with one object for each prompt; the largest values count
// then.
func (r *Request) readSamplingParams(m *member, v []byte) (err error) {
	c := Cursor{Text: v}
	switch {
	case r.API != Generate && r.API != VLLMGenerate:
	case m.kind == kindObject:
		err = r.readSampling(&c)
	case r.API == Generate && m.kind == kindArray && m.shape.kinds&^kindObject == 0:
		for c.Open('['); err == nil && c.Next(']'); {
			err = r.readSampling(&c)
		}
	default:
		err = mistyped("sampling_params", "an object")
	}
	return err
}

func (r *Request) readSampling(c *Cursor) (err error) {
	limit, least := "max_tokens", int64(1)
	if r.API == Generate {
		limit, least = "max_new_tokens", 0
	}
	for c.Open('{'); err == nil && c.Next('}'); {
		value, n := c.Skip(), int64(0)
		switch {
		case IsNull(value):
		case keyEqual(c.Key, limit):
			n, err = readCount("sampling_params."+limit, value, least)
			r.MaxTokens = max(r.MaxTokens, n)
		case keyEqual(c.Key, "n"):
			n, err = readCount("sampling_params.n", value, 1)
			r.N = max(r.N, n)
		case keyEqual(c.Key, "extra_args"):
			err = checkPDHolder("sampling_params.extra_args", value)
		case keyEqual(c.Key, "vllm_xargs"):
			err = checkPDHolder("sampling_params.vllm_xargs", value)
		case keyEqual(c.Key, "logits_processors"):
			r.EngineField = "sampling_params.logits_processors"
		}
	}
	return err
}

func readBool(field string, v []byte) (bool, error) {
	truth, ok := Bool(v)
	if !ok {
		return false, mistyped(field, "a boolean")
	}
	return truth, nil
}

// most bounds counts and token limits: every engine stores them in 32 bits somewhere,
// and no context is that long.
const most = math.MaxInt32

func readCount(field string, v []byte, least int64) (int64, error) {
	if !wholeNumber(v) {
		return 0, mistyped(field, "an integer")
	}
	n, ok := Int64(v)
	if v[0] == '-' && !ok || ok && n < least {
		return 0, below(field, least)
	}
	if !ok || n > most {
		return 0, above(field)
	}
	return n, nil
}

// wholeNumber reports whether a scanned value is a number without fraction and
// exponent, of any size.
func wholeNumber(v []byte) bool {
	s := scanner{b: v}
	_, k := s.value(0, maxDepth)
	return k == kindInt
}
