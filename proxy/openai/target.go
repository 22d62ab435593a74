package openai

import (
	"bytes"
	"net/url"
	"strings"
	"unicode/utf8"
)

// ReadOpaque fills r for a request to an EngineRoute with a body that Opaque reports.
func ReadOpaque(contentType string, r *Request) {
	r.Object.Reset()
	*r = Request{Object: r.Object, API: EngineRoute, ContentType: contentType, Opaque: true, WithoutPD: true, MaxTokens: -1, N: 1, BestOf: 1}
}

// Opaque reports whether a body of that type is empty, or neither JSON nor a form. A text that begins
// like JSON is JSON whatever its type is, because some routes of engines do not check the type.
func Opaque(contentType string, body []byte) bool {
	body = bytes.TrimLeft(body, " \t\r\n")
	return len(body) == 0 || contentType != "" && body[0] != '{' && body[0] != '[' && !isJSON(contentType) && !isForm(contentType)
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
	all := len(values)
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
	switch {
	case len(values) == all:
		r.Target += "?" + query // as the client has written it
	case len(values) > 0:
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

// QuotedRoom is more than the bytes that AppendRenamed appends beside the body and twice
// the name, for a name without control characters.
const QuotedRoom = 16

// NamesModel reports whether the body names the model. Otherwise the query of an
// EngineRoute may name it.
func (r *Request) NamesModel() bool {
	if r.Form {
		return r.modelAt != Span{}
	}
	_, ok := r.Get("model")
	return ok
}

// AppendRenamed appends the body with another name of the model in the place of the old
// one. All other bytes are kept.
func (r *Request) AppendRenamed(dst []byte, model string) []byte {
	if !r.Form {
		return r.Append(dst, Edit{Key: "model", Value: AppendQuoted(nil, model)})
	}
	dst = append(dst, r.raw[:r.modelAt.Start]...)
	dst = append(dst, model...)
	return append(dst, r.raw[r.modelAt.End:]...)
}

// RenamedTarget returns Target with another name of the model, if its query names one.
func (r *Request) RenamedTarget(model string) string {
	path, query, _ := strings.Cut(r.Target, "?")
	values, err := url.ParseQuery(query)
	if err != nil || !values.Has("model") {
		return r.Target
	}
	values.Set("model", model)
	return path + "?" + values.Encode()
}
