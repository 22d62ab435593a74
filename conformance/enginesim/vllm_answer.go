package enginesim

// vllmDialect renders answers as vLLM's OpenAI server does.
type vllmDialect struct{}

func (vllmDialect) errorBody(err *apiError) any {
	return obj("error", obj("message", err.Message, "type", err.Type, "param", orNull(err.Param), "code", err.Status))
}

// orNull is s, or null when it is empty.
func orNull(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func (d vllmDialect) errorEvents(_ *request, err *apiError) []any { return []any{d.errorBody(err)} }

// streamOptions: vLLM sends the 200 head before the first token, and "[DONE]"
// even after an error.
func (vllmDialect) streamOptions(*request) streamOptions { return streamOptions{ErrorDone: true} }

func (d vllmDialect) unary(req *request, seqs []*sequence) any {
	choices := make([]any, 0, len(seqs))
	for _, s := range seqs {
		if req.Chat {
			choices = append(choices, obj(
				"index", s.choice,
				"message", obj("role", "assistant", "content", s.answerText(), "refusal", nil, "annotations", nil,
					"audio", nil, "function_call", nil, "tool_calls", []any{}, "reasoning", nil),
				"logprobs", nil, "finish_reason", s.finish, "stop_reason", s.stopReason, "token_ids", nil,
			))
			continue
		}
		choices = append(choices, obj(
			"index", s.choice, "text", echoed(s)+s.answerText(), "logprobs", nil,
			"finish_reason", s.finish, "stop_reason", s.stopReason, "token_ids", nil,
			"prompt_logprobs", nil, "prompt_token_ids", nil,
		))
	}
	object := "text_completion"
	if req.Chat {
		object = "chat.completion"
	}
	answer := obj("id", baseID(req), "object", object, "created", req.Created, "model", modelName(req, seqs),
		"choices", choices, "service_tier", nil, "system_fingerprint", nil, "usage", usage(seqs))
	if req.Chat {
		answer = answer.with("prompt_logprobs", nil).with("prompt_token_ids", nil)
	}
	// Of several sequences only the first one's parameters come back.
	return answer.with("kv_transfer_params", seqs[0].ext).with("ec_transfer_params", nil).with("metrics", nil)
}

// modelName is the served model's name, whether or not the request named it.
func modelName(req *request, seqs []*sequence) string {
	if req.Model != "" {
		return req.Model
	}
	return seqs[0].rank.e.cfg.Model
}

// echoed is the prompt's text when the request wants it back.
func echoed(s *sequence) string {
	if s.req.Chat || !s.req.Echo {
		return ""
	}
	return validText(detokenize(s.prompt))
}

// usage sums prompts once and outputs over all samples.
func usage(seqs []*sequence) object {
	prompt, output, cached := 0, 0, 0
	for _, s := range seqs {
		output += len(s.output)
		if s.sample == 0 {
			prompt += len(s.prompt)
			cached += s.cached
		}
	}
	return obj("prompt_tokens", prompt, "total_tokens", prompt+output, "completion_tokens", output,
		"prompt_tokens_details", obj("cached_tokens", cached))
}

// chunk is a stream event around choices.
func (vllmDialect) chunk(req *request, seqs []*sequence, choices ...any) object {
	object := "text_completion"
	if req.Chat {
		object = "chat.completion.chunk"
	}
	if choices == nil {
		choices = []any{}
	}
	return obj("id", baseID(req), "object", object, "created", req.Created, "model", modelName(req, seqs), "choices", choices)
}

func (d vllmDialect) opening(req *request, s *sequence) []any {
	if !req.Chat {
		return nil
	}
	choice := obj("index", s.choice, "delta", obj("role", "assistant", "content", ""), "logprobs", nil, "finish_reason", nil)
	return []any{d.chunk(req, []*sequence{s}, choice)}
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
		choice = obj("index", s.choice, "text", text, "logprobs", nil, "finish_reason", orNull(p.Finish), "stop_reason", s.stopReason)
	}
	event := d.chunk(req, []*sequence{s}, choice)
	switch {
	case req.ContinuousUsage && req.IncludeUsage:
		event = event.with("usage", usage([]*sequence{s}))
	case !req.Chat:
		event = event.with("usage", nil)
	}
	return event
}

func (d vllmDialect) closing(req *request, seqs []*sequence) []any {
	if !req.IncludeUsage {
		return nil
	}
	return []any{d.chunk(req, seqs).with("usage", usage(seqs))}
}
