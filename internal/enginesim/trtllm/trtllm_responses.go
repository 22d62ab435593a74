package enginesim

import "strings"

// The worker's own /v1/responses has no disaggregated_params: one worker serves
// the whole request (ResponsesRequest in serve/openai_protocol.py).

// trtResponseFields are the members of its request; all others are rejected.
var trtResponseFields = strings.Fields(`background include input instructions max_output_tokens max_tool_calls metadata
	model parallel_tool_calls previous_response_id prompt reasoning thinking_token_budget service_tier store stream
	temperature text tool_choice tools top_logprobs top_p truncation user request_id`)

// completeResponse sets fields that parseResponses does not know.
func completeResponse(req *request) {
	req.ID = strings.ReplaceAll(newUUID(), "-", "")
	req.response = &responseState{item: randomID()}
}

// trtResponse returns the answer, before or after the sequence ran.
func trtResponse(req *request, s *sequence, done bool) object {
	status, output, u := "in_progress", []any{}, any(nil)
	if done {
		status = "completed"
		if s.finish == "length" {
			status = "incomplete"
		}
		output = []any{responseMessage(req, "completed", responsePart(s.answerText(), nil))}
		u = obj("input_tokens", len(s.prompt), "input_tokens_details", obj("cached_tokens", s.cached, "cache_write_tokens", 0),
			"output_tokens", len(s.output), "output_tokens_details", obj("reasoning_tokens", 0), "total_tokens", len(s.prompt)+len(s.output))
	}
	limit := any(nil)
	if req.Limited {
		limit = req.MaxTokens
	}
	return obj("id", "resp_"+req.ID, "created_at", req.Created, "instructions", nil, "metadata", nil, "model", req.Model,
		"object", "response", "output", output, "parallel_tool_calls", false, "temperature", pyFloat(req.Temperature),
		"tool_choice", "auto", "tools", []any{}, "top_p", pyFloat(req.TopP), "background", false, "max_output_tokens", limit,
		"max_tool_calls", nil, "previous_response_id", nil, "prompt", nil, "reasoning", nil, "service_tier", "auto",
		"status", status, "text", nil, "top_logprobs", 0, "truncation", "disabled", "usage", u, "user", nil)
}

func trtResponseFrame(req *request, s *sequence, name string, done bool) any {
	return responseEvent(req, name, obj("response", trtResponse(req, s, done)))
}

// greeting returns the event that announces a response before its first part.
func (t *trtllm) greeting(req *request, seqs []*sequence) []any {
	if req.Route != routeResponses {
		return nil
	}
	return []any{trtResponseFrame(req, seqs[0], "response.created", false), trtResponseFrame(req, seqs[0], "response.in_progress", false)}
}

func (t *trtllm) unary(req *request, seqs []*sequence) any {
	if req.Route == routeResponses {
		return trtResponse(req, seqs[0], true)
	}
	return t.trtDialect.unary(req, seqs)
}

func (t *trtllm) opening(req *request, s *sequence) []any {
	if req.Route == routeResponses {
		return responseOpening(req, s)
	}
	return t.trtDialect.opening(req, s)
}

func (t *trtllm) event(req *request, s *sequence, p piece) any {
	if req.Route == routeResponses {
		return responseDelta(req, p)
	}
	return t.trtDialect.event(req, s, p)
}

func (t *trtllm) closing(req *request, seqs []*sequence) []any {
	if req.Route == routeResponses {
		return append(responseEnd(req, seqs[0]), trtResponseFrame(req, seqs[0], "response.completed", true))
	}
	return t.trtDialect.closing(req, seqs)
}

func (t *trtllm) streamOptions(req *request) streamOptions {
	if req.Route == routeResponses {
		return streamOptions{NoDone: true}
	}
	return t.trtDialect.streamOptions(req)
}
