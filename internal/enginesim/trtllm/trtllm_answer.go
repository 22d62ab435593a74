package trtllm

import (
	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// trtDialect renders answers as trtllm-serve does: unary answers and completion
// chunks with every field, chat chunks without null fields
// (serve/postprocess_handlers.py).
type trtDialect struct{}

// ErrorBody: an error of the request models has a special form.
func (trtDialect) ErrorBody(err *core.APIError) any {
	if err.Type == validationError {
		return core.Obj("error", err.Message)
	}
	return core.Obj("object", "error", "message", err.Message, "type", err.Type, "param", nil, "code", err.Status)
}

// ErrorEvents: a stream that fails ends with its connection.
func (trtDialect) ErrorEvents(*core.Request, *core.APIError) []any { return nil }

func (trtDialect) StreamOptions(*core.Request) core.StreamOptions { return core.StreamOptions{} }

// answerParams returns the disaggregated_params of an answer's choice. done: the first
// token ended the answer, so there is no KV to fetch.
func (t *TRTLLM) answerParams(s *core.Sequence, p *TRTParams, id int64, done bool) any {
	o := core.Obj("request_type", p.kind)
	first := s.Output
	if p.kind == TypeGeneration {
		first = p.first
	}
	o = o.With("first_gen_tokens", first)
	if t.cfg.Wire >= core.TRTLLMWireG2 {
		o = o.With("first_gen_log_probs", nil).With("first_gen_logits", nil)
	}
	var ctxID, disaggID, state any
	if !done {
		ctxID, state = id, t.state(s.Rank, id)
		if p.disaggID != nil {
			disaggID = id
		}
	}
	o = o.With("ctx_request_id", ctxID).With("encoded_opaque_state", state).With("draft_tokens", nil)
	if t.cfg.Wire >= core.TRTLLMWireG2 {
		o = o.With("disagg_request_id", disaggID).With("ctx_dp_rank", s.Rank.Index).With("ctx_info_endpoint", nil).
			With("schedule_style", p.style).With("ctx_usage", nil).With("return_prompt_token_ids_b64", p.base64IDs)
	}
	if t.cfg.Wire >= core.TRTLLMWireG3 {
		o = o.With("resolved_thinking", nil)
	}
	if !done && p.kind == typeContext {
		epoch, layout := FutureFields(id)
		o = o.With(futureEpoch, epoch).With(futureLayout, layout)
	}
	return o
}

// state returns the opaque state of a rank, for one request or (id 0) for all.
func (t *TRTLLM) state(r *core.Rank, id int64) string {
	return TRTState{Engine: t.e.UUID, Addr: r.Side.Listener.Addr().String(), Rank: r.Index, Request: id}.Encode()
}

// trtUsageOf returns the answer's usage. A generation reports its context's
// prompt and cached tokens if the request contains them.
func trtUsageOf(req *core.Request, seqs []*core.Sequence) core.Object {
	prompt, output, cached := 0, 0, 0
	for _, s := range seqs {
		output += len(s.Output)
		if s.Sample == 0 {
			prompt += len(s.Prompt)
			cached += s.Cached
		}
	}
	if q := req.Ext.(*TRTRequest); q.Is(TypeGeneration) && q.Params.usage != nil {
		prompt, cached = q.Params.usage.prompt, q.Params.usage.cached
	}
	return core.Obj("prompt_tokens", prompt, "total_tokens", prompt+output, "completion_tokens", output,
		"prompt_tokens_details", core.Obj("cached_tokens", cached))
}

// trtFinish returns a choice's finish reason. A context reports "not_finished"
// when the client's own limit was not reached.
func trtFinish(s *core.Sequence) string {
	q := s.Req.Ext.(*TRTRequest)
	if q.Is(typeContext) && s.Finish == "length" && q.wire == core.TRTLLMWireG1 && s.Req.MaxTokens != 1 {
		return "not_finished"
	}
	return s.Finish
}

// trtParamsOf returns the params of a choice, null for plain requests.
func trtParamsOf(s *core.Sequence) any {
	if s.Ext == nil {
		return nil
	}
	return s.Ext
}

func (trtDialect) Unary(req *core.Request, seqs []*core.Sequence) any {
	choices := make([]any, 0, len(seqs))
	for _, s := range seqs {
		if req.Chat {
			choices = append(choices, core.Obj(
				"index", s.Choice,
				"message", core.Obj("role", "assistant", "content", s.AnswerText(), "reasoning_content", "", "reasoning", nil, "tool_calls", []any{}),
				"logprobs", nil, "finish_reason", trtFinish(s), "stop_reason", s.StopReason, "mm_embedding_handle", nil,
				"disaggregated_params", trtParamsOf(s), "avg_decoded_tokens_per_iter", nil,
			))
			continue
		}
		choices = append(choices, core.Obj(
			"index", s.Choice, "text", textOr(req, core.Echoed(s)+s.AnswerText()), "token_ids", idsOr(req, s.Output), "logprobs", nil, "context_logits", nil,
			"finish_reason", trtFinish(s), "stop_reason", s.StopReason,
			"disaggregated_params", trtParamsOf(s), "avg_decoded_tokens_per_iter", nil,
		))
	}
	name, id := "text_completion", "cmpl-"
	if req.Chat {
		name, id = "chat.completion", "chatcmpl-"
	}
	answer := core.Obj("id", id+req.ID, "object", name, "created", req.Created, "model", req.Model, "choices", choices,
		"usage", trtUsageOf(req, seqs))
	return trtPromptIDs(req, answer)
}

// trtPromptIDs adds a context leg's prompt token ids, as a list or packed.
func trtPromptIDs(req *core.Request, answer core.Object) core.Object {
	q := req.Ext.(*TRTRequest)
	var ids, packed any
	switch {
	case !q.Is(typeContext):
	case req.Chat && q.Params.base64IDs:
		packed = PackIDs(req.Prompts[0])
	default:
		ids = req.Prompts[0]
	}
	answer = answer.With("prompt_token_ids", ids)
	if req.Chat && q.wire >= core.TRTLLMWireG2 {
		answer = answer.With("prompt_token_ids_b64", packed)
	}
	return answer
}

// chunk returns a stream event with choices.
func (trtDialect) chunk(req *core.Request, choices ...any) core.Object {
	name, id := "text_completion", "cmpl-"
	if req.Chat {
		name, id = "chat.completion.chunk", "chatcmpl-"
	}
	if choices == nil {
		choices = []any{}
	}
	return core.Obj("id", id+req.ID, "object", name, "created", req.Created, "model", req.Model, "choices", choices)
}

// Opening returns chat's role chunk. Upstream writes it with a blank before the
// line end.
func (d trtDialect) Opening(req *core.Request, s *core.Sequence) []any {
	if !req.Chat {
		return nil
	}
	event := d.chunk(req, core.Obj("index", s.Choice, "delta", core.Obj("role", "assistant")))
	if req.ContinuousUsage && req.IncludeUsage {
		event = event.With("usage", trtUsageOf(req, []*core.Sequence{s}))
	}
	body, err := core.EncodeJSON(event)
	if err != nil {
		return []any{event}
	}
	return []any{core.RawEvent("data: " + string(body) + " \n\n")}
}

func (d trtDialect) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	var choice core.Object
	if req.Chat {
		choice = core.Obj("index", s.Choice, "delta", core.Obj("content", p.Text, "reasoning_content", ""))
		if p.Finish != "" {
			choice = choice.With("finish_reason", p.Finish)
			if s.StopReason != nil {
				choice = choice.With("stop_reason", s.StopReason)
			}
		}
	} else {
		text := p.Text
		if len(s.Output) == len(p.Tokens) {
			text = core.Echoed(s) + text
		}
		choice = core.Obj("index", s.Choice, "text", textOr(req, text), "token_ids", idsOr(req, p.Tokens), "logprobs", nil, "finish_reason", core.OrNull(p.Finish),
			"stop_reason", s.StopReason, "avg_decoded_tokens_per_iter", nil)
	}
	event := d.chunk(req, choice)
	switch {
	case req.ContinuousUsage && req.IncludeUsage:
		event = event.With("usage", trtUsageOf(req, []*core.Sequence{s}))
	case !req.Chat:
		event = event.With("usage", nil)
	}
	return event
}

func (d trtDialect) Closing(req *core.Request, seqs []*core.Sequence) []any {
	if !req.IncludeUsage {
		return nil
	}
	return []any{d.chunk(req).With("usage", trtUsageOf(req, seqs))}
}

// detokenizes reports whether a request wants text. A completion has either text or token ids;
// a chat has no such member (serve/postprocess_handlers.py, completion_stream_post_processor).
func detokenizes(req *core.Request) bool {
	wanted, _ := req.Fields.Boolean("detokenize", true)
	return wanted
}

func textOr(req *core.Request, text string) string {
	if detokenizes(req) {
		return text
	}
	return ""
}

func idsOr(req *core.Request, ids []core.Token) any {
	if detokenizes(req) {
		return nil
	}
	return append([]core.Token{}, ids...)
}
