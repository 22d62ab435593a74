package enginesim

import "fmt"

// vllmDialect renders /v1/completions and /v1/chat/completions as vLLM 0.32
// does, member by member.
type vllmDialect struct{}

// vllmFingerprint is the system_fingerprint of the answers.
const vllmFingerprint = "vllm-0.32.0-sim"

func (vllmDialect) errorBody(err *apiError) any {
	return obj("error", obj("message", err.Message, "type", err.Type, "param", orNull(err.Param), "code", err.Status))
}

// errorEvents: errors, unlike all other events, are printed with spaces.
func (d vllmDialect) errorEvents(_ *request, err *apiError) []any {
	event := append(rawEvent(`data: {"error": {"message": `), appendString(nil, err.Message)...)
	event = append(append(event, `, "type": `...), appendString(nil, err.Type)...)
	return []any{rawEvent(fmt.Appendf(event, ", \"param\": null, \"code\": %d}}\n\n", err.Status))}
}

// streamOptions: vLLM sends the 200 head before the first token, and "[DONE]"
// even after an error.
func (vllmDialect) streamOptions(*request) streamOptions { return streamOptions{ErrorDone: true} }

func (d vllmDialect) unary(req *request, seqs []*sequence) any {
	choices := make([]any, 0, len(seqs))
	wanted, _ := req.Fields.boolean("return_token_ids", false)
	ids := func(of []token) any {
		if !wanted {
			return nil
		}
		return of
	}
	for _, s := range seqs {
		if req.Chat {
			choices = append(choices, obj(
				"index", s.choice,
				"message", obj("role", "assistant", "content", s.answerText(), "refusal", nil, "annotations", nil,
					"audio", nil, "function_call", nil, "reasoning", nil),
				"logprobs", nil, "finish_reason", s.finish, "stop_reason", s.stopReason, "token_ids", ids(s.output), "routed_experts", nil,
			))
			continue
		}
		choices = append(choices, obj(
			"index", s.choice, "text", echoed(s)+s.answerText(), "logprobs", nil,
			"finish_reason", s.finish, "stop_reason", s.stopReason, "token_ids", ids(s.output),
			"prompt_logprobs", nil, "prompt_token_ids", ids(s.prompt), "routed_experts", nil,
		))
	}
	u := sumUsage(seqs)
	answer := obj("id", baseID(req), "object", objectName(req, ""), "created", req.Created, "model", modelName(req, seqs),
		"choices", choices, "service_tier", nil, "system_fingerprint", vllmFingerprint,
		"usage", u.object(obj("cached_tokens", u.cached, "created_cache_tokens", u.createdFor(req), "multimodal_tokens", nil)).
			with("completion_tokens_details", nil))
	if req.Chat {
		answer = answer.with("prompt_logprobs", nil).with("prompt_token_ids", ids(seqs[0].prompt)).with("prompt_text", nil)
	}
	// With several sequences the answer has the parameters of one: the last
	// sample of the first prompt.
	return answer.with("kv_transfer_params", seqs[req.N-1].ext).with("ec_transfer_params", seqs[0].ecParams).with("metrics", nil)
}

// objectName returns the answer's "object"; suffix is that of chat's stream
// events.
func objectName(req *request, suffix string) string {
	if req.Chat {
		return "chat.completion" + suffix
	}
	return "text_completion"
}

// usage returns the usage of an answer in its simplest form.
func usage(seqs []*sequence) object {
	u := sumUsage(seqs)
	return u.object(obj("cached_tokens", u.cached))
}

// streamUsage returns the usage in stream events.
func streamUsage(req *request, seqs []*sequence) object {
	if !req.Chat {
		return usage(seqs)
	}
	u := sumUsage(seqs)
	return u.object(obj("cached_tokens", u.cached, "created_cache_tokens", u.created))
}

// chunk returns a stream event with choices.
func (vllmDialect) chunk(req *request, seqs []*sequence, choices ...any) object {
	if choices == nil {
		choices = []any{}
	}
	return obj("id", baseID(req), "object", objectName(req, ".chunk"), "created", req.Created, "model", modelName(req, seqs), "choices", choices)
}

func (d vllmDialect) opening(req *request, s *sequence) []any {
	if !req.Chat {
		return nil
	}
	choice := obj("index", s.choice, "delta", obj("role", "assistant", "content", ""), "logprobs", nil, "finish_reason", nil)
	return []any{d.chunk(req, []*sequence{s}, choice).with("prompt_token_ids", nil).with("prompt_text", nil)}
}

func (d vllmDialect) event(req *request, s *sequence, p piece) any {
	var choice object
	if req.Chat {
		choice = obj("index", s.choice, "delta", obj("content", p.Text), "logprobs", nil, "finish_reason", orNull(p.Finish))
		if p.Finish != "" {
			choice = choice.with("stop_reason", s.stopReason)
		}
	} else {
		text := p.Text
		if len(s.output) == len(p.Tokens) {
			text = echoed(s) + text
		}
		choice = obj("index", s.choice, "text", text, "logprobs", nil, "finish_reason", orNull(p.Finish), "stop_reason", s.stopReason,
			"prompt_token_ids", nil)
	}
	event := d.chunk(req, []*sequence{s}, choice.with("token_ids", nil))
	if req.ContinuousUsage && req.IncludeUsage {
		event = event.with("usage", streamUsage(req, []*sequence{s}))
	}
	if p.Finish != "" && !req.IncludeUsage {
		event = event.with("system_fingerprint", vllmFingerprint)
	}
	return event
}

func (d vllmDialect) closing(req *request, seqs []*sequence) []any {
	if !req.IncludeUsage {
		return nil
	}
	return []any{d.chunk(req, seqs).with("usage", streamUsage(req, seqs)).with("system_fingerprint", vllmFingerprint)}
}
