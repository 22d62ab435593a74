package openai

import "bytes"

// maxToolCalls is the number of calls of one answer that ToolCalls looks at.
const maxToolCalls = 64

// ToolCalls calls f with the name of each tool that a whole answer calls. A name is valid during
// the call of f, and empty if it cannot be read. The first choice of an answer counts.
func ToolCalls(api API, answer []byte, f func(name []byte)) {
	switch api {
	case Chat:
		calls, _ := Find(answer, "choices", "0", "message", "tool_calls")
		eachNamed(calls, "", f, "function", "name")
	case Responses:
		items, _ := Find(answer, "output")
		eachNamed(items, "function_call", f, "name")
	case Messages:
		blocks, _ := Find(answer, "content")
		eachNamed(blocks, "tool_use", f, "name")
	}
}

// StreamedToolCalls calls f for each call of a tool in whole events of a chat's stream, with the name
// of the tool, which only the first event of a call has. It parses only events that have such calls.
func StreamedToolCalls(api API, events []byte, f func(name []byte)) {
	if api != Chat {
		return
	}
	for bytes.Contains(events, []byte(`"tool_calls"`)) {
		var event []byte
		event, events, _ = bytes.Cut(events, []byte("\n\n"))
		if _, data, ok := bytes.Cut(event, []byte("data: ")); ok {
			calls, _ := Find(data, "choices", "0", "delta", "tool_calls")
			eachNamed(calls, "", f, "function", "name")
		}
	}
}

// eachNamed calls f with the name of each element of a raw list that has this type; "": all elements.
func eachNamed(list []byte, kind string, f func(name []byte), path ...string) {
	elements, err := Elements(list)
	if err != nil {
		return
	}
	n := 0
	for element := range elements {
		if n++; n > maxToolCalls {
			return
		}
		if kind != "" {
			raw, _ := Find(element, "type")
			if text, _ := String(raw); text != kind {
				continue
			}
		}
		raw, _ := Find(element, path...)
		name, _ := String(raw)
		f([]byte(name))
	}
}
