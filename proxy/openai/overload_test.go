package openai

import (
	"strings"
	"testing"
)

// TestOverloaded: the answers of engines without room are told from those of failing engines.
func TestOverloaded(t *testing.T) {
	for _, tt := range []struct {
		status     int
		retryAfter string
		answer     string
		want       bool
	}{
		{429, "", "", true},
		{429, "1", `{"error":{"message":"Rate limit reached for given tier."}}`, true},
		{503, "", `{"object":"error","message":"The request queue is full.","type":"ServiceUnavailable","param":null,"code":503}`, true},
		{503, "", `{"error":{"message":"Request queue timeout reached.","code":503}}`, true},
		{503, "", `{"detail":"The request is aborted by a higher priority request."}`, true},
		{503, "", `{"message":"Request waiting timeout reached."}`, true},
		{503, "", `{"error":{"message":"Request queue full.","type":"ServiceUnavailableError","code":503}}`, true},
		{503, "", `{"error":{"message":"max_num_queued_reqs exceeded"}}`, true},
		{503, "", `{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.","type":"Service Unavailable","param":null,"code":503}}`, true},
		{503, "", `{"error":{"message":"The engine has reached its prefill token backlog limit. Please try again later or on a different instance.","type":"Service Unavailable","param":null,"code":503}}`, true},
		{503, "", `QUEUE FULL`, true},
		{503, "", `The server is overloaded`, true},
		{503, "3", ``, true},
		{503, "", ``, false},
		{503, "", `{"error":"Service is in faulted state, cannot process requests."}`, false},
		{503, "", `upstream connect error`, false},
		{503, "", `failed to enqueue the request`, false},
		{503, "", `failed to enqueue: queue is full`, true},
		{503, "", strings.Repeat("x ", 4<<10) + "queue is full", false},
		{500, "1", `queue is full`, false},
		{502, "1", `queue is full`, false},
		{504, "", `queue`, false},
		{400, "", `queue`, false},
	} {
		if got := Overloaded(tt.status, tt.retryAfter, []byte(tt.answer)); got != tt.want {
			t.Errorf("%d %q %.80q: got %v", tt.status, tt.retryAfter, tt.answer, got)
		}
	}
}
