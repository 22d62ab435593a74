package openai

import "testing"

// TestTrueStatus reads the answers of SGLang 0.5.20 to 0.5.23 (entrypoints/openai/serving_responses.py).
func TestTrueStatus(t *testing.T) {
	failed := func(message string) string {
		return `{"error":{"message":` + message + `,"type":"invalid_request_error","param":null,"code":400}}`
	}
	for _, tt := range []struct {
		api    API
		status int
		answer string
		want   int
	}{
		{Responses, 400, failed(`"500: Decode transfer failed for request rank=0"`), 500},
		{Responses, 400, failed(`"503: The request queue is full."`), 503},
		{Responses, 400, failed(`"400: x"`), 400},
		{Responses, 400, failed(`"max_new_tokens must be at least 0, got -1."`), 400},
		{Responses, 400, failed(`"500 tokens are too many"`), 400},
		{Responses, 400, failed(`"999: x"`), 400},
		{Responses, 400, failed(`"+50: x"`), 400},
		{Responses, 400, failed(`"500:"`), 400},
		{Responses, 400, failed(`{"500": "x"}`), 400},
		{Responses, 400, failed(`null`), 400},
		{Responses, 400, `{"error":`, 400},
		{Responses, 400, ``, 400},
		{Responses, 404, failed(`"500: x"`), 404},
		{Chat, 400, failed(`"500: x"`), 400},
		{Messages, 400, failed(`"500: x"`), 400},
	} {
		if got := TrueStatus(tt.api, tt.status, []byte(tt.answer)); got != tt.want {
			t.Errorf("TrueStatus(%v, %d, %s) = %d, want %d", tt.api, tt.status, tt.answer, got, tt.want)
		}
	}
}
