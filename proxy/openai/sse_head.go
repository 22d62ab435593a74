package openai

import (
	"bytes"
	"net/http"
	"strings"
)

// Verdict classifies the start of a stream.
type Verdict uint8

// The verdicts of StreamHead.Read.
const (
	NeedMore     Verdict = iota // no complete event yet
	CommentOnly                 // only events that engines send before they compute
	Opening                     // events of the answer, but none with content
	ContentEvent                // the answer has content, or has ended with a reason
	ErrorEvent                  // the engine failed before its first token
	EmptyAnswer                 // the stream reports its end, but has no token and no reason for the end
)

// StreamHead classifies the start of a stream. Until its verdict is ContentEvent, the
// leg can be repeated, because the client has lost nothing that an engine generated.
//
// An engine may open an answer that it cannot compute. If the KV of a vLLM request fails
// to load, the engine sends the role of a chat answer and then an error event. Releases
// without that event end the stream after the role, or after the usage
// (entrypoints/openai/chat_completion/serving.py, entrypoints/anthropic/serving.py).
//
// The zero value with an API is ready for use. It belongs to one goroutine.
type StreamHead struct {
	API     API
	Verdict Verdict
	// End is the number of classified bytes: through the end of the event that decided, or
	// of the events before it.
	End int
	// Data is the data of the event that decided. It points into the bytes of the last Read.
	Data []byte
	// Status is the HTTP status of an ErrorEvent or EmptyAnswer.
	Status int

	echoes int64 // events with content that may still repeat the prompt
}

// StreamHead returns the head of a stream that answers r. For a chat request with echo, vLLM
// repeats the last message once for each choice before it looks at the first output.
func (r *Request) StreamHead() StreamHead {
	h := StreamHead{API: r.API}
	if echo, _ := r.Get("echo"); r.API == Chat && string(echo) == "true" {
		h.echoes = r.N
	}
	return h
}

// Read classifies b, which holds all bytes of the stream so far, and returns the verdict.
// It continues where the last Read ended. It must not be called after a verdict from
// ContentEvent on.
//
// An error event is one of type error, one whose data is an error object (nested, or flat
// as SGLang's), or one whose finish reason is abort or error. Comments, pings, and the
// events that announce a response are CommentOnly: vLLM sends those as soon as it has read
// the request. The events of an API that does not generate text all have content.
func (h *StreamHead) Read(b []byte) Verdict {
	for {
		end := firstBorder(nil, b[h.End:])
		if end == 0 {
			return h.Verdict
		}
		event := b[h.End : h.End+end]
		h.End += end
		h.become(CommentOnly)
		if h.classify(event); h.Verdict >= ContentEvent {
			return h.Verdict
		}
		h.Data = nil
	}
}

// become raises the verdict.
func (h *StreamHead) become(v Verdict) { h.Verdict = max(h.Verdict, v) }

// classify derives the verdict from one event.
func (h *StreamHead) classify(event []byte) {
	kind := ""
	for len(event) > 0 {
		var line []byte
		line, event = nextLine(event)
		switch field, value := splitLine(line); string(field) {
		case "event":
			if kind = string(value); kind == "error" || kind == "response.failed" {
				h.fail(http.StatusInternalServerError)
			}
		case "data":
			if h.classifyData(value, kind); h.Data == nil {
				h.Data = value
			}
		}
	}
}

// classifyData classifies a line of data; kind is the type of its event, "" for none.
func (h *StreamHead) classifyData(data []byte, kind string) {
	if raw, ok := errorObject(data); ok {
		h.Data = data
		h.fail(errorStatus(raw))
	} else if status, aborted, _ := abortOf(data, kind != ""); aborted {
		h.Data = data
		h.fail(status)
	} else if h.Verdict == ErrorEvent {
		return
	} else if h.become(h.verdictOf(data, kind)); h.Verdict == EmptyAnswer {
		h.Status = http.StatusInternalServerError
	}
}

// verdictOf returns the verdict of data that reports no error.
func (h *StreamHead) verdictOf(data []byte, kind string) Verdict {
	switch {
	case kind == "ping":
		return CommentOnly
	case !h.API.Generates():
		return ContentEvent
	case string(bytes.TrimSpace(data)) == "[DONE]":
		return EmptyAnswer
	case h.API == Responses:
		return responsesVerdict(kindOf(data, kind), data)
	case h.API == Messages:
		return messagesVerdict(kindOf(data, kind), data)
	case emptyChunk(data):
		return Opening
	case h.echoes > 0 && !ended(data):
		h.echoes--
		return Opening
	}
	return ContentEvent
}

// ended reports whether a chunk has a finish reason.
func ended(chunk []byte) bool {
	reason, ok := after(chunk, finishReason)
	return ok && !bytes.HasPrefix(reason, []byte("null"))
}

// fail keeps the first status that is not the default.
func (h *StreamHead) fail(status int) {
	h.Verdict = ErrorEvent
	if h.Status == 0 || h.Status == http.StatusInternalServerError {
		h.Status = status
	}
}

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
	return empty && tokens(raw) <= 0
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

// emptyChunk reports whether data has choices, none of which has content or a finish
// reason. An unknown member with a value is content.
func emptyChunk(data []byte) bool {
	choices, _ := Find(data, "choices")
	c := Cursor{Text: choices}
	for c.Open('['); c.Next(']'); {
		for c.Open('{'); c.Next('}'); {
			switch string(c.Key) {
			case "index", "prompt_token_ids", "prompt_logprobs": // of the prompt
				c.Skip()
				continue
			case "delta", "message":
				if c.Peek() != '{' {
					break
				}
				for c.Open('{'); c.Next('}'); {
					role := string(c.Key) == "role"
					if value := c.Skip(); !role && !isEmptyValue(value) {
						return false
					}
				}
				continue
			}
			if !isEmptyValue(c.Skip()) {
				return false
			}
		}
	}
	return !c.Bad
}

// isEmptyValue reports whether a raw value is missing, null, or an empty string, array or
// object.
func isEmptyValue(raw []byte) bool {
	switch {
	case IsNull(raw), string(raw) == `""`:
		return true
	case raw[0] == '[', raw[0] == '{':
		i := skipSpace(raw, 1)
		return i < len(raw) && (raw[i] == ']' || raw[i] == '}')
	}
	return false
}
