package vllm

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// parseMessages reads an Anthropic /v1/messages body.
func parseMessages(h http.Header, f core.Fields) (*core.Request, *core.FieldError) {
	req, err := core.ParseMessages(h, withoutBilling(f))
	if err == nil {
		err = checkBudget(req, f)
	}
	return req, err
}

// withoutBilling removes the texts that begin with Claude Code's billing header: blocks of the
// member system, and texts of system messages (entrypoints/anthropic/serving.py,
// _convert_system_message, _extract_system_text). A member system that is a string stays.
func withoutBilling(f core.Fields) core.Fields {
	var messages []json.RawMessage
	if json.Unmarshal(f["messages"], &messages) != nil {
		return f
	}
	f = maps.Clone(f)
	if blocks := keptBlocks(f["system"]); blocks != nil {
		f["system"], _ = json.Marshal(blocks)
		if len(blocks) == 0 {
			delete(f, "system")
		}
	}
	messages = slices.DeleteFunc(messages, func(raw json.RawMessage) bool {
		var m struct {
			Role    string
			Content json.RawMessage
		}
		return json.Unmarshal(raw, &m) == nil && m.Role == "system" && (isBilling(m.Content) || keptBlocks(m.Content) != nil && len(keptBlocks(m.Content)) == 0)
	})
	f["messages"], _ = json.Marshal(messages)
	return f
}

// keptBlocks returns the blocks of a content without billing headers, nil if there is none.
func keptBlocks(content json.RawMessage) []json.RawMessage {
	var blocks []json.RawMessage
	if json.Unmarshal(content, &blocks) != nil {
		return nil
	}
	kept := slices.DeleteFunc(slices.Clone(blocks), func(raw json.RawMessage) bool {
		var b struct{ Text json.RawMessage }
		return json.Unmarshal(raw, &b) == nil && isBilling(b.Text)
	})
	if len(kept) == len(blocks) {
		return nil
	}
	return kept
}

func isBilling(text json.RawMessage) bool {
	var s string
	return json.Unmarshal(text, &s) == nil && strings.HasPrefix(s, "x-anthropic-billing-header")
}

// checkBudget rejects a thinking budget that is not below max_tokens, as releases since 0.32 do
// (entrypoints/anthropic/protocol.py, validate_thinking_budget). A prefill leg with
// do_remote_decode is exempt.
func checkBudget(req *core.Request, f core.Fields) *core.FieldError {
	thinking, err := f.Object("thinking")
	if err != nil {
		return err
	}
	params, _ := f.Object("kv_transfer_params")
	exempt, _ := params.Boolean("do_remote_decode", false)
	kind, _ := thinking.Str("type", "")
	budget, err := thinking.Integer("budget_tokens", 0)
	if err == nil && kind == "enabled" && !exempt && budget >= int64(req.MaxTokens) {
		err = &core.FieldError{Field: "thinking", Kind: "value_error", Message: "Value error, thinking.budget_tokens must be less than max_tokens"}
	}
	return err
}

// parseTokens reads an /inference/v1/generate body: token ids and
// sampling_params.
func parseTokens(h http.Header, f core.Fields) (*core.Request, *core.FieldError) {
	sampling, err := f.Object("sampling_params")
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"token_ids", "sampling_params"} {
		if !f.Has(name) {
			return nil, &core.FieldError{Field: name, Kind: "missing", Message: "Field required"}
		}
	}
	ids, err := core.ParseTokenIDs(f, "token_ids")
	switch {
	case err != nil:
		return nil, err
	case len(ids) == 0:
		return nil, &core.FieldError{Field: "token_ids", Kind: "too_short", Message: "List should have at least 1 item after validation, not 0"}
	case slices.Min(ids) < 0:
		return nil, &core.FieldError{Field: "token_ids", Kind: "value_error", Message: "Value error, token_ids must not contain negative values"}
	}
	// The limits and stops come only from sampling_params.
	merged := maps.Clone(sampling)
	for _, name := range []string{"model", "stream", "stream_options", "cache_salt"} {
		delete(merged, name)
		if f.Has(name) {
			merged[name] = f[name]
		}
	}
	merged["prompt"], _ = json.Marshal(ids)
	req, err := core.ParseOpenAI(core.RouteTokens, h, merged)
	if err != nil {
		return nil, err
	}
	req.Fields = f
	req.Limited = sampling.Has("max_tokens")
	return req, nil
}

// The routes beyond the two common ones have special answers.

func (v *VLLM) Unary(req *core.Request, seqs []*core.Sequence) any {
	switch req.Route {
	case core.RouteResponses:
		return core.ResponseObject(req, seqs[0], true).With("kv_transfer_params", seqs[0].Ext).With("ec_transfer_params", nil).
			With("input_messages", nil).With("output_messages", nil)
	case core.RouteMessages:
		return messagesAnswer(req, seqs[0])
	case core.RouteTokens:
		choices := make([]any, 0, len(seqs))
		for _, s := range seqs {
			choices = append(choices, core.Obj("index", s.Choice, "token_ids", s.Output, "finish_reason", s.Finish, "logprobs", nil))
		}
		return core.Obj("request_id", core.BaseID(req), "created", req.Created, "model", core.ModelName(req, seqs), "choices", choices,
			"usage", usage(seqs), "prompt_logprobs", nil, "kv_transfer_params", seqs[req.N-1].Ext, "ec_transfer_params", nil)
	}
	return v.vllmDialect.Unary(req, seqs)
}

// Greeting returns the event that announces a response before its first part.
func (v *VLLM) Greeting(req *core.Request, seqs []*core.Sequence) []any {
	if req.Route == core.RouteResponses {
		return core.ResponseGreeting(req, seqs[0])
	}
	return nil
}

func (v *VLLM) Opening(req *core.Request, s *core.Sequence) []any {
	switch req.Route {
	case core.RouteResponses:
		return core.ResponseOpening(req, s)
	case core.RouteMessages:
		return messagesOpening(req, s)
	case core.RouteTokens:
		return nil
	}
	return v.vllmDialect.Opening(req, s)
}

func (v *VLLM) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	switch req.Route {
	case core.RouteResponses:
		return core.ResponseDelta(req, p)
	case core.RouteMessages:
		return core.MessagesDelta(req, p)
	case core.RouteTokens:
		return core.Obj("request_id", core.BaseID(req), "choices", []any{
			core.Obj("index", s.Choice, "token_ids", p.Tokens, "finish_reason", core.OrNull(p.Finish), "logprobs", nil),
		}, "usage", nil)
	}
	event := v.vllmDialect.Event(req, s, p)
	if o, ok := event.(core.Object); ok && v.minor() >= streamsParams {
		return o.With("kv_transfer_params", s.Ext)
	}
	return event
}

// streamsParams is the first 0.x whose events of completions and chats have kv_transfer_params: null
// before the finish reason. The role event and the usage have no such member
// (entrypoints/openai/chat_completion/serving.py, chat_completion_stream_generator_raw;
// completion/serving.py, completion_stream_generator). Earlier releases hold the blocks too.
const streamsParams = 33

func (v *VLLM) Closing(req *core.Request, seqs []*core.Sequence) []any {
	switch req.Route {
	case core.RouteResponses:
		return core.ResponseClosing(req, seqs[0])
	case core.RouteMessages:
		return messagesClosing(req, seqs[0])
	case core.RouteTokens:
		if !req.IncludeUsage {
			return nil
		}
		return []any{core.Obj("request_id", core.BaseID(req), "choices", []any{}, "usage", usage(seqs))}
	}
	return v.vllmDialect.Closing(req, seqs)
}

func (v *VLLM) StreamOptions(req *core.Request) core.StreamOptions {
	if req.Route == core.RouteResponses || req.Route == core.RouteMessages {
		return core.StreamOptions{NoDone: true, Detokenizer: core.DecodeAfterPrompt}
	}
	return v.vllmDialect.StreamOptions(req)
}

func (v *VLLM) ErrorEvents(req *core.Request, err *core.APIError) []any {
	switch req.Route {
	case core.RouteMessages:
		return []any{core.NamedEvent{Name: "error", Data: messagesError(err)}}
	case core.RouteResponses:
		return nil // the route has no error event: the stream breaks off
	}
	return v.vllmDialect.ErrorEvents(req, err)
}
