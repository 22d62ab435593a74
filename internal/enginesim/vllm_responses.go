package enginesim

import (
	"encoding/json"
	"strconv"
	"strings"
)

// pyFloat formats a float as Python's JSON does: always with a fraction.
func pyFloat(v float64) json.RawMessage {
	text := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(text, ".e") {
		text += ".0"
	}
	return json.RawMessage(text)
}

// responseState is the state of a /v1/responses request: the id of its only
// message and the number of its stream's events so far.
type responseState struct {
	item   string
	events int
}

// responseItem returns the id of the answer's only message.
func responseItem(req *request) string { return req.response.item }

// responseEvent returns one event of a /v1/responses stream. Its members are in
// alphabetical order: body contains those before the sequence number, tail
// those between it and the type.
func responseEvent(req *request, name string, body object, tail ...member) any {
	event := append(body.with("sequence_number", req.response.events), tail...).with("type", name)
	req.response.events++
	return namedEvent{name, event}
}

// responsePart is the text of the answer's message.
func responsePart(text string, logprobs any) object {
	return obj("annotations", []any{}, "text", text, "type", "output_text", "logprobs", logprobs)
}

// responseMessage is the answer's message.
func responseMessage(req *request, status string, parts ...any) object {
	if parts == nil {
		parts = []any{}
	}
	return obj("id", "msg_"+responseItem(req), "content", parts, "role", "assistant", "status", status, "type", "message", "phase", nil)
}

// responseObject is the response up to the transfer parameters, before or after
// the sequence ran.
func responseObject(req *request, s *sequence, done bool) object {
	status, output, u, incomplete := "in_progress", []any{}, any(nil), any(nil)
	if done {
		sum := sumUsage([]*sequence{s})
		status = "completed"
		if s.finish == "length" {
			status, incomplete = "incomplete", obj("reason", "max_output_tokens")
		}
		output = []any{responseMessage(req, "completed", responsePart(s.answerText(), nil))}
		if req.call != nil {
			output = []any{responseCall(req, "completed", req.call.arguments(s))}
		}
		u = obj("input_tokens", sum.prompt,
			"input_tokens_details", obj("cached_tokens", sum.cached, "cache_write_tokens", sum.created, "input_tokens_per_turn", []any{}, "cached_tokens_per_turn", []any{}),
			"output_tokens", sum.output,
			"output_tokens_details", obj("reasoning_tokens", 0, "tool_output_tokens", 0, "output_tokens_per_turn", []any{}, "tool_output_tokens_per_turn", []any{}),
			"total_tokens", sum.prompt+sum.output)
	}
	return obj("id", baseID(req), "created_at", req.Created, "incomplete_details", incomplete, "instructions", nil, "metadata", nil,
		"model", req.Model, "object", "response", "output", output, "parallel_tool_calls", true,
		"temperature", pyFloat(req.Temperature), "tool_choice", "none", "tools", []any{}, "top_p", pyFloat(req.TopP), "background", false,
		"max_output_tokens", s.limit, "max_tool_calls", nil, "previous_response_id", nil, "prompt", nil, "reasoning", nil,
		"service_tier", "auto", "status", status, "text", nil, "top_logprobs", nil, "truncation", "disabled", "usage", u, "user", nil,
		"presence_penalty", pyFloat(0), "frequency_penalty", pyFloat(0))
}

// responseFrame wraps the response in an event. The transfer parameters of a
// stream are in its last event, and null there for a decode leg.
func responseFrame(req *request, s *sequence, name string, done bool) any {
	params := any(nil)
	if done {
		params = s.ext
	}
	return responseEvent(req, name, obj("response", responseObject(req, s, done).with("kv_transfer_params", params).
		with("ec_transfer_params", nil).with("input_messages", nil).with("output_messages", nil)))
}

// responseGreeting returns the events that are sent before the engine processes
// the request.
func responseGreeting(req *request, s *sequence) []any {
	return []any{
		responseFrame(req, s, "response.created", false),
		responseFrame(req, s, "response.in_progress", false),
	}
}

// responseOpening are the events before the first token's.
func responseOpening(req *request, s *sequence) []any {
	if req.call != nil {
		return responseCallOpening(req)
	}
	return []any{
		responseEvent(req, "response.output_item.added", obj("item", responseMessage(req, "in_progress"), "output_index", 0)),
		responseEvent(req, "response.content_part.added", obj("content_index", 0, "item_id", "msg_"+responseItem(req), "output_index", 0,
			"part", responsePart("", []any{}))),
	}
}

// responseDelta is the event of new text, nil for none.
func responseDelta(req *request, p piece) any {
	if p.Text == "" {
		return nil
	}
	if req.call != nil {
		return responseCallDelta(req, p.Text)
	}
	return responseEvent(req, "response.output_text.delta", obj("content_index", 0, "delta", p.Text, "item_id", "msg_"+responseItem(req),
		"logprobs", []any{}, "output_index", 0))
}

// responseClosing are the events after the last token's.
func responseClosing(req *request, s *sequence) []any {
	return append(responseEnd(req, s), responseFrame(req, s, "response.completed", true))
}

// responseEnd returns the events that end the message or the call.
func responseEnd(req *request, s *sequence) []any {
	if req.call != nil {
		return responseCallEnd(req, s)
	}
	text, item := s.answerText(), "msg_"+responseItem(req)
	return []any{
		responseEvent(req, "response.output_text.done", obj("content_index", 0, "item_id", item, "logprobs", []any{}, "output_index", 0), member{"text", text}),
		responseEvent(req, "response.content_part.done", obj("content_index", 0, "item_id", item, "output_index", 0, "part", responsePart(text, nil))),
		responseEvent(req, "response.output_item.done", obj("item", responseMessage(req, "completed", responsePart(text, nil)), "output_index", 0)),
	}
}
