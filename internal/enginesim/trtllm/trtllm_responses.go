package trtllm

import (
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// The worker's own /v1/responses has no disaggregated_params: one worker serves
// the whole request (ResponsesRequest in serve/openai_protocol.py).

// trtResponseFields are the members of its request; all others are rejected.
var trtResponseFields = strings.Fields(`background include input instructions max_output_tokens max_tool_calls metadata
	model parallel_tool_calls previous_response_id prompt reasoning thinking_token_budget service_tier store stream
	temperature text tool_choice tools top_logprobs top_p truncation user request_id`)

// completeResponse sets fields that ParseResponses does not know.
func completeResponse(req *core.Request) {
	req.ID = strings.ReplaceAll(core.NewUUID(), "-", "")
	req.Response = &core.ResponseState{Item: core.RandomID()}
}

// trtResponse returns the answer, before or after the sequence ran.
func trtResponse(req *core.Request, s *core.Sequence, done bool) core.Object {
	status, output, u := "in_progress", []any{}, any(nil)
	if done {
		status = "completed"
		if s.Finish == "length" {
			status = "incomplete"
		}
		output = []any{core.ResponseMessage(req, "completed", core.ResponsePart(s.AnswerText(), nil))}
		u = core.Obj("input_tokens", len(s.Prompt), "input_tokens_details", core.Obj("cached_tokens", s.Cached, "cache_write_tokens", 0),
			"output_tokens", len(s.Output), "output_tokens_details", core.Obj("reasoning_tokens", 0), "total_tokens", len(s.Prompt)+len(s.Output))
	}
	limit := any(nil)
	if req.Limited {
		limit = req.MaxTokens
	}
	return core.Obj("id", "resp_"+req.ID, "created_at", req.Created, "instructions", nil, "metadata", nil, "model", req.Model,
		"object", "response", "output", output, "parallel_tool_calls", false, "temperature", core.PyFloat(req.Temperature),
		"tool_choice", "auto", "tools", []any{}, "top_p", core.PyFloat(req.TopP), "background", false, "max_output_tokens", limit,
		"max_tool_calls", nil, "previous_response_id", nil, "prompt", nil, "reasoning", nil, "service_tier", "auto",
		"status", status, "text", nil, "top_logprobs", 0, "truncation", "disabled", "usage", u, "user", nil)
}

func trtResponseFrame(req *core.Request, s *core.Sequence, name string, done bool) any {
	return core.ResponseEvent(req, name, core.Obj("response", trtResponse(req, s, done)))
}

// Greeting returns the event that announces a response before its first part.
func (t *TRTLLM) Greeting(req *core.Request, seqs []*core.Sequence) []any {
	if req.Route != core.RouteResponses {
		return nil
	}
	return []any{trtResponseFrame(req, seqs[0], "response.created", false), trtResponseFrame(req, seqs[0], "response.in_progress", false)}
}

func (t *TRTLLM) Unary(req *core.Request, seqs []*core.Sequence) any {
	if req.Route == core.RouteResponses {
		return trtResponse(req, seqs[0], true)
	}
	return t.trtDialect.Unary(req, seqs)
}

func (t *TRTLLM) Opening(req *core.Request, s *core.Sequence) []any {
	if req.Route == core.RouteResponses {
		return core.ResponseOpening(req, s)
	}
	return t.trtDialect.Opening(req, s)
}

func (t *TRTLLM) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	if req.Route == core.RouteResponses {
		return core.ResponseDelta(req, p)
	}
	return t.trtDialect.Event(req, s, p)
}

func (t *TRTLLM) Closing(req *core.Request, seqs []*core.Sequence) []any {
	if req.Route == core.RouteResponses {
		return append(core.ResponseEnd(req, seqs[0]), trtResponseFrame(req, seqs[0], "response.completed", true))
	}
	return t.trtDialect.Closing(req, seqs)
}

func (t *TRTLLM) StreamOptions(req *core.Request) core.StreamOptions {
	if req.Route == core.RouteResponses {
		return core.StreamOptions{NoDone: true}
	}
	return t.trtDialect.StreamOptions(req)
}
