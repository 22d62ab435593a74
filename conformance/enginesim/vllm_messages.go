package enginesim

import "net/http"

// messagesError is an error of the Anthropic form.
func messagesError(err *apiError) any {
	kind := "api_error"
	switch err.Status {
	case http.StatusBadRequest:
		kind = "invalid_request_error"
	case http.StatusNotFound:
		kind = "not_found_error"
	}
	return obj("type", "error", "error", obj("type", kind, "message", err.Message))
}

// messagesUsage counts the prompt without its cached part.
func messagesUsage(s *sequence) object {
	return obj("input_tokens", len(s.prompt)-s.cached, "output_tokens", len(s.output), "cache_creation_input_tokens", 0, "cache_read_input_tokens", s.cached)
}

// messagesStop are the stop reason and the stop sequence.
func messagesStop(s *sequence) (reason string, sequence any) {
	if text, ok := s.stopReason.(string); ok {
		return "stop_sequence", text
	}
	if s.finish == "length" {
		return "max_tokens", nil
	}
	return "end_turn", nil
}

// messagesAnswer is the unary answer. It omits absent members.
func messagesAnswer(req *request, s *sequence) any {
	reason, stop := messagesStop(s)
	answer := obj("id", baseID(req), "type", "message", "role", "assistant", "content", []any{obj("type", "text", "text", s.answerText())},
		"model", modelName(req, []*sequence{s}), "stop_reason", reason)
	if stop != nil {
		answer = answer.with("stop_sequence", stop)
	}
	answer = answer.with("usage", messagesUsage(s))
	if s.ext != nil {
		answer = answer.with("kv_transfer_params", s.ext)
	}
	return answer
}

// messagesEvent is an event whose first member is its type.
func messagesEvent(name string, body object) any {
	return namedEvent{name, append(obj("type", name), body...)}
}

func messagesOpening(req *request, s *sequence) []any {
	return []any{
		messagesEvent("message_start", obj("message", obj("id", baseID(req), "type", "message", "role", "assistant", "content", []any{},
			"model", modelName(req, []*sequence{s}), "stop_reason", nil, "stop_sequence", nil,
			"usage", obj("input_tokens", len(s.prompt), "output_tokens", 0)))),
		messagesEvent("content_block_start", obj("content_block", obj("type", "text", "text", ""), "index", 0)),
	}
}

func messagesClosing(s *sequence) []any {
	reason, stop := messagesStop(s)
	return []any{
		messagesEvent("content_block_stop", obj("index", 0)),
		messagesEvent("message_delta", obj("delta", obj("stop_reason", reason, "stop_sequence", stop), "usage", messagesUsage(s))),
		messagesEvent("message_stop", obj()),
	}
}
