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

// messagesEnd is the end of an answer. The usage counts the prompt without its cached part.
func messagesEnd(req *core.Request, s *core.Sequence) core.MessagesEnd {
	end := core.MessagesEnd{Reason: "end_turn", Usage: core.Obj("input_tokens", len(s.Prompt)-s.Cached, "output_tokens", len(s.Output),
		"cache_creation_input_tokens", 0, "cache_read_input_tokens", s.Cached)}
	switch text, ok := s.StopReason.(string); {
	case ok:
		end.Reason, end.Sequence = "stop_sequence", text
	case s.Finish == "length":
		end.Reason = "max_tokens"
	case req.Call != nil:
		end.Reason = "tool_use"
	}
	return end
}

// messagesAnswer is the unary answer. It omits absent members.
func messagesAnswer(req *core.Request, s *core.Sequence) any {
	end := messagesEnd(req, s)
	answer := core.Obj("id", core.BaseID(req), "type", "message", "role", "assistant", "content", []any{core.MessagesBlock(req, s)},
		"model", core.ModelName(req, []*core.Sequence{s}), "stop_reason", end.Reason)
	if end.Sequence != nil {
		answer = answer.With("stop_sequence", end.Sequence)
	}
	answer = answer.With("usage", end.Usage)
	if s.Ext != nil {
		answer = answer.With("kv_transfer_params", s.Ext)
	}
	return answer
}

func messagesOpening(req *core.Request, s *core.Sequence) []any {
	return core.MessagesOpening(req, s, core.BaseID(req), core.Obj("input_tokens", len(s.Prompt), "output_tokens", 0))
}

func messagesClosing(req *core.Request, s *core.Sequence) []any {
	return core.MessagesClosing(req, messagesEnd(req, s))
}
