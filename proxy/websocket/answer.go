package websocket

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// maxError bounds the error of an answer that is no stream, in bytes.
const maxError = 64 << 10

// answer is the http.ResponseWriter of a turn. It sends the events of a stream as messages, and
// any other answer as an error. The goroutine of the handler uses it.
type answer struct {
	session *session
	turn    *turn
	header  http.Header
	status  int // 0: the answer has not begun
	stream  bool
	events  events
	held    int    // bytes of events that are counted
	whole   []byte // the front of an answer that is no stream
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
		a.stream = status == http.StatusOK && strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream")
	}
}

// Write implements http.ResponseWriter. After an error the client has no whole response.
func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if !a.stream {
		a.whole = append(a.whole, p[:min(len(p), maxError-len(a.whole))]...)
		return len(p), nil
	}
	if err := a.events.feed(p, a.event); err != nil {
		return 0, err
	}
	if n := a.events.memory(); n > a.held {
		if err := a.turn.body.Reserve(n - a.held); err != nil {
			return 0, err
		}
		a.held = n
	}
	return len(p), nil
}

// FlushError is the method of http.ResponseController. Write sends each event at once.
func (*answer) FlushError() error { return nil }

// event sends one event.
func (a *answer) event(name, data []byte) error {
	if string(data) == "[DONE]" {
		return nil
	}
	if len(name) == 0 {
		raw, _ := openai.Find(data, "type")
		text, _ := openai.String(raw)
		name = []byte(text)
	}
	switch string(name) {
	case "response.completed", "response.incomplete", "response.failed":
		a.turn.over.Store(true) // first: the client may ask for the next response at once
	case "error":
		a.turn.over.Store(true)
		return a.session.send(appendError(nil, statusOf(data), nil, data))
	}
	return a.session.send(data)
}

// finish ends the answer after the handler has returned.
func (a *answer) finish() {
	if a.stream && (a.events.finish(a.event) != nil || a.turn.over.Load()) {
		return
	}
	a.turn.over.Store(true) // first: the client may ask for the next response at once
	switch {
	case a.stream:
		a.session.fail(openai.NewError(openai.CodeLegFailed, "the stream ended without the last event of the response"))
	case a.status < 400:
		a.session.fail(openai.NewError(openai.CodeLegFailed, "the engine sent no stream of events"))
	default:
		_ = a.session.send(appendError(nil, a.status, a.header, a.whole)) // read notices that the client has left
	}
}

// statusOf returns the HTTP status of an error event.
func statusOf(data []byte) int {
	for _, path := range [][]string{{"status"}, {"error", "code"}, {"code"}} {
		if raw, ok := openai.Find(data, path...); ok {
			if n, err := strconv.Atoi(string(raw)); err == nil && n >= 400 && n <= 599 {
				return n
			}
		}
	}
	return http.StatusBadGateway
}

// appendError appends the message of an error to dst. Body is the error in a form of OpenAI or of
// an engine: {"error":{…}}, or the members of the error itself; or any text, as the local answer of
// a filter has it. The code of the error becomes a text, because clients drop messages with another
// type.
func appendError(dst []byte, status int, h http.Header, body []byte) []byte {
	var found struct {
		Error json.RawMessage `json:"error"`
	}
	var e map[string]json.RawMessage
	if json.Unmarshal(body, &found) != nil || json.Unmarshal(found.Error, &e) != nil {
		e = nil
		_ = json.Unmarshal(body, &e) // an error without an object leaves e empty
	}
	m := map[string]json.RawMessage{"type": openai.AppendQuoted(nil, openai.ErrorType(status)), "param": json.RawMessage("null"), "code": json.RawMessage("null")}
	m["message"] = openai.AppendQuoted(nil, messageOf(status, found.Error, body))
	for _, name := range []string{"message", "type", "param", "code"} {
		if v := e[name]; v != nil && !(name == "type" && string(v) == `"error"`) {
			m[name] = v
		}
	}
	if c := m["code"]; c[0] != '"' && !bytes.Equal(c, []byte("null")) {
		m["code"] = openai.AppendQuoted(nil, string(c))
	}
	dst = append(dst, `{"type":"error","status":`...)
	dst = strconv.AppendInt(dst, int64(status), 10)
	dst = append(dst, `,"error":`...)
	dst = appendJSON(dst, m)
	lines := map[string]string{}
	for _, name := range []string{"X-Request-Id", "Retry-After"} {
		if v := h.Get(name); v != "" {
			lines[strings.ToLower(name)] = v
		}
	}
	if len(lines) > 0 {
		dst = appendJSON(append(dst, `,"headers":`...), lines)
	}
	return append(dst, '}')
}

// messageOf returns the message of an error whose object names none: the text in the place of the
// object, else a body that is a text and no JSON, else the name of the status.
func messageOf(status int, object json.RawMessage, body []byte) string {
	if text, ok := openai.String(object); ok && text != "" {
		return text
	}
	if text := strings.TrimSpace(string(body)); text != "" && utf8.ValidString(text) && !json.Valid(body) && !strings.HasPrefix(text, "<") {
		return text
	}
	return http.StatusText(status)
}

// appendJSON appends a map of texts or of valid JSON, which always has a JSON form.
func appendJSON(dst []byte, v any) []byte {
	b, _ := json.Marshal(v)
	return append(dst, b...)
}
