package core

import (
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"strings"
)

// PyFloat formats a float as Python's JSON does: always with a fraction.
func PyFloat(v float64) json.RawMessage {
	text := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(text, ".e") {
		text += ".0"
	}
	return json.RawMessage(text)
}

// ResponseState is the state of a /v1/responses request: the id of its only
// message and the number of its stream's events so far.
type ResponseState struct {
	Item   string
	events int
}

// responseItem returns the id of the answer's only message.
func responseItem(req *Request) string { return req.Response.Item }

// ResponseEvent returns one event of a /v1/responses stream. Its members are in
// alphabetical order: body contains those before the sequence number, tail
// those between it and the type.
func ResponseEvent(req *Request, name string, body Object, tail ...member) any {
	event := append(body.With("sequence_number", req.Response.events), tail...).With("type", name)
	req.Response.events++
	return NamedEvent{name, event}
}

// ResponsePart is the text of the answer's message.
func ResponsePart(text string, logprobs any) Object {
	return Obj("annotations", []any{}, "text", text, "type", "output_text", "logprobs", logprobs)
}

// ResponseMessage is the answer's message.
func ResponseMessage(req *Request, status string, parts ...any) Object {
	if parts == nil {
		parts = []any{}
	}
	return Obj("id", "msg_"+responseItem(req), "content", parts, "role", "assistant", "status", status, "type", "message", "phase", nil)
}

// ResponseOutput is the output of a finished response.
func ResponseOutput(req *Request, s *Sequence) []any {
	if req.Call != nil {
		return []any{responseCall(req, "completed", req.Call.Arguments(s))}
	}
	return []any{ResponseMessage(req, "completed", ResponsePart(s.AnswerText(), nil))}
}

// ResponseObject is the response up to the transfer parameters, before or after
// the sequence ran.
func ResponseObject(req *Request, s *Sequence, done bool) Object {
	status, output, u, incomplete := "in_progress", []any{}, any(nil), any(nil)
	if done {
		sum := SumUsage([]*Sequence{s})
		status = "completed"
		if s.Finish == "length" {
			status, incomplete = "incomplete", Obj("reason", "max_output_tokens")
		}
		output = ResponseOutput(req, s)
		u = Obj("input_tokens", sum.prompt,
			"input_tokens_details", Obj("cached_tokens", sum.Cached, "cache_write_tokens", sum.Created, "input_tokens_per_turn", []any{}, "cached_tokens_per_turn", []any{}),
			"output_tokens", sum.output,
			"output_tokens_details", Obj("reasoning_tokens", 0, "tool_output_tokens", 0, "output_tokens_per_turn", []any{}, "tool_output_tokens_per_turn", []any{}),
			"total_tokens", sum.prompt+sum.output)
	}
	return Obj("id", BaseID(req), "created_at", req.Created, "incomplete_details", incomplete, "instructions", nil, "metadata", nil,
		"model", req.Model, "object", "response", "output", output, "parallel_tool_calls", true,
		"temperature", PyFloat(req.Temperature), "tool_choice", "none", "tools", []any{}, "top_p", PyFloat(req.TopP), "background", false,
		"max_output_tokens", s.Limit, "max_tool_calls", nil, "previous_response_id", nil, "prompt", nil, "reasoning", nil,
		"service_tier", "auto", "status", status, "text", nil, "top_logprobs", nil, "truncation", "disabled", "usage", u, "user", nil,
		"presence_penalty", PyFloat(0), "frequency_penalty", PyFloat(0))
}

// responseFrame wraps the response in an event. The transfer parameters of a
// stream are in its last event, and null there for a decode leg.
func responseFrame(req *Request, s *Sequence, name string, done bool) any {
	params := any(nil)
	if done {
		params = s.Ext
	}
	return ResponseEvent(req, name, Obj("response", ResponseObject(req, s, done).With("kv_transfer_params", params).
		With("ec_transfer_params", nil).With("input_messages", nil).With("output_messages", nil)))
}

// ResponseGreeting returns the events that are sent before the engine processes
// the request.
func ResponseGreeting(req *Request, s *Sequence) []any {
	return []any{
		responseFrame(req, s, "response.created", false),
		responseFrame(req, s, "response.in_progress", false),
	}
}

// ResponseOpening are the events before the first token's.
func ResponseOpening(req *Request, s *Sequence) []any {
	if req.Call != nil {
		return responseCallOpening(req)
	}
	return []any{
		ResponseEvent(req, "response.output_item.added", Obj("item", ResponseMessage(req, "in_progress"), "output_index", 0)),
		ResponseEvent(req, "response.content_part.added", Obj("content_index", 0, "item_id", "msg_"+responseItem(req), "output_index", 0,
			"part", ResponsePart("", []any{}))),
	}
}

// ResponseDelta is the event of new text, nil for none.
func ResponseDelta(req *Request, p Piece) any {
	if p.Text == "" {
		return nil
	}
	if req.Call != nil {
		return responseCallDelta(req, p.Text)
	}
	return ResponseEvent(req, "response.output_text.delta", Obj("content_index", 0, "delta", p.Text, "item_id", "msg_"+responseItem(req),
		"logprobs", []any{}, "output_index", 0))
}

// ResponseClosing are the events after the last token's.
func ResponseClosing(req *Request, s *Sequence) []any {
	return append(ResponseEnd(req, s), responseFrame(req, s, "response.completed", true))
}

// ResponseEnd returns the events that end the message or the call.
func ResponseEnd(req *Request, s *Sequence) []any {
	if req.Call != nil {
		return responseCallEnd(req, s)
	}
	text, item := s.AnswerText(), "msg_"+responseItem(req)
	return []any{
		ResponseEvent(req, "response.output_text.done", Obj("content_index", 0, "item_id", item, "logprobs", []any{}, "output_index", 0), member{"text", text}),
		ResponseEvent(req, "response.content_part.done", Obj("content_index", 0, "item_id", item, "output_index", 0, "part", ResponsePart(text, nil))),
		ResponseEvent(req, "response.output_item.done", Obj("item", ResponseMessage(req, "completed", ResponsePart(text, nil)), "output_index", 0)),
	}
}

// ParseResponses reads a /v1/responses body: input is a text or a list of
// messages.
func ParseResponses(h http.Header, f Fields) (*Request, *FieldError) {
	req, err := ParseRewritten(RouteResponses, h, f, func(chat Fields) *FieldError {
		if !f.Has("input") {
			return &FieldError{"input", "missing", "Field required"}
		}
		messages := []json.RawMessage{}
		var text string
		if json.Unmarshal(f["input"], &text) == nil {
			messages = append(messages, EncodeMessage("user", f["input"]))
		} else if json.Unmarshal(f["input"], &messages) != nil {
			return &FieldError{"input", "string_type", "Input should be a valid string"}
		}
		messages = inputMessages(messages)
		if f.Has("instructions") {
			messages = append([]json.RawMessage{EncodeMessage("system", f["instructions"])}, messages...)
		}
		chat["messages"], _ = json.Marshal(messages)
		for _, name := range []string{"max_tokens", "min_tokens", "stop_token_ids"} {
			delete(chat, name) // this route does not have these fields
		}
		chat["max_completion_tokens"] = f["max_output_tokens"]
		return nil
	})
	if err == nil {
		req.Call = ParseCall(f, f["input"])
	}
	return req, err
}

// ParseRewritten parses f as a chat request after change has translated a
// dialect's fields into chat's. The request keeps f.
func ParseRewritten(route string, h http.Header, f Fields, change func(chat Fields) *FieldError) (*Request, *FieldError) {
	chat := maps.Clone(f)
	delete(chat, "n")
	if err := change(chat); err != nil {
		return nil, err
	}
	req, err := ParseOpenAI(RouteChat, h, chat)
	if err != nil {
		return nil, err
	}
	req.Route, req.Fields = route, f
	return req, nil
}

// EncodeMessage is a chat message; content is JSON already.
func EncodeMessage(role string, content json.RawMessage) json.RawMessage {
	raw, _ := json.Marshal(chatMessage{Role: role, Content: content})
	return raw
}

// Routes beyond the two that every engine has.
const (
	RouteResponses = "/v1/responses"
	RouteMessages  = "/v1/messages"
	RouteTokens    = "/inference/v1/generate"
)
