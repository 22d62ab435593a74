package enginesim

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

// parseCall returns the call that turns ask for, nil for none. A turn asks for a call of the tool
// NAME with a mark "<call NAME ARGUMENT>" (the last one counts), if the request has this tool.
// turns is a list of input items or of messages as the client sent it. A result of a tool after
// the mark ends the call, as a model answers with a text then.
func parseCall(f fields, turns json.RawMessage) *toolCall {
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

// opening and closing surround the text of the answer in the arguments of the call.
func (c *toolCall) opening() string { return `{"` + c.argument + `":"echo` }
func (c *toolCall) closing() string { return `"}` }

// arguments returns the arguments of the call of a finished sequence, a JSON object.
func (c *toolCall) arguments(s *sequence) string { return c.opening() + s.answerText() + c.closing() }

// responseCall is the item of a call in the output of a response. Source of this and of the
// events: vLLM entrypoints/openai/responses/simple_streaming_events.py.
func responseCall(req *request, status, arguments string) object {
	return obj("arguments", arguments, "call_id", "call_"+responseItem(req), "name", req.call.name, "type", "function_call",
		"id", responseItem(req), "status", status)
}

func responseCallDelta(req *request, delta string) any {
	return responseEvent(req, "response.function_call_arguments.delta", obj("delta", delta, "item_id", responseItem(req), "output_index", 0))
}

func responseCallOpening(req *request) []any {
	return []any{
		responseEvent(req, "response.output_item.added", obj("item", responseCall(req, "in_progress", ""), "output_index", 0)),
		responseCallDelta(req, req.call.opening()),
	}
}

func responseCallEnd(req *request, s *sequence) []any {
	arguments := req.call.arguments(s)
	return []any{
		responseCallDelta(req, req.call.closing()),
		responseEvent(req, "response.function_call_arguments.done", obj("arguments", arguments, "item_id", responseItem(req), "name", req.call.name, "output_index", 0)),
		responseEvent(req, "response.output_item.done", obj("item", responseCall(req, "completed", arguments), "output_index", 0)),
	}
}

// messagesCall is the content block of a call. Source of this and of the events: vLLM
// entrypoints/anthropic/serving.py messages_full_converter and message_stream_converter.
func messagesCall(req *request, input string) object {
	return obj("type", "tool_use", "id", "chatcmpl-tool-"+baseID(req), "name", req.call.name, "input", json.RawMessage(input))
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
			raw = encodeMessage("assistant", text)
		case "function_call_output":
			raw = encodeMessage("tool", item.Output)
		}
		messages = append(messages, raw)
	}
	return messages
}
