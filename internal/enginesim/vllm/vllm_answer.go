package vllm

import (
	"fmt"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// vllmDialect renders /v1/completions and /v1/chat/completions as vLLM 0.32
// does, member by member.
type vllmDialect struct{}

// vllmFingerprint is the system_fingerprint of the answers.
const vllmFingerprint = "vllm-0.32.0-sim"

func (vllmDialect) ErrorBody(err *core.APIError) any {
	return core.Obj("error", core.Obj("message", err.Message, "type", err.Type, "param", core.OrNull(err.Param), "code", err.Status))
}

// ErrorEvents: errors, unlike all other events, are printed with spaces.
func (d vllmDialect) ErrorEvents(_ *core.Request, err *core.APIError) []any {
	event := append(core.RawEvent(`data: {"error": {"message": `), core.AppendString(nil, err.Message)...)
	event = append(append(event, `, "type": `...), core.AppendString(nil, err.Type)...)
	return []any{core.RawEvent(fmt.Appendf(event, ", \"param\": null, \"code\": %d}}\n\n", err.Status))}
}

// StreamOptions: vLLM sends the 200 head before the first token, and "[DONE]"
// even after an error.
func (vllmDialect) StreamOptions(*core.Request) core.StreamOptions {
	return core.StreamOptions{ErrorDone: true}
}

func (d vllmDialect) Unary(req *core.Request, seqs []*core.Sequence) any {
	choices := make([]any, 0, len(seqs))
	wanted, _ := req.Fields.Boolean("return_token_ids", false)
	ids := func(of []core.Token) any {
		if !wanted {
			return nil
		}
		return of
	}
	for _, s := range seqs {
		if req.Chat {
			choices = append(choices, core.Obj(
				"index", s.Choice,
				"message", core.Obj("role", "assistant", "content", s.AnswerText(), "refusal", nil, "annotations", nil,
					"audio", nil, "function_call", nil, "reasoning", nil),
				"logprobs", nil, "finish_reason", s.Finish, "stop_reason", s.StopReason, "token_ids", ids(s.Output), "routed_experts", nil,
			))
			continue
		}
		choices = append(choices, core.Obj(
			"index", s.Choice, "text", core.Echoed(s)+s.AnswerText(), "logprobs", nil,
			"finish_reason", s.Finish, "stop_reason", s.StopReason, "token_ids", ids(s.Output),
			"prompt_logprobs", nil, "prompt_token_ids", ids(s.Prompt), "routed_experts", nil,
		))
	}
	u := core.SumUsage(seqs)
	answer := core.Obj("id", core.BaseID(req), "object", objectName(req, ""), "created", req.Created, "model", core.ModelName(req, seqs),
		"choices", choices, "service_tier", nil, "system_fingerprint", vllmFingerprint,
		"usage", u.Object(core.Obj("cached_tokens", u.Cached, "created_cache_tokens", u.CreatedFor(req), "multimodal_tokens", nil)).
			With("completion_tokens_details", nil))
	if req.Chat {
		answer = answer.With("prompt_logprobs", nil).With("prompt_token_ids", ids(seqs[0].Prompt)).With("prompt_text", nil)
	}
	// With several sequences the answer has the parameters of one: the last
	// sample of the first prompt.
	return answer.With("kv_transfer_params", seqs[req.N-1].Ext).With("ec_transfer_params", seqs[0].EcParams).With("metrics", nil)
}

// objectName returns the answer's "object"; suffix is that of chat's stream
// events.
func objectName(req *core.Request, suffix string) string {
	if req.Chat {
		return "chat.completion" + suffix
	}
	return "text_completion"
}

// usage returns the usage of an answer in its simplest form.
func usage(seqs []*core.Sequence) core.Object {
	u := core.SumUsage(seqs)
	return u.Object(core.Obj("cached_tokens", u.Cached))
}

// streamUsage returns the usage in stream events.
func streamUsage(req *core.Request, seqs []*core.Sequence) core.Object {
	if !req.Chat {
		return usage(seqs)
	}
	u := core.SumUsage(seqs)
	return u.Object(core.Obj("cached_tokens", u.Cached, "created_cache_tokens", u.Created))
}

// chunk returns a stream event with choices.
func (vllmDialect) chunk(req *core.Request, seqs []*core.Sequence, choices ...any) core.Object {
	if choices == nil {
		choices = []any{}
	}
	return core.Obj("id", core.BaseID(req), "object", objectName(req, ".chunk"), "created", req.Created, "model", core.ModelName(req, seqs), "choices", choices)
}

func (d vllmDialect) Opening(req *core.Request, s *core.Sequence) []any {
	if !req.Chat {
		return nil
	}
	choice := core.Obj("index", s.Choice, "delta", core.Obj("role", "assistant", "content", ""), "logprobs", nil, "finish_reason", nil)
	return []any{d.chunk(req, []*core.Sequence{s}, choice).With("prompt_token_ids", nil).With("prompt_text", nil)}
}

func (d vllmDialect) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	var choice core.Object
	if req.Chat {
		choice = core.Obj("index", s.Choice, "delta", core.Obj("content", p.Text), "logprobs", nil, "finish_reason", core.OrNull(p.Finish))
		if p.Finish != "" {
			choice = choice.With("stop_reason", s.StopReason)
		}
	} else {
		text := p.Text
		if len(s.Output) == len(p.Tokens) {
			text = core.Echoed(s) + text
		}
		choice = core.Obj("index", s.Choice, "text", text, "logprobs", nil, "finish_reason", core.OrNull(p.Finish), "stop_reason", s.StopReason,
			"prompt_token_ids", nil)
	}
	event := d.chunk(req, []*core.Sequence{s}, choice.With("token_ids", nil))
	if req.ContinuousUsage && req.IncludeUsage {
		event = event.With("usage", streamUsage(req, []*core.Sequence{s}))
	}
	if p.Finish != "" && !req.IncludeUsage {
		event = event.With("system_fingerprint", vllmFingerprint)
	}
	return event
}

func (d vllmDialect) Closing(req *core.Request, seqs []*core.Sequence) []any {
	if !req.IncludeUsage {
		return nil
	}
	return []any{d.chunk(req, seqs).With("usage", streamUsage(req, seqs)).With("system_fingerprint", vllmFingerprint)}
}
