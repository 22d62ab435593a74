package openai

import (
	"net/url"
	"strings"
)

// QuotedRoom is more than the bytes that AppendRenamed appends beside the body and twice
// the name, for a name without control characters.
const QuotedRoom = 16

// NamesModel reports whether the body names the model. Otherwise the query of an
// EngineRoute may name it.
func (r *Request) NamesModel() bool {
	if r.IsForm() {
		return r.modelAt != Span{}
	}
	_, ok := r.Get("model")
	return ok
}

// AppendRenamed appends the body with another name of the model in the place of the old
// one. All other bytes are kept.
func (r *Request) AppendRenamed(dst []byte, model string) []byte {
	if !r.IsForm() {
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
