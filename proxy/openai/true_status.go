package openai

import (
	"net/http"
	"strconv"
)

// TrueStatus returns the status of an engine's answer with an error status. SGLang answers 400 to
// each failure of a whole response, and begins the message with the status: "500: Decode transfer
// failed …" (entrypoints/openai/serving_responses.py, create_responses, which catches the
// HTTPException).
func TrueStatus(api API, status int, answer []byte) int {
	if api != Responses || status != http.StatusBadRequest {
		return status
	}
	raw, _ := Find(answer, "error", "message")
	if len(raw) < len(`"500: "`) || string(raw[4:6]) != ": " {
		return status
	}
	if n, err := strconv.Atoi(string(raw[1:4])); err == nil && n >= 400 && n <= 599 {
		return n
	}
	return status
}
