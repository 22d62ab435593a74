package openai

import "strings"

// kindOf returns the type of a typed event, which some engines send only in the data.
func kindOf(data []byte, kind string) string {
	if kind == "" {
		raw, _ := Find(data, "type")
		kind, _ = String(raw)
	}
	return kind
}

// responsesVerdict classifies one event of a responses stream.
func responsesVerdict(kind string, data []byte) Verdict {
	switch kind {
	case "response.created", "response.queued", "response.in_progress":
		return CommentOnly
	case "response.completed":
		if response, _ := Find(data, "response"); emptyResponse(response) {
			return EmptyAnswer
		}
		return ContentEvent
	case "response.output_item.added", "response.output_item.done":
		if v, _ := Find(data, "item"); emptyItem(v) {
			return Opening
		}
		return ContentEvent
	case "response.content_part.added", "response.content_part.done", "response.reasoning_part.added", "response.reasoning_part.done",
		"response.reasoning_summary_part.added", "response.reasoning_summary_part.done":
		if text, _ := Find(data, "part", "text"); isEmptyValue(text) {
			return Opening
		}
		return ContentEvent
	}
	for _, end := range [...]struct{ suffix, member string }{{".delta", "delta"}, {"text.done", "text"}} {
		if v, ok := Find(data, end.member); strings.HasSuffix(kind, end.suffix) && ok && isEmptyValue(v) {
			return Opening
		}
	}
	return ContentEvent
}

// emptyItem reports whether an output item of a response is a message or a reasoning
// without text.
func emptyItem(item []byte) bool {
	kind, _ := Find(item, "type")
	if string(kind) != `"message"` && string(kind) != `"reasoning"` {
		return false
	}
	empty := true
	for _, list := range [...]string{"content", "summary"} {
		parts, _ := Find(item, list)
		c := Cursor{Text: parts}
		for c.Open('['); c.Next(']') && empty; {
			text, _ := Find(c.Skip(), "text")
			empty = isEmptyValue(text)
		}
	}
	encrypted, _ := Find(item, "encrypted_content")
	return empty && isEmptyValue(encrypted)
}

// emptyResponse reports whether a response that claims to be completed has no output and
// counts no token.
func emptyResponse(response []byte) bool {
	output, ok := Find(response, "output")
	if !ok {
		return false
	}
	empty := true
	c := Cursor{Text: output}
	for c.Open('['); c.Next(']') && empty; {
		empty = emptyItem(c.Skip())
	}
	raw, _ := Find(response, "usage", "output_tokens")
	return empty && !c.Bad && tokens(raw) <= 0
}

// messagesVerdict classifies one event of a messages stream.
func messagesVerdict(kind string, data []byte) Verdict {
	var v []byte
	switch kind {
	case "ping": // named only in the data
		return CommentOnly
	case "message_stop":
		return EmptyAnswer
	case "content_block_stop":
		return Opening
	case "message_start":
		v, _ = Find(data, "message", "content")
	case "message_delta":
		reason, _ := Find(data, "delta", "stop_reason")
		count, _ := Find(data, "usage", "output_tokens")
		if !endsMessage(reason, count) {
			return Opening
		}
		return ContentEvent
	case "content_block_start":
		block, _ := Find(data, "content_block")
		switch t, _ := Find(block, "type"); string(t) {
		case `"text"`:
			v, _ = Find(block, "text")
		case `"thinking"`:
			v, _ = Find(block, "thinking")
		default:
			return ContentEvent
		}
	case "content_block_delta":
		delta, _ := Find(data, "delta")
		for _, member := range [...]string{"text", "thinking", "partial_json"} {
			if text, ok := Find(delta, member); ok && isEmptyValue(text) {
				return Opening
			}
		}
		return ContentEvent
	default:
		return ContentEvent
	}
	if isEmptyValue(v) {
		return Opening
	}
	return ContentEvent
}

// endsMessage reports whether a stop reason is the end of an answer of at least one token,
// or names another reason for an answer without tokens. vLLM reports end_turn for an answer
// that ended without a reason (entrypoints/anthropic/serving.py, stop_reason_map).
func endsMessage(reason, outputTokens []byte) bool {
	return !IsNull(reason) && !(string(reason) == `"end_turn"` && tokens(outputTokens) == 0)
}
