package openai

import (
	"bytes"
	"net/http"
	"strings"
)

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

// BeforeAbort returns the whole events before the first one whose finish reason is a
// failure.
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

// abortOf is abortStatus for one event. Typed events have no finish reason, but may
// repeat the client's metadata.
func abortOf(data []byte, typed bool) (status int, aborted, ended bool) {
	if typed {
		return 0, false, false
	}
	return abortStatus(data)
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
