package vllm

import (
	"fmt"
	"unicode/utf8"

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
	return core.StreamOptions{ErrorDone: true, Detokenizer: core.DecodeAfterPrompt}
}

func (d vllmDialect) Unary(req *core.Request, seqs []*core.Sequence) any {
	choices := make([]any, 0, len(seqs))
	ids := func(of []core.Token) any { return wantedIDs(req, of) }
	for _, s := range seqs {
		if req.Chat {
			content, reasoning, calls, finish := any(s.AnswerText()), any(nil), []any(nil), s.Finish
			if parses(s) {
				if content, reasoning, calls = parsedMessage(s); len(calls) > 0 && finish == "stop" {
					finish = "tool_calls"
				}
			}
			message := core.Obj("role", "assistant", "content", content, "refusal", nil, "annotations", nil, "audio", nil, "function_call", nil)
			if len(calls) > 0 {
				message = message.With("tool_calls", calls)
			}
			choices = append(choices, core.Obj(
				"index", s.Choice, "message", message.With("reasoning", reasoning),
				"logprobs", logprobs(s, s.Output), "finish_reason", finish, "stop_reason", s.StopReason, "token_ids", ids(s.Output), "routed_experts", nil,
			))
			continue
		}
		choices = append(choices, core.Obj(
			"index", s.Choice, "text", core.Echoed(s)+s.AnswerText(), "logprobs", logprobs(s, s.Output),
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
	return []any{d.chunk(req, []*core.Sequence{s}, choice).With("prompt_token_ids", wantedIDs(req, s.Prompt)).With("prompt_text", nil)}
}

func (d vllmDialect) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	var choice core.Object
	if req.Chat {
		delta, finish := core.Obj("content", p.Text), p.Finish
		if parses(s) {
			var called bool
			if delta, called = parsedDelta(s, p); called && finish == "stop" {
				finish = "tool_calls"
			}
			// An event without a delta is sent only for its ids, log probabilities or end.
			if delta == nil && finish == "" && wantedIDs(req, nil) == nil && logprobs(s, p.Tokens) == nil {
				return nil
			}
			delta = append(core.Obj(), delta...)
		}
		choice = core.Obj("index", s.Choice, "delta", delta, "logprobs", logprobs(s, p.Tokens), "finish_reason", core.OrNull(finish))
		if p.Finish != "" {
			choice = choice.With("stop_reason", s.StopReason)
		}
	} else {
		text, prompt := p.Text, any(nil)
		if len(s.Output) == len(p.Tokens) {
			if prompt = wantedIDs(req, s.Prompt); prompt == nil { // else the text of the prompt is omitted
				text = core.Echoed(s) + text
			}
		}
		choice = core.Obj("index", s.Choice, "text", text, "logprobs", logprobs(s, p.Tokens), "finish_reason", core.OrNull(p.Finish), "stop_reason", s.StopReason,
			"prompt_token_ids", prompt)
	}
	event := d.chunk(req, []*core.Sequence{s}, choice.With("token_ids", wantedIDs(req, p.Tokens)))
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

// wantedIDs returns token ids for a request with return_token_ids, else null. In a stream an
// event has those of its own tokens, and the first event those of the prompt: chat's beside the
// choices, a completion's in the choice (entrypoints/openai/chat_completion/serving.py,
// chat_completion_stream_generator_raw; completion/serving.py, completion_stream_generator).
func wantedIDs(req *core.Request, ids []core.Token) any {
	if wanted, _ := req.Fields.Boolean("return_token_ids", false); !wanted {
		return nil
	}
	return append([]core.Token{}, ids...)
}

// logprobs returns the log probabilities of the newest tokens of a sequence, null if the request
// wants none. The text offsets of a completion count from the first token of this request's
// output (entrypoints/openai/completion/serving.py, _create_completion_logprobs).
func logprobs(s *core.Sequence, tokens []core.Token) any {
	f := s.Req.Fields
	top, _ := f.Integer("logprobs", -1)
	if s.Req.Chat {
		if wanted, _ := f.Boolean("logprobs", false); !wanted {
			return nil
		}
		top, _ = f.Integer("top_logprobs", 0)
	}
	if top < 0 {
		return nil
	}
	texts := core.TokenTexts(s.Output)
	all := append(append([]core.Token{}, s.Prompt...), s.Output...)
	first := len(s.Output) - len(tokens)
	offset := 0
	for _, text := range texts[:first] {
		offset += utf8.RuneCountInString(text)
	}
	content, offsets, chosen, names, tops := []any{}, []int{}, []any{}, []string{}, []any{}
	for i, t := range tokens {
		at, text := len(s.Prompt)+first+i, texts[first+i]
		prob := core.Logprob(at, all[at-1], t)
		best, list := core.Obj(text, core.PyFloat(prob)), []any{}
		for n := range int(top) {
			if n == 0 {
				list = append(list, chatLogprob(text, prob))
				continue
			}
			other := core.TokenWord + core.Token((at+n)%len(core.WordTokens))
			less := core.Logprob(at, all[at-1], other)
			best, list = best.With(other.Text(), core.PyFloat(less)), append(list, chatLogprob(other.Text(), less))
		}
		content = append(content, chatLogprob(text, prob).With("top_logprobs", list))
		offsets, chosen, names, tops = append(offsets, offset), append(chosen, core.PyFloat(prob)), append(names, text), append(tops, best)
		offset += utf8.RuneCountInString(text)
	}
	if s.Req.Chat {
		return core.Obj("content", content)
	}
	return core.Obj("text_offset", offsets, "token_logprobs", chosen, "tokens", names, "top_logprobs", tops)
}

// chatLogprob is a token's entry in a chat answer.
func chatLogprob(text string, prob float64) core.Object {
	bytes := []int{}
	for _, b := range []byte(text) {
		bytes = append(bytes, int(b))
	}
	return core.Obj("token", text, "logprob", core.PyFloat(prob), "bytes", bytes)
}
