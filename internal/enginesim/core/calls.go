package core

import (
	"bytes"
	"encoding/json"
	"strings"
)

// toolCall is the call of a tool that a model makes instead of a text. The call has one
// argument: the word "echo" and the text of the answer. A client that runs the call as a
// command therefore sends the text back, and the arguments are right only if the right KV
// blocks arrived.
type toolCall struct{ name, argument string }

// ParseCall returns the call that turns ask for, nil for none. A turn asks for a call of the tool
// NAME with a mark "<call NAME ARGUMENT>" (the last one counts), if the request has this tool.
// turns is a list of input items or of messages as the client sent it. A result of a tool after
// the mark ends the call, as a model answers with a text then.
func ParseCall(f Fields, turns json.RawMessage) *toolCall {
	turns = bytes.ReplaceAll(bytes.ReplaceAll(turns, []byte(`\u003c`), []byte("<")), []byte(`\u003e`), []byte(">")) // Go's clients escape them
	i := bytes.LastIndex(turns, []byte("<call "))
	if i < 0 || bytes.Contains(turns[i:], []byte(`"function_call_output"`)) || bytes.Contains(turns[i:], []byte(`"tool_result"`)) {
		return nil
	}
	mark, _, _ := strings.Cut(string(turns[i+len("<call "):]), ">")
	name, argument, ok := strings.Cut(mark, " ")
	var tools []struct{ Name string }
	if !ok || json.Unmarshal(f["tools"], &tools) != nil {
		return nil
	}
	for _, tool := range tools {
		if tool.Name == name {
			return &toolCall{name, argument}
		}
	}
	return nil
}

// Opening and closing surround the text of the answer in the arguments of the call.
func (c *toolCall) Opening() string { return `{"` + c.argument + `":"echo` }
func (c *toolCall) Closing() string { return `"}` }

// Arguments returns the arguments of the call of a finished sequence, a JSON object.
func (c *toolCall) Arguments(s *Sequence) string { return c.Opening() + s.AnswerText() + c.Closing() }

// responseCall is the item of a call in the output of a response. Source of this and of the
// events: vLLM entrypoints/openai/responses/simple_streaming_events.py.
func responseCall(req *Request, status, arguments string) Object {
	return Obj("arguments", arguments, "call_id", "call_"+responseItem(req), "name", req.Call.name, "type", "function_call",
		"id", responseItem(req), "status", status)
}

func responseCallDelta(req *Request, delta string) any {
	return ResponseEvent(req, "response.function_call_arguments.delta", Obj("delta", delta, "item_id", responseItem(req), "output_index", 0))
}

func responseCallOpening(req *Request) []any {
	return []any{
		ResponseEvent(req, "response.output_item.added", Obj("item", responseCall(req, "in_progress", ""), "output_index", 0)),
		responseCallDelta(req, req.Call.Opening()),
	}
}

func responseCallEnd(req *Request, s *Sequence) []any {
	arguments := req.Call.Arguments(s)
	return []any{
		responseCallDelta(req, req.Call.Closing()),
		ResponseEvent(req, "response.function_call_arguments.done", Obj("arguments", arguments, "item_id", responseItem(req), "name", req.Call.name, "output_index", 0)),
		ResponseEvent(req, "response.output_item.done", Obj("item", responseCall(req, "completed", arguments), "output_index", 0)),
	}
}

// MessagesCall is the content block of a call. Source of this and of the events: vLLM
// entrypoints/anthropic/serving.py messages_full_converter and message_stream_converter.
func MessagesCall(req *Request, input string) Object {
	return Obj("type", "tool_use", "id", "chatcmpl-tool-"+BaseID(req), "name", req.Call.name, "input", json.RawMessage(input))
}

// inputMessages returns the items of a response's input as messages of a chat. Only messages
// have a role. Source: vLLM entrypoints/openai/responses/utils.py
// construct_chat_messages_with_tool_call.
func inputMessages(items []json.RawMessage) []json.RawMessage {
	messages := make([]json.RawMessage, 0, len(items))
	for _, raw := range items {
		var item struct {
			Type   string          `json:"type"`
			Output json.RawMessage `json:"output"`
		}
		json.Unmarshal(raw, &item)
		switch item.Type {
		case "function_call", "reasoning":
			text, _ := json.Marshal(string(raw))
			raw = EncodeMessage("assistant", text)
		case "function_call_output":
			raw = EncodeMessage("tool", item.Output)
		}
		messages = append(messages, raw)
	}
	return messages
}
