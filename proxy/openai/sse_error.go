package openai

import (
	"bytes"
	"net/http"
	"strings"
)

// Verdict classifies the start of a stream.
type Verdict uint8

// The verdicts of ReadFirstEvent.
const (
	NeedMore    Verdict = iota // no complete event yet
	CommentOnly                // only events that engines send before they have content
	DataEvent                  // the answer has begun
	ErrorEvent                 // the engine failed before its first token
)

// FirstEvent is the classification of the start of a stream. Until it is DataEvent,
// nothing of the answer has come and the leg can be repeated.
type FirstEvent struct {
	Verdict Verdict
	// End is the number of classified bytes: through the end of the event, or of the
	// bytes before it.
	End int
	// Data is the data of the event. It points into the given bytes.
	Data []byte
	// Status is the HTTP status of an ErrorEvent.
	Status int
}

// ReadFirstEvent classifies the first bytes of a stream; b holds all bytes so far. An
// error event is one of type error, one whose data is an error object (nested, or flat
// as SGLang's), or one whose finish reason is abort. Comments, pings, and the events
// that announce a response do not count: vLLM sends those as soon as it has read the
// request.
func ReadFirstEvent(b []byte) FirstEvent {
	f := FirstEvent{}
	for {
		end := firstBorder(nil, b[f.End:])
		if end == 0 {
			return f
		}
		event := b[f.End : f.End+end]
		f.End += end
		if f.classify(event) {
			return f
		}
		f.Verdict = CommentOnly
	}
}

// classify derives the verdict from one event. It returns false for an event without
// content.
func (f *FirstEvent) classify(event []byte) bool {
	typed := false
	for len(event) > 0 {
		var line []byte
		line, event = nextLine(event)
		switch field, value := splitLine(line); string(field) {
		case "event":
			typed = true
			switch string(value) {
			case "error", "response.failed":
				f.fail(http.StatusInternalServerError)
			case "ping", "response.created", "response.queued", "response.in_progress":
				return false
			}
		case "data":
			if f.classifyData(value, typed); f.Data == nil {
				f.Data = value
			}
		}
	}
	return f.Verdict >= DataEvent
}

func (f *FirstEvent) classifyData(data []byte, typed bool) {
	if raw, ok := errorObject(data); ok {
		f.Data = data
		f.fail(errorStatus(raw))
	} else if status, ok := abortOf(data, typed); ok {
		f.Data = data
		f.fail(status)
	} else if f.Verdict != ErrorEvent {
		f.Verdict = DataEvent
	}
}

// fail keeps the first status that is not the default.
func (f *FirstEvent) fail(status int) {
	f.Verdict = ErrorEvent
	if f.Status == 0 || f.Status == http.StatusInternalServerError {
		f.Status = status
	}
}

// errorObject reports whether data is an error, and returns the object with its code:
// the value of a first member "error" (vLLM, SGLang's chat and completions), or the
// whole object if its first member is "object":"error" (SGLang's flat form) or
// "type":"error" (messages).
func errorObject(data []byte) (raw []byte, ok bool) {
	i := skipSpace(data, 0)
	if i >= len(data) || data[i] != '{' {
		return nil, false
	}
	whole := data[i:]
	rest := whole[skipSpace(whole, 1):]
	for _, name := range [...]string{`"error"`, `"object"`, `"type"`} {
		if !bytes.HasPrefix(rest, []byte(name)) {
			continue
		}
		v := rest[skipSpace(rest, len(name)):]
		if len(v) == 0 || v[0] != ':' {
			return nil, false
		}
		v = v[skipSpace(v, 1):]
		v = v[:skipValue(v, 0)]
		if name != `"error"` {
			return whole, string(v) == `"error"`
		}
		return v, !IsNull(v)
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

// BeforeAbort returns the whole events before the first one whose finish reason is
// abort.
func BeforeAbort(events []byte) []byte {
	for at := 0; ; {
		end := firstBorder(nil, events[at:])
		if end == 0 {
			end = len(events) - at
		}
		var s EventScanner
		if s.note(events[at : at+end]); s.Aborted || end == 0 {
			return events[:at]
		}
		at += end
	}
}

// AbortStatus searches a unary answer of an API for a finish reason of abort, and
// returns its HTTP status. It searches only answers that have finish reasons and that
// repeat no object of the client.
func AbortStatus(api API, body []byte) (status int, ok bool) {
	switch api {
	case Completions, Chat, Generate:
		return abortStatus(body)
	}
	return 0, false
}

// abortOf is abortStatus for one event. Typed events have no finish reason, but may
// repeat the client's metadata.
func abortOf(data []byte, typed bool) (status int, ok bool) {
	if typed {
		return 0, false
	}
	return abortStatus(data)
}

// abortStatus searches for a finish reason of abort: a string in the OpenAI forms, and
// in SGLang's also an object {"type":"abort","status_code":…}.
func abortStatus(data []byte) (status int, ok bool) {
	for {
		v, found := after(data, finishReason)
		if !found {
			return 0, false
		}
		if bytes.HasPrefix(v, []byte(`"abort"`)) {
			return http.StatusInternalServerError, true
		}
		if len(v) > 0 && v[0] == '{' {
			reason := v[:skipValue(v, 0)]
			if kind, _ := Find(reason, "type"); string(kind) == `"abort"` {
				return errorStatus(reason), true
			}
		}
		data = v
	}
}
