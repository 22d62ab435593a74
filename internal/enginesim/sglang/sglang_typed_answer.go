package sglang

import (
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// The answers of the routes with typed events.

// responseObject is the response before or after the sequence ran. Its failure is the text of
// its error; "" for none.
func responseObject(req *core.Request, s *core.Sequence, done bool, failure string) core.Object {
	status, output, usage, incomplete, fault := "in_progress", []any{}, any(nil), any(nil), any(nil)
	switch {
	case failure != "":
		status = "failed"
	case done:
		status = "completed"
		output = core.ResponseOutput(req, s)
		usage = core.Obj("input_tokens", len(s.Prompt), "input_tokens_details", core.Obj("cached_tokens", s.Cached, "cache_write_tokens", 0),
			"output_tokens", len(s.Output), "output_tokens_details", core.Obj("reasoning_tokens", 0), "total_tokens", len(s.Prompt)+len(s.Output))
	}
	switch { // _status_from_finish_reason
	case !done:
	case s.Finish == "length":
		status, incomplete = "incomplete", core.Obj("reason", "max_output_tokens")
	case s.Finish == "abort":
		status, failure = "failed", "Aborted"
	}
	if failure != "" {
		fault = core.Obj("code", "server_error", "message", failure)
	}
	limit := any(nil)
	if req.Limited {
		limit = req.MaxTokens + 2
	}
	return core.Obj("id", req.ID, "object", "response", "created_at", req.Created, "model", core.OrNull(req.Model), "output", output, "status", status,
		"usage", usage, "parallel_tool_calls", true, "tool_choice", "auto", "tools", []any{}, "error", fault, "incomplete_details", incomplete,
		"instructions", nil, "max_output_tokens", limit, "previous_response_id", nil, "reasoning", core.Obj("effort", nil, "summary", nil), "store", true,
		"temperature", nil, "text", nil, "top_p", nil, "truncation", "disabled", "user", nil, "metadata", core.Obj())
}

// responseEvent is an event of the response's life.
func responseEvent(req *core.Request, name string, response core.Object) any {
	return core.ResponseEvent(req, name, core.Obj("response", response))
}

// Greeting returns the events before the engine processes a response.
func (g *SGLang) Greeting(req *core.Request, seqs []*core.Sequence) []any {
	if req.Route != core.RouteResponses {
		return nil
	}
	return []any{
		responseEvent(req, "response.created", responseObject(req, seqs[0], false, "")),
		responseEvent(req, "response.in_progress", responseObject(req, seqs[0], false, "")),
	}
}

// responseClosing are the events after a response's last token.
func responseClosing(req *core.Request, s *core.Sequence) []any {
	name := "response.completed"
	switch s.Finish {
	case "length":
		name = "response.incomplete"
	case "abort":
		name = "response.failed"
	}
	return append(core.ResponseEnd(req, s), responseEvent(req, name, responseObject(req, s, true, "")))
}

// messageID is the id of an answer to /v1/messages. It is not the rid.
func messageID() string { return "msg_" + strings.ReplaceAll(core.NewUUID(), "-", "") }

// messagesEnd is the end of an answer to /v1/messages. STOP_REASON_MAP has no reason for an
// abort, and none for a stop sequence.
func messagesEnd(req *core.Request, s *core.Sequence) core.MessagesEnd {
	end := core.MessagesEnd{Reason: "end_turn", Usage: messagesUsage(s, len(s.Output))}
	switch {
	case s.Finish == "length":
		end.Reason = "max_tokens"
	case req.Call != nil && s.Finish != "abort":
		end.Reason = "tool_use"
	}
	return end
}

// messagesUsage counts the prompt without its cached part.
func messagesUsage(s *core.Sequence, output int) core.Object {
	usage := core.Obj("input_tokens", len(s.Prompt)-s.Cached, "output_tokens", output)
	if s.Cached > 0 {
		usage = usage.With("cache_read_input_tokens", s.Cached)
	}
	return usage
}

// messagesAnswer is the unary answer. It omits absent members.
func messagesAnswer(req *core.Request, s *core.Sequence) any {
	end := messagesEnd(req, s)
	return core.Obj("id", messageID(), "type", "message", "role", "assistant", "content", []any{core.MessagesBlock(req, s)},
		"model", core.ModelName(req, []*core.Sequence{s}), "stop_reason", end.Reason, "usage", end.Usage)
}

func (g *SGLang) ErrorEvents(req *core.Request, err *core.APIError) []any {
	switch req.Route {
	case core.RouteResponses:
		return []any{responseEvent(req, "response.failed", responseObject(req, nil, false, err.Message))}
	case core.RouteMessages: // _flush_on_error
		var events []any
		if !req.Ext.(*SGLangRequest).begun {
			events = append(events, core.MessagesStart(req.Model, messageID(), core.Obj("input_tokens", 0, "output_tokens", 0)))
		}
		return append(events, core.NamedEvent{Name: "error", Data: messagesError(err.Status, err.Message)}, core.MessagesEvent("message_stop", core.Obj()))
	}
	return g.sglangDialect.ErrorEvents(req, err)
}

func (g *SGLang) Unary(req *core.Request, seqs []*core.Sequence) any {
	switch req.Route {
	case core.RouteResponses:
		return responseObject(req, seqs[0], true, "")
	case core.RouteMessages:
		return messagesAnswer(req, seqs[0])
	}
	return g.sglangDialect.Unary(req, seqs)
}

func (g *SGLang) Opening(req *core.Request, s *core.Sequence) []any {
	switch req.Route {
	case core.RouteResponses:
		return core.ResponseOpening(req, s)
	case core.RouteMessages:
		req.Ext.(*SGLangRequest).begun = true
		return core.MessagesOpening(req, s, messageID(), messagesUsage(s, 0))
	}
	return g.sglangDialect.Opening(req, s)
}

func (g *SGLang) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	switch req.Route {
	case core.RouteResponses:
		return core.ResponseDelta(req, p)
	case core.RouteMessages:
		return core.MessagesDelta(req, p)
	}
	return g.sglangDialect.Event(req, s, p)
}

func (g *SGLang) Closing(req *core.Request, seqs []*core.Sequence) []any {
	switch req.Route {
	case core.RouteResponses:
		return responseClosing(req, seqs[0])
	case core.RouteMessages:
		return core.MessagesClosing(req, messagesEnd(req, seqs[0]))
	}
	return g.sglangDialect.Closing(req, seqs)
}

// StreamOptions: the routes with typed events send the head at once, and have no [DONE].
func (g *SGLang) StreamOptions(req *core.Request) core.StreamOptions {
	if typed(req.Route) {
		return core.StreamOptions{NoDone: true, Detokenizer: core.DecodeDifference}
	}
	return g.sglangDialect.StreamOptions(req)
}
