package openai

import "testing"

func TestWholeFailure(t *testing.T) {
	for _, tt := range []struct {
		name   string
		api    API
		body   string
		reason string
		status int
	}{
		{"text", Chat, `{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}`, "", 0},
		{"end token", Chat, `{"choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}]}`, "", 0},
		{"max_tokens 0", Completions, `{"choices":[{"index":0,"text":"","finish_reason":"length"}]}`, "", 0},
		{"no choices", Completions, `{"id":"c","choices":[],"usage":{"completion_tokens":0}}`, "empty_answer", 500},
		{"no choices of chat", Chat, `{"choices": [ ]}`, "empty_answer", 500},
		{"no reason", Chat, `{"choices":[{"index":0,"message":{"role":"assistant","content":"","tool_calls":[]},"finish_reason":null}]}`, "empty_answer", 500},
		{"no reason, text", Chat, `{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":null}]}`, "", 0},
		{"error", Chat, `{"choices":[{"index":0,"message":{"content":""},"finish_reason":"error"}]}`, "aborted", 500},
		{"one of two failed", Completions, `{"choices":[{"text":"x","finish_reason":"stop"},{"text":"","finish_reason" : "error"}]}`, "aborted", 500},
		{"SGLang's abort", Generate, `{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503}}}`, "aborted", 503},
		{"error object", Completions, `{"error":{"message":"x","type":"BadRequestError","code":400}}`, "error_answer", 400},
		{"flat error object", Chat, `{"object":"error","message":"x","type":"InternalServerError","code":500}`, "error_answer", 500},
		{"token ids", VLLMGenerate, `{"request_id":"g","choices":[{"index":0,"token_ids":[],"finish_reason":null}]}`, "empty_answer", 500},
		{"response", Responses, `{"id":"r","metadata":{"finish_reason":"error"},"status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"x"}]}],"usage":{"output_tokens":1}}`, "", 0},
		{"response of one end token", Responses, `{"status":"completed","output":[],"usage":{"output_tokens":1}}`, "", 0},
		{"empty response", Responses, `{"status":"completed","output":[],"usage":{"output_tokens":0}}`, "empty_answer", 500},
		{"failed response", Responses, `{"status":"failed","output":[],"error":{"code":"x"}}`, "aborted", 500},
		{"cancelled response", Responses, `{"status":"cancelled","output":[]}`, "aborted", 500},
		{"queued response", Responses, `{"status":"queued","output":[]}`, "", 0},
		{"incomplete response", Responses, `{"status":"incomplete","output":[],"usage":{"output_tokens":0}}`, "", 0},
		{"message", Messages, `{"type":"message","content":[{"type":"text","text":"x"}],"stop_reason":"end_turn","usage":{"output_tokens":0}}`, "", 0},
		{"message of one end token", Messages, `{"type":"message","content":[],"stop_reason":"end_turn","usage":{"output_tokens":1}}`, "", 0},
		{"message of max_tokens 0", Messages, `{"type":"message","content":[],"stop_reason":"max_tokens","usage":{"output_tokens":0}}`, "", 0},
		{"empty message", Messages, `{"type":"message","content":[{"type":"text","text":""}],"stop_reason":"end_turn","usage":{"output_tokens":0}}`, "empty_answer", 500},
		{"message without a reason", Messages, `{"type":"message","content":[],"stop_reason":null,"usage":{"output_tokens":0}}`, "empty_answer", 500},
		{"tool use", Messages, `{"type":"message","content":[{"type":"tool_use","name":"f"}],"stop_reason":null}`, "", 0},
		{"error of messages", Messages, `{"type":"error","error":{"type":"overloaded_error"}}`, "error_answer", 503},
		{"content of a message that is no list", Messages, `{"role":"assistant","content":"x"}`, "", 0},
		{"output of a response that is no list", Responses, `{"status":"completed","output":"x"}`, "", 0},
		{"choices that are no list", Chat, `{"choices":"x"}`, "", 0},
		{"a message that is no object", Chat, `{"choices":[{"message":"x"}]}`, "", 0},
		{"no choice but a text", Chat, `{"choices":["x"]}`, "", 0},
		{"another route", Embeddings, `{"choices":[]}`, "", 0},
		{"no JSON", Chat, `choices`, "", 0},
	} {
		if reason, status := WholeFailure(tt.api, []byte(tt.body)); reason != tt.reason || status != tt.status {
			t.Errorf("%s: %q, %d", tt.name, reason, status)
		}
	}
}

func FuzzWholeFailure(f *testing.F) {
	f.Add(uint8(Chat), []byte(`{"choices":[{"message":{"content":""},"finish_reason":null}]}`))
	f.Add(uint8(Responses), []byte(`{"status":"completed","output":[{"type":"message","content":[{"text":""}]}]}`))
	f.Add(uint8(Messages), []byte(`{"content":[{"type":"text","text":""}],"stop_reason":null}`))
	f.Fuzz(func(t *testing.T, api uint8, body []byte) {
		if reason, status := WholeFailure(API(api), body); (reason == "") != (status == 0) || status != 0 && (status < 400 || status > 599) {
			t.Fatalf("%q, %d", reason, status)
		}
	})
}
