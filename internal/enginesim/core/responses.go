package enginesim

import (
	"encoding/json"
	"maps"
	"net/http"
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

// parseResponses reads a /v1/responses body: input is a text or a list of
// messages.
func parseResponses(h http.Header, f fields) (*request, *fieldError) {
	req, err := parseRewritten(routeResponses, h, f, func(chat fields) *fieldError {
		if !f.has("input") {
			return &fieldError{"input", "missing", "Field required"}
		}
		messages := []json.RawMessage{}
		var text string
		if json.Unmarshal(f["input"], &text) == nil {
			messages = append(messages, encodeMessage("user", f["input"]))
		} else if json.Unmarshal(f["input"], &messages) != nil {
			return &fieldError{"input", "string_type", "Input should be a valid string"}
		}
		messages = inputMessages(messages)
		if f.has("instructions") {
			messages = append([]json.RawMessage{encodeMessage("system", f["instructions"])}, messages...)
		}
		chat["messages"], _ = json.Marshal(messages)
		for _, name := range []string{"max_tokens", "min_tokens", "stop_token_ids"} {
			delete(chat, name) // this route does not have these fields
		}
		chat["max_completion_tokens"] = f["max_output_tokens"]
		return nil
	})
	if err == nil {
		req.call = parseCall(f, f["input"])
	}
	return req, err
}

// parseRewritten parses f as a chat request after change has translated a
// dialect's fields into chat's. The request keeps f.
func parseRewritten(route string, h http.Header, f fields, change func(chat fields) *fieldError) (*request, *fieldError) {
	chat := maps.Clone(f)
	delete(chat, "n")
	if err := change(chat); err != nil {
		return nil, err
	}
	req, err := parseOpenAI(routeChat, h, chat)
	if err != nil {
		return nil, err
	}
	req.Route, req.Fields = route, f
	return req, nil
}

// encodeMessage is a chat message; content is JSON already.
func encodeMessage(role string, content json.RawMessage) json.RawMessage {
	raw, _ := json.Marshal(chatMessage{Role: role, Content: content})
	return raw
}

// Routes of vLLM beyond the two that every engine has.
const (
	routeResponses = "/v1/responses"
	routeMessages  = "/v1/messages"
	routeTokens    = "/inference/v1/generate"
)
