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
func messagesStop(req *request, s *sequence) (reason string, sequence any) {
	if text, ok := s.stopReason.(string); ok {
		return "stop_sequence", text
	}
	if s.finish == "length" {
		return "max_tokens", nil
	}
	if req.call != nil {
		return "tool_use", nil
	}
	return "end_turn", nil
}

// messagesAnswer is the unary answer. It omits absent members.
func messagesAnswer(req *request, s *sequence) any {
	reason, stop := messagesStop(req, s)
	block := obj("type", "text", "text", s.answerText())
	if req.call != nil {
		block = messagesCall(req, req.call.arguments(s))
	}
	answer := obj("id", baseID(req), "type", "message", "role", "assistant", "content", []any{block},
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
	block := obj("type", "text", "text", "")
	if req.call != nil {
		block = messagesCall(req, "{}")
	}
	events := []any{
		messagesEvent("message_start", obj("message", obj("id", baseID(req), "type", "message", "role", "assistant", "content", []any{},
			"model", modelName(req, []*sequence{s}), "stop_reason", nil, "stop_sequence", nil,
			"usage", obj("input_tokens", len(s.prompt), "output_tokens", 0)))),
		messagesEvent("content_block_start", obj("content_block", block, "index", 0)),
	}
	if req.call != nil {
		events = append(events, messagesCallDelta(req.call.opening()))
	}
	return events
}

// messagesDelta is the event of new text, nil for none.
func messagesDelta(req *request, p piece) any {
	if p.Text == "" {
		return nil
	}
	if req.call != nil {
		return messagesCallDelta(p.Text)
	}
	return messagesEvent("content_block_delta", obj("delta", obj("type", "text_delta", "text", p.Text), "index", 0))
}

func messagesClosing(req *request, s *sequence) []any {
	reason, stop := messagesStop(req, s)
	var events []any
	if req.call != nil {
		events = append(events, messagesCallDelta(req.call.closing()))
	}
	return append(events,
		messagesEvent("content_block_stop", obj("index", 0)),
		messagesEvent("message_delta", obj("delta", obj("stop_reason", reason, "stop_sequence", stop), "usage", messagesUsage(s))),
		messagesEvent("message_stop", obj()),
	)
}

func messagesCallDelta(part string) any {
	return messagesEvent("content_block_delta", obj("delta", obj("type", "input_json_delta", "partial_json", part), "index", 0))
}
