package loadgen

import (
	"encoding/json"
	"strings"
)

// message is one message of a conversation.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// body returns the body of a request, and its route. history are the earlier messages of
// the conversation.
func (r *run) body(t *task, history []message) (route string, body []byte, err error) {
	fields := map[string]any{"model": r.c.Model, "stream": true}
	if t.exact {
		fields["ignore_eos"] = true
	}
	messages := append(history[:len(history):len(history)], message{"user", t.prompt.text})
	switch r.c.API {
	case APIResponses:
		route, fields["input"], fields["max_output_tokens"] = "/v1/responses", messages, t.tokens
	case APICompletions:
		route, fields["prompt"], fields["max_tokens"] = "/v1/completions", completionPrompt(t, messages), t.tokens
	default:
		route, fields["messages"], fields["max_tokens"] = "/v1/chat/completions", messages, t.tokens
	}
	if r.c.API != APIResponses {
		fields["stream_options"] = map[string]bool{"include_usage": true}
	}
	body, err = json.Marshal(fields)
	return route, body, err
}

// completionPrompt returns the token ids of a prompt, or the conversation as one text.
func completionPrompt(t *task, messages []message) any {
	if t.prompt.ids != nil {
		return t.prompt.ids
	}
	var b strings.Builder
	for i, m := range messages {
		if i > 0 && m.Role == "user" {
			b.WriteByte('\n')
		}
		b.WriteString(m.Content)
	}
	return b.String()
}
