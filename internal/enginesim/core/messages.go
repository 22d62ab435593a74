package core

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
)

// messagesFields are the members of an Anthropic request that affect the
// generation; all others are ignored.
var messagesFields = []string{"model", "messages", "max_tokens", "stream", "temperature", "top_p", "top_k"}

// ParseMessages reads an Anthropic /v1/messages body.
func ParseMessages(h http.Header, f Fields) (*Request, *FieldError) {
	for _, name := range []string{"model", "messages", "max_tokens"} {
		if !f.Has(name) {
			return nil, &FieldError{Field: name, Kind: "missing", Message: "Field required"}
		}
	}
	req, err := ParseRewritten(RouteMessages, h, f, func(chat Fields) *FieldError {
		maps.DeleteFunc(chat, func(name string, _ json.RawMessage) bool { return !slices.Contains(messagesFields, name) })
		if f.Has("system") {
			var messages []json.RawMessage
			if json.Unmarshal(f["messages"], &messages) != nil {
				return &FieldError{Field: "messages", Kind: "list_type", Message: "Input should be a valid list"}
			}
			messages = append([]json.RawMessage{EncodeMessage("system", f["system"])}, messages...)
			chat["messages"], _ = json.Marshal(messages)
		}
		chat["stop"] = f["stop_sequences"]
		return nil
	})
	if err == nil && req.MaxTokens <= 0 {
		return nil, &FieldError{Field: "max_tokens", Kind: "value_error", Message: "Value error, max_tokens must be positive"}
	}
	if err == nil {
		req.Call = ParseCall(f, f["messages"])
	}
	return req, err
}

// MessagesEnd is the end of an answer to /v1/messages: the stop reason, the stop sequence, and
// the usage object.
type MessagesEnd struct {
	Reason   string
	Sequence any
	Usage    Object
}

// MessagesBlock is the only content block of a whole answer.
func MessagesBlock(req *Request, s *Sequence) Object {
	if req.Call != nil {
		return MessagesCall(req, req.Call.Arguments(s))
	}
	return Obj("type", "text", "text", s.AnswerText())
}

// MessagesEvent is an event whose first member is its type.
func MessagesEvent(name string, body Object) any {
	return NamedEvent{Name: name, Data: append(Obj("type", name), body...)}
}

// MessagesStart is the event before the content.
func MessagesStart(model, id string, usage Object) any {
	return MessagesEvent("message_start", Obj("message", Obj("id", id, "type", "message", "role", "assistant", "content", []any{},
		"model", model, "stop_reason", nil, "stop_sequence", nil, "usage", usage)))
}

// MessagesOpening are the events before the first token's. usage is that of message_start.
func MessagesOpening(req *Request, s *Sequence, id string, usage Object) []any {
	block := Obj("type", "text", "text", "")
	if req.Call != nil {
		block = MessagesCall(req, "{}")
	}
	events := []any{
		MessagesStart(ModelName(req, []*Sequence{s}), id, usage),
		MessagesEvent("content_block_start", Obj("content_block", block, "index", 0)),
	}
	if req.Call != nil {
		events = append(events, messagesCallDelta(req.Call.Opening()))
	}
	return events
}

// MessagesDelta is the event of new text, nil for none.
func MessagesDelta(req *Request, p Piece) any {
	if p.Text == "" {
		return nil
	}
	if req.Call != nil {
		return messagesCallDelta(p.Text)
	}
	return MessagesEvent("content_block_delta", Obj("delta", Obj("type", "text_delta", "text", p.Text), "index", 0))
}

// MessagesClosing are the events after the last token's.
func MessagesClosing(req *Request, end MessagesEnd) []any {
	var events []any
	if req.Call != nil {
		events = append(events, messagesCallDelta(req.Call.Closing()))
	}
	return append(events,
		MessagesEvent("content_block_stop", Obj("index", 0)),
		MessagesEvent("message_delta", Obj("delta", Obj("stop_reason", end.Reason, "stop_sequence", end.Sequence), "usage", end.Usage)),
		MessagesEvent("message_stop", Obj()),
	)
}

func messagesCallDelta(part string) any {
	return MessagesEvent("content_block_delta", Obj("delta", Obj("type", "input_json_delta", "partial_json", part), "index", 0))
}
