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
		end := EventEnd(b[h.End:])
		if end == 0 {
			return h.Verdict
		}
		event, kind := b[h.End:h.End+end], ""
		h.End += end
		h.Verdict = max(h.Verdict, CommentOnly)
		for len(event) > 0 {
			var field, value []byte
			switch field, value, event = nextField(event); string(field) {
			case "event":
				if kind = string(value); kind == "error" || kind == "response.failed" {
					h.fail(http.StatusInternalServerError)
				}
			case "data":
				if h.classify(value, kind); h.Data == nil {
					h.Data = value
				}
			}
		}
		if h.Verdict >= ContentEvent {
			return h.Verdict
		}
		h.Data = nil
	}
}

// classify raises the verdict by a line of data; kind is the type of its event, "" for none.
func (h *StreamHead) classify(data []byte, kind string) {
	if raw, ok := errorObject(data); ok {
		h.Data = data
		h.fail(errorStatus(raw))
		return
	}
	if kind == "" { // typed events have no finish reason, but may repeat the client's metadata
		if status, aborted, _ := abortStatus(data); aborted {
			h.Data = data
			h.fail(status)
			return
		}
	}
	if h.Verdict == ErrorEvent {
		return
	}
	v := ContentEvent
	switch {
	case kind == "ping":
		v = CommentOnly
	case !h.API.Generates():
	case string(bytes.TrimSpace(data)) == "[DONE]":
		v = EmptyAnswer
	case h.API == Responses:
		v = responsesVerdict(kindOf(data, kind), data)
	case h.API == Messages:
		v = messagesVerdict(kindOf(data, kind), data)
	case emptyChunk(data):
		v = Opening
	case h.echoes > 0 && !ended(data):
		h.echoes--
		v = Opening
	}
	if h.Verdict = max(h.Verdict, v); h.Verdict == EmptyAnswer {
		h.Status = http.StatusInternalServerError
	}
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

// errorObject reports whether data is an error, and returns the object with its code:
// the value of a first member "error" (vLLM, SGLang's chat and completions), or the
// whole object if its first member is "object":"error" (SGLang's flat form) or
// "type":"error" (messages).
func errorObject(data []byte) (raw []byte, ok bool) {
	c := Cursor{Text: data}
	if c.Open('{'); c.Bad || bytes.HasPrefix(data[c.at:], []byte(`"id"`)) || !c.Next('}') { // nearly all events begin with their id
		return nil, false
	}
	switch string(c.Key) {
	case "error":
		v := c.Skip()
		return v, !IsNull(v)
	case "object", "type":
		return data, string(c.Skip()) == `"error"`
	}
	return nil, false
}

// errorStatus returns the HTTP status of an error object: its code if that is a status,
// else the status of its type, else 500.
func errorStatus(raw []byte) int {
	if nested, ok := Find(raw, "error"); ok {
		raw = nested
	}
	for _, name := range [...]string{"code", "status_code"} {
		v, _ := Find(raw, name)
		if n, ok := Int64(bytes.Trim(v, `"`)); ok && n >= 400 && n <= 599 {
			return int(n)
		}
	}
	v, _ := Find(raw, "type")
	return statusOfType(string(v))
}

// statusOfType contains OpenAI's class names and the names of the engines' exceptions.
func statusOfType(name string) int {
	name = strings.ToLower(strings.ReplaceAll(strings.Trim(name, `"`), "_", ""))
	switch strings.TrimSuffix(name, "error") {
	case "invalidrequest", "badrequest", "value":
		return http.StatusBadRequest
	case "authentication", "unauthorized":
		return http.StatusUnauthorized
	case "permission", "forbidden":
		return http.StatusForbidden
	case "notfound":
		return http.StatusNotFound
	case "ratelimit":
		return http.StatusTooManyRequests
	case "serviceunavailable", "overloaded":
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// BeforeFailure returns the whole events before the first one whose finish reason is a
// failure, or, if errors is set, that is an error event.
func BeforeFailure(events []byte, errors bool) []byte {
	for at := 0; ; {
		end := EventEnd(events[at:])
		if end == 0 {
			end = len(events) - at
		}
		var s EventScanner
		if s.note(events[at : at+end]); s.Aborted || errors && s.Failed || end == 0 {
			return events[:at]
		}
		at += end
	}
}

// abortStatus searches for a finish reason that is a failure; ended: it has found a finish
// reason, of any kind. Abort and error are strings in the OpenAI forms (vLLM:
// v1/engine/__init__.py FinishReason). In SGLang's form abort is also an object
// {"type":"abort","status_code":…}.
func abortStatus(data []byte) (status int, aborted, ended bool) {
	for {
		v, found := after(data, finishReason)
		if !found {
			return 0, false, ended
		}
		if bytes.HasPrefix(v, []byte(`"abort"`)) || bytes.HasPrefix(v, []byte(`"error"`)) {
			return http.StatusInternalServerError, true, true
		}
		if len(v) > 0 && v[0] == '{' {
			if kind, _ := Find(v, "type"); string(kind) == `"abort"` {
				return errorStatus(v), true, true
			}
		}
		ended = ended || !bytes.HasPrefix(v, []byte("null"))
		data = v
	}
}
