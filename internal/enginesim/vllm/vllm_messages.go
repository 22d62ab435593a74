package vllm

import (
	"net/http"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// messagesError is an error of the Anthropic form.
func messagesError(err *core.APIError) any {
	kind := "api_error"
	switch err.Status {
	case http.StatusBadRequest:
		kind = "invalid_request_error"
	case http.StatusNotFound:
		kind = "not_found_error"
	}
	return core.Obj("type", "error", "error", core.Obj("type", kind, "message", err.Message))
}

// messagesUsage counts the prompt without its cached part.
func messagesUsage(s *core.Sequence) core.Object {
	return core.Obj("input_tokens", len(s.Prompt)-s.Cached, "output_tokens", len(s.Output), "cache_creation_input_tokens", 0, "cache_read_input_tokens", s.Cached)
}

// messagesStop are the stop reason and the stop sequence.
func messagesStop(req *core.Request, s *core.Sequence) (reason string, sequence any) {
	if text, ok := s.StopReason.(string); ok {
		return "stop_sequence", text
	}
	if s.Finish == "length" {
		return "max_tokens", nil
	}
	if req.Call != nil {
		return "tool_use", nil
	}
	return "end_turn", nil
}

// messagesAnswer is the unary answer. It omits absent members.
func messagesAnswer(req *core.Request, s *core.Sequence) any {
	reason, stop := messagesStop(req, s)
	block := core.Obj("type", "text", "text", s.AnswerText())
	if req.Call != nil {
		block = core.MessagesCall(req, req.Call.Arguments(s))
	}
	answer := core.Obj("id", core.BaseID(req), "type", "message", "role", "assistant", "content", []any{block},
		"model", core.ModelName(req, []*core.Sequence{s}), "stop_reason", reason)
	if stop != nil {
		answer = answer.With("stop_sequence", stop)
	}
	answer = answer.With("usage", messagesUsage(s))
	if s.Ext != nil {
		answer = answer.With("kv_transfer_params", s.Ext)
	}
	return answer
}

// messagesEvent is an event whose first member is its type.
func messagesEvent(name string, body core.Object) any {
	return core.NamedEvent{Name: name, Data: append(core.Obj("type", name), body...)}
}

func messagesOpening(req *core.Request, s *core.Sequence) []any {
	block := core.Obj("type", "text", "text", "")
	if req.Call != nil {
		block = core.MessagesCall(req, "{}")
	}
	events := []any{
		messagesEvent("message_start", core.Obj("message", core.Obj("id", core.BaseID(req), "type", "message", "role", "assistant", "content", []any{},
			"model", core.ModelName(req, []*core.Sequence{s}), "stop_reason", nil, "stop_sequence", nil,
			"usage", core.Obj("input_tokens", len(s.Prompt), "output_tokens", 0)))),
		messagesEvent("content_block_start", core.Obj("content_block", block, "index", 0)),
	}
	if req.Call != nil {
		events = append(events, messagesCallDelta(req.Call.Opening()))
	}
	return events
}

// messagesDelta is the event of new text, nil for none.
func messagesDelta(req *core.Request, p core.Piece) any {
	if p.Text == "" {
		return nil
	}
	if req.Call != nil {
		return messagesCallDelta(p.Text)
	}
	return messagesEvent("content_block_delta", core.Obj("delta", core.Obj("type", "text_delta", "text", p.Text), "index", 0))
}

func messagesClosing(req *core.Request, s *core.Sequence) []any {
	reason, stop := messagesStop(req, s)
	var events []any
	if req.Call != nil {
		events = append(events, messagesCallDelta(req.Call.Closing()))
	}
	return append(events,
		messagesEvent("content_block_stop", core.Obj("index", 0)),
		messagesEvent("message_delta", core.Obj("delta", core.Obj("stop_reason", reason, "stop_sequence", stop), "usage", messagesUsage(s))),
		messagesEvent("message_stop", core.Obj()),
	)
}

func messagesCallDelta(part string) any {
	return messagesEvent("content_block_delta", core.Obj("delta", core.Obj("type", "input_json_delta", "partial_json", part), "index", 0))
}
