package enginesim

import (
	"net/http"
)

// tokenWrong is prefixed to the ids of a wrong tokenize endpoint. As with
// another chat template, every block differs.
const tokenWrong token = 1

// SetWrongTokens makes the tokenize endpoints return ids that differ from those
// that the engine computes for the same request, or ends that.
func (e *Engine) SetWrongTokens(wrong bool) { e.wrongTokens.Store(wrong) }

// answered returns ids as a tokenize endpoint returns them.
func (e *Engine) answered(ids []token) []token {
	if e.wrongTokens.Load() {
		return append([]token{tokenWrong}, ids...)
	}
	return ids
}

// smallBody reads a body that is an object. For an invalid body it returns pydantic's
// error.
func smallBody(w http.ResponseWriter, r *http.Request) (fields, *fieldError) {
	body, err := readBody(w, r)
	if err != nil {
		return nil, &fieldError{"body", "missing", "Field required"}
	}
	return decodeFields(body)
}

// fieldText returns the string of a field, "" without one.
func fieldText(f fields, name string) string {
	text, _ := f.str(name, "")
	return text
}
