package core

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Request is one client request after the engine's checks, in the terms that
// all engines share.
type Request struct {
	// Route is the path of the request.
	Route string
	// Chat: the answer has the form of a chat answer.
	Chat bool
	// ID is the request id that the client knows; protocols set it.
	ID    string
	Model string
	// Created is the answer's Unix time.
	Created int64
	Prompts [][]Token
	// N is the number of samples of each prompt.
	N int
	// Rank is the wanted rank, -1 for the engine's choice.
	Rank int

	Stream bool
	// IncludeUsage and ContinuousUsage come from stream_options.
	IncludeUsage, ContinuousUsage bool

	// Limited: there is a token limit, MaxTokens. Without a limit the answer has the
	// prompt's natural length.
	Limited      bool
	MaxTokens    int
	MinTokens    int
	Stop         []string
	StopTokenIDs []Token
	IgnoreEOS    bool
	Seed         uint64
	// OwnOutput: the choice of a token depends on what this request has generated itself, so
	// another request cannot continue the answer. This is so for a seed, whose generator starts
	// anew with each request; for penalties that count only the output; and for guided decoding.
	OwnOutput bool
	// Temperature and TopP are checked by the protocols and have no effect.
	Temperature, TopP float64
	Echo              bool
	CacheSalt         string

	// Fields are the body's top-level fields, Header the request's.
	Fields Fields
	Header http.Header
	// Ext is the protocol's own state of the request.
	Ext any

	Response *ResponseState // of a /v1/responses request
	Call     *toolCall      // the answer is this call of a tool; nil: a text

	Fault string // the fault of the request; empty for none
}

// APIError is an answer other than 200, before the dialect formats it.
type APIError struct {
	Status  int
	Type    string
	Message string
	// Param names the field at fault; empty for none.
	Param string
	// Body replaces the dialect's form when set.
	Body any
	// loading: the KV of the request could not be loaded.
	Loading bool
}

func (e *APIError) Error() string { return e.Message }

// BadRequest is a 400 of the OpenAI type that every engine uses for values out
// of range.
func BadRequest(param, format string, args ...any) *APIError {
	return &APIError{Status: http.StatusBadRequest, Type: "BadRequestError", Message: fmt.Sprintf(format, args...), Param: param}
}

// ErrTooLarge rejects a sequence that never fits into the rank's cache.
var ErrTooLarge = &APIError{Status: http.StatusBadRequest, Type: "BadRequestError",
	Message: "This model's maximum context length is smaller than the requested number of tokens."}

// Fields are the top-level fields of a JSON object. The last value of a
// repeated key counts, as in Python.
type Fields map[string]json.RawMessage

// FieldError is an ill-typed field, as pydantic reports it.
type FieldError struct {
	Field, Kind, Message string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Message }

// DecodeFields splits a body. For a body that is not a JSON object, the error
// is pydantic's; for invalid JSON its field is the position.
func DecodeFields(body []byte) (Fields, *FieldError) {
	var f Fields
	err := json.Unmarshal(body, &f)
	var broken *json.SyntaxError
	switch {
	case errors.As(err, &broken):
		at := broken.Offset
		if at < int64(len(body)) {
			at-- // the offset is after the invalid byte
		}
		return nil, &FieldError{strconv.FormatInt(at, 10), "json_invalid", "JSON decode error"}
	case err != nil || f == nil:
		return nil, &FieldError{"body", "model_attributes_type", "Input should be a valid dictionary or object to extract fields from"}
	}
	return f, nil
}

// Has reports whether a field is present and not null.
func (f Fields) Has(name string) bool {
	raw, ok := f[name]
	return ok && len(raw) > 0 && !bytes.Equal(raw, []byte("null"))
}

// Integer reads a field as pydantic's lax int does: whole floats, digit strings
// and booleans are accepted. It returns def for an absent field and for null.
func (f Fields) Integer(name string, def int64) (int64, *FieldError) {
	if !f.Has(name) {
		return def, nil
	}
	return parseInteger(name, f[name])
}

func parseInteger(name string, raw json.RawMessage) (int64, *FieldError) {
	text := string(raw)
	switch {
	case text == "true":
		return 1, nil
	case text == "false":
		return 0, nil
	case strings.HasPrefix(text, `"`):
		var s string
		if json.Unmarshal(raw, &s) == nil {
			if v, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64); err == nil {
				return v, nil
			}
		}
		return 0, &FieldError{name, "int_parsing", "Input should be a valid integer, unable to parse string as an integer"}
	}
	if v, err := strconv.ParseInt(text, 10, 64); err == nil {
		return v, nil
	}
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		if v == math.Trunc(v) && math.Abs(v) < 1<<63 {
			return int64(v), nil
		}
		return 0, &FieldError{name, "int_from_float", "Input should be a valid integer, got a number with a fractional part"}
	}
	return 0, &FieldError{name, "int_type", "Input should be a valid integer"}
}

// Number reads a field as a lax float.
func (f Fields) Number(name string, def float64) (float64, *FieldError) {
	if !f.Has(name) {
		return def, nil
	}
	text := strings.Trim(string(f[name]), `"`)
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		return v, nil
	}
	if f[name][0] == '"' {
		return 0, &FieldError{name, "float_parsing", "Input should be a valid number, unable to parse string as a number"}
	}
	return 0, &FieldError{name, "float_type", "Input should be a valid number"}
}

// Boolean reads a field as pydantic's lax bool does.
func (f Fields) Boolean(name string, def bool) (bool, *FieldError) {
	if !f.Has(name) {
		return def, nil
	}
	switch strings.ToLower(strings.Trim(string(f[name]), `"`)) {
	case "true", "1", "yes", "on", "t", "y":
		return true, nil
	case "false", "0", "no", "off", "f", "n":
		return false, nil
	}
	if strings.ContainsAny(string(f[name][:1]), "[{") {
		return false, &FieldError{name, "bool_type", "Input should be a valid boolean"}
	}
	return false, &FieldError{name, "bool_parsing", "Input should be a valid boolean, unable to interpret input"}
}

// Str reads a string field.
func (f Fields) Str(name, def string) (string, *FieldError) {
	if !f.Has(name) {
		return def, nil
	}
	var s string
	if json.Unmarshal(f[name], &s) != nil {
		return "", &FieldError{name, "string_type", "Input should be a valid string"}
	}
	return s, nil
}

// Object reads a field that is an object; nil when absent or null.
func (f Fields) Object(name string) (Fields, *FieldError) {
	if !f.Has(name) {
		return nil, nil
	}
	var o Fields
	if json.Unmarshal(f[name], &o) != nil {
		return nil, &FieldError{name, "dict_type", "Input should be a valid dictionary"}
	}
	return o, nil
}

// Unknown returns the first field of f, in sorted order, that is not in
// allowed; empty when there is none.
func (f Fields) Unknown(allowed []string) string {
	var extra []string
	for name := range f {
		if !slices.Contains(allowed, name) {
			extra = append(extra, name)
		}
	}
	if len(extra) == 0 {
		return ""
	}
	return slices.Min(extra)
}

// RandomID is 16 hex digits.
func RandomID() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// MaxSamples is the default of VLLM_MAX_N_SEQUENCES.
const MaxSamples = 16384

// Room returns the number of tokens whose KV a sequence may hold. The KV of the
// last output token is never computed.
func Room(s *Sequence) int { return len(s.Prompt) + s.Limit - 1 }

// OrNull returns s, or null when it is empty.
func OrNull(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// ModelName is the served model's name, whether or not the request named it.
func ModelName(req *Request, seqs []*Sequence) string {
	if req.Model != "" {
		return req.Model
	}
	return seqs[0].Rank.Engine.Cfg.Model
}

// Echoed returns the prompt's text if the request has echo.
func Echoed(s *Sequence) string {
	if s.Req.Chat || !s.Req.Echo {
		return ""
	}
	return ValidText(Detokenize(s.Prompt))
}

// tokenUsage sums a request's sequences: each prompt once, outputs over all
// samples.
type tokenUsage struct {
	prompt, output int
	// Cached are the tokens that were not computed for this request, created
	// those that it added to the prefix cache.
	Cached, Created int
}

func SumUsage(seqs []*Sequence) (u tokenUsage) {
	for _, s := range seqs {
		u.output += len(s.Output)
		if s.Sample == 0 {
			u.prompt += len(s.Prompt)
			u.Cached += s.Cached
			if s.external == 0 {
				size := s.Rank.Engine.Cfg.BlockSize
				u.Created += len(s.Prompt)/size*size - s.CachedLocal
			}
		}
	}
	return u
}

func (u tokenUsage) Object(details Object) Object {
	return Obj("prompt_tokens", u.prompt, "total_tokens", u.prompt+u.output, "completion_tokens", u.output, "prompt_tokens_details", details)
}

// CreatedFor returns created_cache_tokens, which only chat answers have.
func (u tokenUsage) CreatedFor(req *Request) any {
	if req.Chat {
		return u.Created
	}
	return nil
}

// BaseID is the request id in the answer.
func BaseID(req *Request) string {
	switch {
	case req.Route == RouteResponses:
		return "resp_" + req.ID
	case req.Route == RouteTokens:
		return "generate-tokens-" + req.ID
	case req.Chat:
		return "chatcmpl-" + req.ID
	}
	return "cmpl-" + req.ID
}
