package enginesim

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
)

// messagesFields are the members of an Anthropic request that affect the
// generation; all others are ignored.
var messagesFields = []string{"model", "messages", "max_tokens", "stream", "temperature", "top_p", "top_k"}

// parseMessages reads an Anthropic /v1/messages body.
func parseMessages(h http.Header, f fields) (*request, *fieldError) {
	for _, name := range []string{"model", "messages", "max_tokens"} {
		if !f.has(name) {
			return nil, &fieldError{name, "missing", "Field required"}
		}
	}
	req, err := parseRewritten(routeMessages, h, f, func(chat fields) *fieldError {
		maps.DeleteFunc(chat, func(name string, _ json.RawMessage) bool { return !slices.Contains(messagesFields, name) })
		if f.has("system") {
			var messages []json.RawMessage
			if json.Unmarshal(f["messages"], &messages) != nil {
				return &fieldError{"messages", "list_type", "Input should be a valid list"}
			}
			messages = append([]json.RawMessage{encodeMessage("system", f["system"])}, messages...)
			chat["messages"], _ = json.Marshal(messages)
		}
		chat["stop"] = f["stop_sequences"]
		return nil
	})
	if err == nil && req.MaxTokens <= 0 {
		return nil, &fieldError{"max_tokens", "value_error", "Value error, max_tokens must be positive"}
	}
	if err == nil {
		err = checkBudget(req, f)
	}
	if err == nil {
		req.call = parseCall(f, f["messages"])
	}
	return req, err
}

// checkBudget rejects a thinking budget that is not below max_tokens, as releases since 0.32 do
// (entrypoints/anthropic/protocol.py, validate_thinking_budget). A prefill leg with
// do_remote_decode is exempt.
func checkBudget(req *request, f fields) *fieldError {
	thinking, err := f.object("thinking")
	if err != nil {
		return err
	}
	params, _ := f.object("kv_transfer_params")
	exempt, _ := params.boolean("do_remote_decode", false)
	kind, _ := thinking.str("type", "")
	budget, err := thinking.integer("budget_tokens", 0)
	if err == nil && kind == "enabled" && !exempt && budget >= int64(req.MaxTokens) {
		err = &fieldError{"thinking", "value_error", "Value error, thinking.budget_tokens must be less than max_tokens"}
	}
	return err
}

// parseTokens reads an /inference/v1/generate body: token ids and
// sampling_params.
func parseTokens(h http.Header, f fields) (*request, *fieldError) {
	sampling, err := f.object("sampling_params")
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"token_ids", "sampling_params"} {
		if !f.has(name) {
			return nil, &fieldError{name, "missing", "Field required"}
		}
	}
	ids, err := parseTokenIDs(f, "token_ids")
	switch {
	case err != nil:
		return nil, err
	case len(ids) == 0:
		return nil, &fieldError{"token_ids", "too_short", "List should have at least 1 item after validation, not 0"}
	case slices.Min(ids) < 0:
		return nil, &fieldError{"token_ids", "value_error", "Value error, token_ids must not contain negative values"}
	}
	// The limits and stops come only from sampling_params.
	merged := maps.Clone(sampling)
	for _, name := range []string{"model", "stream", "stream_options", "cache_salt"} {
		delete(merged, name)
		if f.has(name) {
			merged[name] = f[name]
		}
	}
	merged["prompt"], _ = json.Marshal(ids)
	req, err := parseOpenAI(routeTokens, h, merged)
	if err != nil {
		return nil, err
	}
	req.Fields = f
	req.Limited = sampling.has("max_tokens")
	return req, nil
}

// The routes beyond the two common ones have special answers.

func (v *vllm) unary(req *request, seqs []*sequence) any {
	switch req.Route {
	case routeResponses:
		return responseObject(req, seqs[0], true).with("kv_transfer_params", seqs[0].ext).with("ec_transfer_params", nil).
			with("input_messages", nil).with("output_messages", nil)
	case routeMessages:
		return messagesAnswer(req, seqs[0])
	case routeTokens:
		choices := make([]any, 0, len(seqs))
		for _, s := range seqs {
			choices = append(choices, obj("index", s.choice, "token_ids", s.output, "finish_reason", s.finish, "logprobs", nil))
		}
		return obj("request_id", baseID(req), "created", req.Created, "model", modelName(req, seqs), "choices", choices,
			"usage", usage(seqs), "prompt_logprobs", nil, "kv_transfer_params", seqs[req.N-1].ext, "ec_transfer_params", nil)
	}
	return v.vllmDialect.unary(req, seqs)
}

// greeting returns the event that announces a response before its first part.
func (v *vllm) greeting(req *request, seqs []*sequence) []any {
	if req.Route == routeResponses {
		return responseGreeting(req, seqs[0])
	}
	return nil
}

func (v *vllm) opening(req *request, s *sequence) []any {
	switch req.Route {
	case routeResponses:
		return responseOpening(req, s)
	case routeMessages:
		return messagesOpening(req, s)
	case routeTokens:
		return nil
	}
	return v.vllmDialect.opening(req, s)
}

func (v *vllm) event(req *request, s *sequence, p piece) any {
	switch req.Route {
	case routeResponses:
		return responseDelta(req, p)
	case routeMessages:
		return messagesDelta(req, p)
	case routeTokens:
		return obj("request_id", baseID(req), "choices", []any{
			obj("index", s.choice, "token_ids", p.Tokens, "finish_reason", orNull(p.Finish), "logprobs", nil),
		}, "usage", nil)
	}
	return v.vllmDialect.event(req, s, p)
}

func (v *vllm) closing(req *request, seqs []*sequence) []any {
	switch req.Route {
	case routeResponses:
		return responseClosing(req, seqs[0])
	case routeMessages:
		return messagesClosing(req, seqs[0])
	case routeTokens:
		if !req.IncludeUsage {
			return nil
		}
		return []any{obj("request_id", baseID(req), "choices", []any{}, "usage", usage(seqs))}
	}
	events := v.vllmDialect.closing(req, seqs)
	if ext := seqs[0].ext; v.e.cfg.Nixl.StreamParams && ext != nil {
		events = append(events, v.chunk(req, seqs).with("kv_transfer_params", ext))
	}
	return events
}

func (v *vllm) streamOptions(req *request) streamOptions {
	if req.Route == routeResponses || req.Route == routeMessages {
		return streamOptions{NoDone: true}
	}
	return v.vllmDialect.streamOptions(req)
}

func (v *vllm) errorEvents(req *request, err *apiError) []any {
	switch req.Route {
	case routeMessages:
		return []any{namedEvent{"error", messagesError(err)}}
	case routeResponses:
		return nil // the route has no error event: the stream breaks off
	}
	return v.vllmDialect.errorEvents(req, err)
}
