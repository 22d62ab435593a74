package core

import (
	"net/http"
)

// tokenWrong is prefixed to the ids of a wrong tokenize endpoint. As with
// another chat template, every block differs.
const tokenWrong Token = 1

// SetWrongTokens makes the tokenize endpoints return ids that differ from those
// that the engine computes for the same request, or ends that.
func (e *Engine) SetWrongTokens(wrong bool) { e.wrongTokens.Store(wrong) }

// Answered returns ids as a tokenize endpoint returns them.
func (e *Engine) Answered(ids []Token) []Token {
	if e.wrongTokens.Load() {
		return append([]Token{tokenWrong}, ids...)
	}
	return ids
}

// SmallBody reads a body that is an object. For an invalid body it returns pydantic's
// error.
func SmallBody(w http.ResponseWriter, r *http.Request) (Fields, *FieldError) {
	body, err := ReadBody(w, r)
	if err != nil {
		return nil, &FieldError{"body", "missing", "Field required"}
	}
	return DecodeFields(body)
}

// FieldText returns the string of a field, "" without one.
func FieldText(f Fields, name string) string {
	text, _ := f.Str(name, "")
	return text
}
