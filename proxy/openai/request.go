package openai

import (
	"bytes"
	"math"
	"slices"
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

	// WithoutPD is set if the body has no member that [CutPD] may cut, and no part that AppendForm
	// cuts.
	WithoutPD bool
	// ContentType is that of the body for an engine. A form has no parameter other than its
	// boundary, because a charset would change the names of its parts.
	ContentType string
	Form        bool // the body is a form, which has no members

	// Opaque: the body of an EngineRoute is neither JSON nor a form, or there is none. Nothing of it is
	// known.
	Opaque bool

	// EngineField is a field with which the client changes an engine, or makes the engine run
	// code of the client; "": there is none.
	EngineField string

	fixedLimit bool       // MaxTokens comes from max_completion_tokens
	modelAt    Span       // value of the part of a form that names the model; zero: none
	formEdits  []formEdit // edits that cut the PD fields of a form, in its order
	adapters   bool       // a field selects an adapter
	outside    []Adapter  // those of a form or of a query
}

// Path returns the path of the request on an engine, with the query of an EngineRoute.
func (r *Request) Path() string {
	if r.Target != "" {
		return r.Target
	}
	return routes[r.API].path
}

// PromptRaw returns the prompt's raw value with its quotes or brackets, or nil.
func (r *Request) PromptRaw() []byte {
	if r.Prompt == PromptNone {
		return nil
	}
	return r.raw[r.PromptSpan.Start:r.PromptSpan.End:r.PromptSpan.End]
}

// ReadRequest scans a body, as strictly as [Object.Parse], and fills r. It reads the
// routing fields of the API and rejects those of a wrong type, because an engine may
// read a lenient value ("true", 1.0) differently than the proxy. A routing field that
// is null counts as absent. Other fields are left to the engine. The error is an *Error
// that names the field; r is then not usable. A form that the API takes is read by ParseForm.
//
// It allocates only for a model name that differs from that of r's previous request,
// and for objects with more than 32 members.
func ReadRequest(api API, contentType string, body []byte, r *Request) error {
	if api >= Transcriptions && api.TakesForm() && isForm(contentType) {
		return ParseForm(api, contentType, body, r)
	}
	*r = Request{Object: r.Object, API: api, Model: r.Model, ContentType: "application/json", WithoutPD: true, MaxTokens: -1, N: 1, BestOf: 1}
	if err := r.Parse(body); err != nil {
		return err
	}
	for i := range r.members {
		if err := r.read(i); err != nil {
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
	if r.Prompt == PromptNone {
		return r.checkPrompt()
	}
	return nil
}

// ParseRequest is ReadRequest for a JSON object.
func ParseRequest(api API, body []byte, r *Request) error {
	return ReadRequest(api, "", body, r)
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

// read reads member i.
func (r *Request) read(i int) (err error) {
	m := &r.members[i]
	key, v := r.at(i)
	if m.kind == kindNull {
		return r.notePD(key)
	}
	switch key {
	case "model":
		err = r.readModel(v)
	case "stream":
		r.Stream, err = readBool("stream", v)
	case "stream_options":
		err = r.readStreamOptions(m, v)
	case "prompt", "messages", "input", "text", "input_ids", "token_ids", "tokens":
		if allowed := promptForms[r.API][key]; allowed != 0 {
			err = r.readPrompt(key, m, allowed)
		}
	case "sampling_params":
		r.WithoutPD = false
		err = r.readSamplingParams(m, v)
	case "vllm_xargs", "extra_args":
		r.WithoutPD = false
		err = checkPDHolder(key, v)
	case "n", "best_of", "use_beam_search":
		if r.API == Completions || r.API == Chat {
			err = r.readSequences(key, v)
		}
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		err = r.readLimit(key, v)
	default:
		r.noteMember(key, nil)
		err = r.notePD(key)
	}
	return err
}

// notePD notes a member that CutPD may cut. It rejects a member whose name differs only in case
// from such a member: engines interpret such a name differently.
func (r *Request) notePD(key string) error {
	if slices.Contains(pdNames, key) {
		r.WithoutPD = false
		return nil
	}
	for i := range len(key) {
		// Case folding changes upper-case letters, and letters outside ASCII: the Kelvin sign folds
		// to k, the long s to s.
		if c := key[i]; c-'A' < 26 || c >= 0x80 {
			if found, _ := named(pdNames, key); found {
				return NewFieldError(CodeInvalidName, clip(key), "'"+clip(key)+"' must be written in lower case.")
			}
			break
		}
	}
	return nil
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

// readPrompt reads a member as the prompt. Its form follows from the shape that the scan found;
// PromptNone is a shape that no API accepts.
func (r *Request) readPrompt(field string, m *member, allowed forms) error {
	kind, shape := PromptNone, &m.shape
	switch {
	case m.kind == kindString:
		kind = PromptText
	case m.kind != kindArray:
	case shape.count == 0:
		return NewFieldError(CodeEmptyArray, field, "'"+field+"' must not be empty.")
	case shape.kinds == kindInt:
		kind = PromptTokens
	case shape.kinds == kindString:
		kind = PromptTexts
	case shape.kinds == kindObject:
		kind = PromptMessages
	case shape.kinds == kindArray && shape.innerKinds&^kindInt == 0:
		kind = PromptTokenLists
	}
	if allowed&(1<<kind) == 0 {
		return mistyped(field, allowed.String())
	}
	if field == "text" && r.Prompt != PromptNone {
		return nil // token ids take precedence over the text: they need no tokenizer
	}
	r.Prompt, r.PromptCount = kind, 1
	r.PromptSpan = Span{int(m.value.start), int(m.value.end)}
	r.PromptTokens = int64(m.value.end-m.value.start+3) / 4
	switch kind {
	case PromptTokens:
		r.PromptTokens = int64(shape.count)
	case PromptTexts:
		r.PromptCount = int(shape.count)
	case PromptTokenLists:
		r.PromptCount, r.PromptTokens = int(shape.count), int64(shape.inner)
	case PromptMessages:
		r.MessageCount = int(shape.count)
	}
	return nil
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

func readBool(field string, v []byte) (bool, error) {
	if v[0] != 't' && v[0] != 'f' {
		return false, mistyped(field, "a boolean")
	}
	return v[0] == 't', nil
}

// most bounds counts and token limits: every engine stores them in 32 bits somewhere,
// and no context is that long.
const most = math.MaxInt32

// readCount reads a whole number of at least least, written without fraction and exponent.
func readCount(field string, v []byte, least int64) (int64, error) {
	n, ok := Int64(v)
	if ok && n >= least && n <= most {
		return n, nil
	}
	negative := v[0] == '-'
	switch {
	case len(bytes.Trim(v, "-0123456789")) > 0:
		return 0, mistyped(field, "an integer")
	case negative || ok && n < least:
		return 0, below(field, least)
	}
	return 0, above(field)
}
