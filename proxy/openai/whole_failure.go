package openai

import "net/http"

// WholeFailure reports why a whole answer with a 2xx status is no success, as the label of
// a counter, and the HTTP status of the failure: aborted (a finish reason is abort or
// error), error_answer (the answer is an error object), or empty_answer (the answer has no
// token and no reason for its end). The reason is "" for any other answer, and for an
// answer of an API that does not generate text.
//
// Only members that repeat no object of the client are read.
func WholeFailure(api API, body []byte) (reason string, status int) {
	if !api.Generates() {
		return "", 0
	}
	if raw, ok := errorObject(body); ok {
		return "error_answer", errorStatus(raw)
	}
	empty := false
	switch api {
	case Responses:
		raw, _ := Find(body, "status")
		switch state, _ := String(raw); state {
		case "failed", "cancelled":
			return "aborted", http.StatusInternalServerError
		case "completed":
			empty = emptyResponse(body)
		}
	case Messages:
		content, known := Find(body, "content")
		reason, _ := Find(body, "stop_reason")
		count, _ := Find(body, "usage", "output_tokens")
		empty = known && emptyContent(content) && !endsMessage(reason, count)
	default:
		if status, aborted, _ := abortStatus(body); aborted {
			return "aborted", status
		}
		empty = emptyChunk(body)
	}
	if empty {
		return "empty_answer", http.StatusInternalServerError
	}
	return "", 0
}

// emptyContent reports whether a list of content blocks has only empty texts.
func emptyContent(list []byte) bool {
	c := Cursor{Text: list}
	for c.Open('['); c.Next(']'); {
		block := c.Skip()
		kind, _ := Find(block, "type")
		text, _ := Find(block, "text")
		if string(kind) != `"text"` || !isEmptyValue(text) {
			return false
		}
	}
	return !c.Bad
}
