package sglang

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// The routes with typed events. Sources: entrypoints/openai/serving_responses.py and
// protocol.py (ResponsesRequest, ResponsesResponse); entrypoints/anthropic/serving.py and
// protocol.py.

// The first releases whose requests have the fields of the transfer: PDRoutingFields in
// entrypoints/openai/protocol.py.
const (
	firstResponses = 20
	firstMessages  = 22
)

// typed reports whether a route has typed events and errors of another form.
func typed(route string) bool { return route == core.RouteResponses || route == core.RouteMessages }

// transferFields are the fields of the transfer in a body.
var transferFields = []string{"bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"}

// transfers returns a body's fields without those that this release does not read on a route
// whose first release with the transfer is 0.5.first.
func (g *SGLang) transfers(f core.Fields, first int) core.Fields {
	f = maps.Clone(f)
	delete(f, "rid")
	digits, _, _ := strings.Cut(strings.TrimPrefix(g.cfg.Version, "0.5."), ".")
	if patch, _ := strconv.Atoi(digits); patch < first {
		for _, name := range transferFields {
			delete(f, name)
		}
	}
	return f
}

// responsesOnly are the fields of a chat that /v1/responses does not read.
var responsesOnly = []string{"ignore_eos", "seed", "min_tokens", "n", "logprobs", "stream_options"}

// parseResponses reads a /v1/responses body. The rid is its request_id, which is also the id of
// the answer.
func (g *SGLang) parseResponses(h http.Header, f core.Fields) (*core.Request, *core.APIError, *core.FieldError) {
	f = g.transfers(f, firstResponses)
	for _, name := range responsesOnly {
		delete(f, name)
	}
	if !f.Has("request_id") {
		f["request_id"], _ = json.Marshal("resp_" + strings.ReplaceAll(core.NewUUID(), "-", ""))
	}
	f["rid"] = f["request_id"]
	background, err := f.Boolean("background", false)
	if err != nil {
		return nil, nil, err
	}
	req, err := core.ParseResponses(h, f)
	switch {
	case err != nil:
		return nil, nil, err
	case f.Has("previous_response_id"):
		return nil, storeDisabled("previous_response_id"), nil
	case background:
		return nil, storeDisabled("background"), nil
	case req.Model != "" && req.Model != g.e.Cfg.Model:
		return nil, &core.APIError{Status: http.StatusNotFound, Type: invalidRequest, Message: "The model '" + req.Model + "' does not exist", Param: "model"}, nil
	}
	if req.Limited {
		req.MaxTokens -= 2 // "headroom": to_sampling_params
	}
	req.Response = &core.ResponseState{Item: core.RandomID()}
	return req, nil, nil
}

// storeDisabled is the refusal of requests about stored responses, which no disaggregated engine
// has; others have them only with --enable-response-store.
func storeDisabled(param string) *core.APIError {
	return &core.APIError{Status: http.StatusBadRequest, Type: invalidRequest, Param: param, Message: "Response store is disabled. Stateful Responses require " +
		"--enable-response-store on a standalone server; response storage is unavailable in PD mode."}
}

// storeDisabled answers the routes of stored responses.
func (g *SGLang) storeDisabled(w http.ResponseWriter, _ *http.Request) {
	refusal := storeDisabled("response_id")
	core.WriteJSON(w, refusal.Status, typedError(core.RouteResponses, refusal))
}

// parseMessages reads an Anthropic /v1/messages body, which has no rid.
func (g *SGLang) parseMessages(h http.Header, f core.Fields) (*core.Request, *core.FieldError) {
	req, err := core.ParseMessages(h, g.transfers(f, firstMessages))
	if err != nil {
		return nil, err
	}
	delete(req.Fields, "data_parallel_rank")
	thinking, err := f.Object("thinking")
	if err != nil {
		return nil, err
	}
	kind, _ := thinking.Str("type", "")
	if budget, err := thinking.Integer("budget_tokens", 0); kind == "enabled" && (err != nil || budget < 1024) { // AnthropicThinkingParam
		return nil, &core.FieldError{Field: "thinking", Kind: "value_error", Message: "Value error, thinking.budget_tokens must be >= 1024"}
	}
	return req, nil
}

const invalidRequest = "invalid_request_error"

// typedFailure returns the failure of a request of these routes. /v1/responses answers 400
// whatever failed: create_responses catches the HTTPException with the engine's status and
// answers with its text, "STATUS: MESSAGE".
func typedFailure(req *core.Request, err *core.APIError) *core.APIError {
	failure := &core.APIError{Status: err.Status, Type: err.Type, Message: err.Message}
	if req.Route == core.RouteResponses && !req.Stream && err.Status != http.StatusBadRequest {
		failure.Status, failure.Message = http.StatusBadRequest, fmt.Sprintf("%d: %s", err.Status, err.Message)
	}
	if req.Route == core.RouteResponses {
		failure.Type = invalidRequest
	}
	failure.Body = typedError(req.Route, failure)
	return failure
}

// typedError is the body of an error of these routes; nil for other routes. The messages of
// failures are hidden on /v1/messages.
func typedError(route string, err *core.APIError) any {
	switch route {
	case core.RouteResponses:
		param := any(nil)
		if err.Type == invalidRequest {
			param = core.OrNull(err.Param)
		}
		return core.Obj("error", core.Obj("message", err.Message, "type", err.Type, "param", param, "code", err.Status))
	case core.RouteMessages:
		text := err.Message
		if err.Status >= 500 {
			text = "Internal server error"
		}
		return messagesError(err.Status, text)
	}
	return nil
}

// messagesError is an error of Anthropic's form.
func messagesError(status int, text string) core.Object {
	kind := "api_error"
	switch status { // ERROR_TYPE_MAP
	case http.StatusBadRequest:
		kind = invalidRequest
	case http.StatusNotFound:
		kind = "not_found_error"
	case http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case http.StatusServiceUnavailable:
		kind = "overloaded_error"
	}
	return core.Obj("type", "error", "error", core.Obj("type", kind, "message", text))
}

// NoRoom is the refusal of a request by a full queue. The scheduler refuses it, after the stream
// has begun.
func (g *SGLang) NoRoom(req *core.Request) *core.APIError {
	full := &core.APIError{Status: http.StatusServiceUnavailable, Type: "ServiceUnavailable", Message: "The request queue is full."}
	switch {
	case !typed(req.Route):
		return full
	case req.Stream:
		req.Ext.(*SGLangRequest).refusal = full
		return nil
	}
	return typedFailure(req, full)
}
