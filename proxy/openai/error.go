package openai

import (
	"bytes"
	"cmp"
	"net/http"
	"strconv"
	"strings"
)

// Error is an error in the form that an OpenAI client expects. Message is for the client
// and must not be logged, because it may quote an engine. [Error.Error] omits Message.
type Error struct {
	Status  int    // HTTP status
	Type    string // error class; empty: that of Code, or else the default for Status
	Code    Code   // machine-readable reason; CodeNone: null
	Param   string // the invalid body field; empty: null
	Message string // one sentence for the client
	// NotContinued is why no other engine goes on with the broken stream that the error ends; empty:
	// the member is left out.
	NotContinued string
}

// Error returns the status and the reason. It contains no text of a body: neither the
// message nor the field's name, which a client may have chosen.
func (e *Error) Error() string {
	reason := e.Code.String()
	if reason == "" {
		reason = e.class()
	}
	return "status " + strconv.Itoa(e.Status) + ": " + reason
}

// class returns Type, or the type of Code, or OpenAI's class for the status.
func (e *Error) class() string {
	switch {
	case e.Type != "":
		return e.Type
	case codes[e.Code].Type != "":
		return codes[e.Code].Type
	case e.Status == http.StatusUnauthorized:
		return "authentication_error"
	case e.Status == http.StatusForbidden:
		return "permission_error"
	case e.Status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.Status >= 400 && e.Status < 500:
		return "invalid_request_error"
	}
	return "server_error"
}

// ErrorType returns OpenAI's type of an error with a status.
func ErrorType(status int) string { return (&Error{Status: status}).class() }

// AppendJSON appends the error as one JSON object, without a line end:
// {"error":{"message":…,"type":…,"param":…,"code":…}}.
func (e *Error) AppendJSON(dst []byte) []byte {
	dst = append(dst, `{"error":{"message":`...)
	dst = AppendQuoted(dst, e.Message)
	dst = append(dst, `,"type":`...)
	dst = AppendQuoted(dst, e.class())
	dst = append(dst, `,"param":`...)
	dst = appendQuotedOrNull(dst, e.Param)
	dst = append(dst, `,"code":`...)
	dst = e.appendNotContinued(appendQuotedOrNull(dst, e.Code.String()))
	return append(dst, "}}"...)
}

// appendNotContinued appends the member not_continued of an error object, if there is one.
func (e *Error) appendNotContinued(dst []byte) []byte {
	if e.NotContinued == "" {
		return dst
	}
	return AppendQuoted(append(dst, `,"not_continued":`...), e.NotContinued)
}

// WithNotContinued returns the events from an engine's error event on, with why no other engine goes on
// as the member not_continued of the error object; reason "" is none. Events in an unknown form stay as
// they are.
func WithNotContinued(events []byte, reason string) []byte {
	end := EventEnd(events)
	at := bytes.Index(events[:end], []byte("data:"))
	if at < 0 || reason == "" {
		return events
	}
	var o, inner Object
	if o.Parse(bytes.TrimSpace(events[at+len("data:"):end])) != nil {
		return events
	}
	raw, _ := o.Get("error")
	if inner.Parse(raw) != nil {
		return events
	}
	edited := inner.Append(nil, Edit{Key: "not_continued", Value: AppendQuoted(nil, reason)})
	result := o.Append(append(bytes.Clone(events[:at]), "data: "...), Edit{Key: "error", Value: edited})
	return append(append(result, "\n\n"...), events[end:]...)
}

// AppendError appends the error in the form for unary clients of this API: that of
// AppendJSON, and for Anthropic's the same with the type that its clients expect.
func (a API) AppendError(dst []byte, e *Error) []byte {
	if !a.Anthropic() {
		return e.AppendJSON(dst)
	}
	dst = append(dst, `{"type":"error",`...)
	from := len(dst)
	dst = e.AppendJSON(dst)
	return append(dst[:from], dst[from+1:]...) // without its opening brace
}

func appendQuotedOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return AppendQuoted(dst, s)
}

// AppendErrorEvent appends the error as one event of a stream that has begun: data:
// {"error":{…}} and a blank line, the form of vLLM and SGLang. It must begin at an
// event border; see [EventScanner.MidEvent].
func AppendErrorEvent(dst []byte, e *Error) []byte {
	dst = append(dst, "data: "...)
	dst = e.AppendJSON(dst)
	return append(dst, "\n\n"...)
}

// AppendErrorEvent appends the error as an event that clients of this API understand.
// Clients of the two APIs with typed events ignore events without a type, so the event
// has a type for these APIs.
//
// sequence is the number of the event in a responses stream, see
// [EventScanner.NextSequence]; other APIs do not use it. The event of responses has the
// members of the error twice: flat, as OpenAI's specification has it (ResponseErrorEvent;
// async-openai), and in an object, as OpenAI's service sends them. The Python client raises an
// error only for the object (openai 3.57.0). @ai-sdk/openai 3.0.141 accepts both forms. The code is
// never null, because some clients require a string.
func (a API) AppendErrorEvent(dst []byte, e *Error, sequence int64) []byte {
	switch a {
	case Messages:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":"...)
		dst = AppendQuoted(dst, e.class())
		dst = append(dst, `,"message":`...)
		dst = e.appendNotContinued(AppendQuoted(dst, e.Message))
		return append(dst, "}}\n\n"...)
	case Responses:
		code := cmp.Or(e.Code.String(), e.class())
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"sequence_number\":"...)
		dst = strconv.AppendInt(dst, sequence, 10)
		dst = append(dst, `,"code":`...)
		dst = AppendQuoted(dst, code)
		from := len(dst)
		dst = append(dst, `,"message":`...)
		dst = AppendQuoted(dst, e.Message)
		dst = append(dst, `,"param":`...)
		dst = appendQuotedOrNull(dst, e.Param)
		flat := dst[from:]
		dst = append(dst, `,"error":{"type":`...)
		dst = AppendQuoted(dst, e.class())
		dst = append(dst, `,"code":`...)
		dst = AppendQuoted(dst, code)
		dst = e.appendNotContinued(append(dst, flat...))
		return append(dst, "}}\n\n"...)
	}
	return AppendErrorEvent(dst, e)
}

// AppendDone appends the event that ends a stream: data: [DONE].
func AppendDone(dst []byte) []byte {
	return append(dst, "data: [DONE]\n\n"...)
}

// NewFieldError returns an error of a field, a header or a parameter. It copies the name, which may
// point into the body, because an error is used after the body is freed.
func NewFieldError(code Code, name, message string) *Error {
	e := NewError(code, message)
	e.Param = strings.Clone(name)
	return e
}

func mistyped(field, want string) *Error {
	return NewFieldError(CodeInvalidType, field, "'"+field+"' must be "+want+".")
}

func missing(field string) *Error {
	return NewFieldError(CodeMissingRequiredParameter, field, "'"+field+"' is missing.")
}

func below(field string, least int64) *Error {
	return NewFieldError(CodeIntegerBelowMinValue, field, "'"+field+"' must be at least "+strconv.FormatInt(least, 10)+".")
}

func above(field string) *Error {
	return NewFieldError(CodeIntegerAboveMaxValue, field, "'"+field+"' is too large.")
}

func tooLong(field string, most int) *Error {
	return NewFieldError(CodeStringAboveMaxLength, field, "'"+field+"' must be of at most "+strconv.Itoa(most)+" bytes.")
}
