package enginesim

// trtDialect renders answers as trtllm-serve does: unary answers and completion
// chunks with every field, chat chunks without null fields
// (serve/postprocess_handlers.py).
type trtDialect struct{}

// errorBody: an error of the request models has a special form.
func (trtDialect) errorBody(err *apiError) any {
	if err.Type == validationError {
		return obj("error", err.Message)
	}
	return obj("object", "error", "message", err.Message, "type", err.Type, "param", nil, "code", err.Status)
}

// errorEvents: a stream that fails ends with its connection.
func (trtDialect) errorEvents(*request, *apiError) []any { return nil }

func (trtDialect) streamOptions(*request) streamOptions { return streamOptions{} }

// answerParams returns the disaggregated_params of an answer's choice. done: the first
// token ended the answer, so there is no KV to fetch.
func (t *trtllm) answerParams(s *sequence, p *trtParams, id int64, done bool) any {
	o := obj("request_type", p.kind)
	first := s.output
	if p.kind == typeGeneration {
		first = p.first
	}
	o = o.with("first_gen_tokens", first)
	if t.cfg.Wire >= TRTLLMWireG2 {
		o = o.with("first_gen_log_probs", nil).with("first_gen_logits", nil)
	}
	var ctxID, disaggID, state any
	if !done {
		ctxID, state = id, t.state(s.rank, id)
		if p.disaggID != nil {
			disaggID = id
		}
	}
	o = o.with("ctx_request_id", ctxID).with("encoded_opaque_state", state).with("draft_tokens", nil)
	if t.cfg.Wire >= TRTLLMWireG2 {
		o = o.with("disagg_request_id", disaggID).with("ctx_dp_rank", s.rank.index).with("ctx_info_endpoint", nil).
			with("schedule_style", p.style).with("ctx_usage", nil).with("return_prompt_token_ids_b64", p.base64IDs)
	}
	if t.cfg.Wire >= TRTLLMWireG3 {
		o = o.with("resolved_thinking", nil)
	}
	if !done && p.kind == typeContext {
		epoch, layout := futureFields(id)
		o = o.with(futureEpoch, epoch).with(futureLayout, layout)
	}
	return o
}

// state returns the opaque state of a rank, for one request or (id 0) for all.
func (t *trtllm) state(r *rank, id int64) string {
	return trtState{Engine: t.e.id, Addr: r.side.listener.Addr().String(), Rank: r.index, Request: id}.encode()
}

// trtUsageOf returns the answer's usage. A generation reports its context's
// prompt and cached tokens if the request contains them.
func trtUsageOf(req *request, seqs []*sequence) object {
	prompt, output, cached := 0, 0, 0
	for _, s := range seqs {
		output += len(s.output)
		if s.sample == 0 {
			prompt += len(s.prompt)
			cached += s.cached
		}
	}
	if q := req.Ext.(*trtRequest); q.is(typeGeneration) && q.params.usage != nil {
		prompt, cached = q.params.usage.prompt, q.params.usage.cached
	}
	return obj("prompt_tokens", prompt, "total_tokens", prompt+output, "completion_tokens", output,
		"prompt_tokens_details", obj("cached_tokens", cached))
}

// trtFinish returns a choice's finish reason. A context reports "not_finished"
// when the client's own limit was not reached.
func trtFinish(s *sequence) string {
	q := s.req.Ext.(*trtRequest)
	if q.is(typeContext) && s.finish == "length" && q.wire == TRTLLMWireG1 && s.req.MaxTokens != 1 {
		return "not_finished"
	}
	return s.finish
}

// trtParamsOf returns the params of a choice, null for plain requests.
func trtParamsOf(s *sequence) any {
	if s.ext == nil {
		return nil
	}
	return s.ext
}

func (trtDialect) unary(req *request, seqs []*sequence) any {
	choices := make([]any, 0, len(seqs))
	for _, s := range seqs {
		if req.Chat {
			choices = append(choices, obj(
				"index", s.choice,
				"message", obj("role", "assistant", "content", s.answerText(), "reasoning_content", "", "reasoning", nil, "tool_calls", []any{}),
				"logprobs", nil, "finish_reason", trtFinish(s), "stop_reason", s.stopReason, "mm_embedding_handle", nil,
				"disaggregated_params", trtParamsOf(s), "avg_decoded_tokens_per_iter", nil,
			))
			continue
		}
		choices = append(choices, obj(
			"index", s.choice, "text", echoed(s)+s.answerText(), "token_ids", nil, "logprobs", nil, "context_logits", nil,
			"finish_reason", trtFinish(s), "stop_reason", s.stopReason,
			"disaggregated_params", trtParamsOf(s), "avg_decoded_tokens_per_iter", nil,
		))
	}
	name, id := "text_completion", "cmpl-"
	if req.Chat {
		name, id = "chat.completion", "chatcmpl-"
	}
	answer := obj("id", id+req.ID, "object", name, "created", req.Created, "model", req.Model, "choices", choices,
		"usage", trtUsageOf(req, seqs))
	return trtPromptIDs(req, answer)
}

// trtPromptIDs adds a context leg's prompt token ids, as a list or packed.
func trtPromptIDs(req *request, answer object) object {
	q := req.Ext.(*trtRequest)
	var ids, packed any
	switch {
	case !q.is(typeContext):
	case req.Chat && q.params.base64IDs:
		packed = packIDs(req.Prompts[0])
	default:
		ids = req.Prompts[0]
	}
	answer = answer.with("prompt_token_ids", ids)
	if req.Chat && q.wire >= TRTLLMWireG2 {
		answer = answer.with("prompt_token_ids_b64", packed)
	}
	return answer
}

// chunk returns a stream event with choices.
func (trtDialect) chunk(req *request, choices ...any) object {
	name, id := "text_completion", "cmpl-"
	if req.Chat {
		name, id = "chat.completion.chunk", "chatcmpl-"
	}
	if choices == nil {
		choices = []any{}
	}
	return obj("id", id+req.ID, "object", name, "created", req.Created, "model", req.Model, "choices", choices)
}

// opening returns chat's role chunk. Upstream writes it with a blank before the
// line end.
func (d trtDialect) opening(req *request, s *sequence) []any {
	if !req.Chat {
		return nil
	}
	event := d.chunk(req, obj("index", s.choice, "delta", obj("role", "assistant")))
	if req.ContinuousUsage && req.IncludeUsage {
		event = event.with("usage", trtUsageOf(req, []*sequence{s}))
	}
	body, err := encodeJSON(event)
	if err != nil {
		return []any{event}
	}
	return []any{rawEvent("data: " + string(body) + " \n\n")}
}

func (d trtDialect) event(req *request, s *sequence, p piece) any {
	var choice object
	if req.Chat {
		choice = obj("index", s.choice, "delta", obj("content", p.Text, "reasoning_content", ""))
		if p.Finish != "" {
			choice = choice.with("finish_reason", p.Finish)
			if s.stopReason != nil {
				choice = choice.with("stop_reason", s.stopReason)
			}
		}
	} else {
		text := p.Text
		if len(s.output) == len(p.Tokens) {
			text = echoed(s) + text
		}
		choice = obj("index", s.choice, "text", text, "token_ids", nil, "logprobs", nil, "finish_reason", orNull(p.Finish),
			"stop_reason", s.stopReason, "avg_decoded_tokens_per_iter", nil)
	}
	event := d.chunk(req, choice)
	switch {
	case req.ContinuousUsage && req.IncludeUsage:
		event = event.with("usage", trtUsageOf(req, []*sequence{s}))
	case !req.Chat:
		event = event.with("usage", nil)
	}
	return event
}

func (d trtDialect) closing(req *request, seqs []*sequence) []any {
	if !req.IncludeUsage {
		return nil
	}
	return []any{d.chunk(req).with("usage", trtUsageOf(req, seqs))}
}
