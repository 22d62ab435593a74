package sglang

import (
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// sglangDialect renders answers as SGLang does: OpenAI's shapes on its OpenAI
// routes, its own on /generate.
type sglangDialect struct{}

// ErrorBody is flat on the OpenAI routes, and only a message on /generate.
func (sglangDialect) ErrorBody(err *core.APIError) any {
	if err.Type == nativeError {
		return core.Obj("error", core.Obj("message", err.Message))
	}
	return sglangError(err, err.Type)
}

// sglangError is SGLang's ErrorResponse.
func sglangError(err *core.APIError, kind string) core.Object {
	return core.Obj("object", "error", "message", err.Message, "type", kind, "param", nil, "code", err.Status)
}

// ErrorEvents: an abort is the last chunk of a native stream, and an error
// event of an OpenAI stream. The error's type is the name of the status.
func (sglangDialect) ErrorEvents(req *core.Request, err *core.APIError) []any {
	if req.Route == RouteGenerate {
		abort := core.Obj("type", "abort", "message", err.Message, "status_code", err.Status, "err_type", nil)
		return []any{core.Obj("text", "", "output_ids", []core.Token{}, "meta_info", core.Obj("id", req.ID, "finish_reason", abort, "prompt_tokens", 0, "completion_tokens", 0, "cached_tokens", 0))}
	}
	name := strings.ToUpper(strings.ReplaceAll(http.StatusText(err.Status), " ", "_"))
	return []any{core.Obj("error", sglangError(err, name))}
}

// StreamOptions: the OpenAI routes wait for the first chunk before they send
// the head. An abort counts as a chunk.
func (sglangDialect) StreamOptions(req *core.Request) core.StreamOptions {
	return core.StreamOptions{HoldHead: req.Route != RouteGenerate, HeldErrors: true, ErrorDone: true, Detokenizer: core.DecodeDifference}
}

// sglangObject is the OpenAI object's name.
func sglangObject(req *core.Request) string {
	switch {
	case req.Chat && req.Stream:
		return "chat.completion.chunk"
	case req.Chat:
		return "chat.completion"
	}
	return "text_completion"
}

// sglangUsage is OpenAI's usage with --enable-cache-report: decode reports the
// cached tokens that prefill sent.
func sglangUsage(seqs []*core.Sequence) core.Object {
	prompt, output, cached := 0, 0, 0
	for _, s := range seqs {
		output += len(s.Output)
		if s.Sample == 0 {
			prompt += len(s.Prompt)
			cached += s.Cached
		}
	}
	return core.Obj("prompt_tokens", prompt, "total_tokens", prompt+output, "completion_tokens", output,
		"prompt_tokens_details", core.Obj("cached_tokens", cached), "reasoning_tokens", 0)
}

func (d sglangDialect) Unary(req *core.Request, seqs []*core.Sequence) any {
	if req.Route == RouteGenerate {
		list := make([]any, 0, len(seqs))
		for _, s := range seqs {
			list = append(list, nativeChunk(s))
		}
		if req.Ext.(*SGLangRequest).batch {
			return list
		}
		return list[0]
	}
	choices := make([]any, 0, len(seqs))
	for _, s := range seqs {
		choice := core.Obj("index", s.Choice)
		if req.Chat {
			choice = choice.With("message", core.Obj("role", "assistant", "content", s.AnswerText(), "reasoning_content", nil, "tool_calls", nil))
		} else {
			choice = choice.With("text", core.Echoed(s)+s.AnswerText())
		}
		choice = choice.With("logprobs", openAILogprobs(s, s.Output)).With("finish_reason", s.Finish).With("matched_stop", matchedStop(s))
		switch prompt, all := wantsIDs(req); {
		case req.Chat && prompt: // ChatCompletionResponseChoice in entrypoints/openai/protocol.py
			choice = choice.With("prompt_token_ids", s.Prompt)
			if all {
				choice = choice.With("response_token_ids", s.Output)
			}
		case all: // CompletionResponseChoice
			choice = choice.With("token_ids", s.Output).With("prompt_token_ids", s.Prompt)
		}
		choices = append(choices, choice)
	}
	return core.Obj("id", seqs[0].ID, "object", sglangObject(req), "created", req.Created, "model", core.ModelName(req, seqs),
		"choices", choices, "usage", sglangUsage(seqs), "metadata", core.Obj("weight_version", "default"))
}

// nativeChunk is a native answer, or a chunk of a native stream: texts are
// cumulative.
func nativeChunk(s *core.Sequence) core.Object {
	g := s.Rank.Engine.Proto.(*SGLang)
	text := s.AnswerText()
	if s.Finish == "" {
		text = core.ValidText(string(s.Text.Text[:s.Text.Sent]))
	}
	chunk := core.Obj("text", text, "output_ids", append([]core.Token{}, s.Output...), "meta_info", g.logprobs(core.Obj(
		"id", s.ID, "finish_reason", nativeFinish(s), "prompt_tokens", len(s.Prompt), "weight_version", "default",
		"completion_tokens", len(s.Output), "cached_tokens", s.Cached, "dp_rank", s.Rank.Index, "e2e_latency", 0.0,
	), s))
	if wanted, _ := s.Req.Fields.Boolean("return_prompt_token_ids", false); wanted { // managers/tokenizer_manager.py
		chunk = chunk.With("prompt_token_ids", s.Prompt)
	}
	return chunk
}

// nativeFinish is meta_info.finish_reason.
func nativeFinish(s *core.Sequence) any {
	switch s.Finish {
	case "":
		return nil
	case "length":
		return core.Obj("type", "length", "length", len(s.Output))
	case "abort":
		return core.Obj("type", "abort", "message", "Aborted", "status_code", nil, "err_type", nil)
	}
	return core.Obj("type", "stop", "matched", matchedStop(s))
}

// matchedStop is the stop string or token id that ended a sequence, null for
// another end.
func matchedStop(s *core.Sequence) any {
	if s.Finish == "stop" && s.StopReason == nil {
		return core.TokenEOS
	}
	return s.StopReason
}

// chunk returns an OpenAI stream event with choices.
func (sglangDialect) chunk(req *core.Request, s *core.Sequence, choices ...any) core.Object {
	if choices == nil {
		choices = []any{}
	}
	return core.Obj("id", s.ID, "object", sglangObject(req), "created", req.Created, "model", core.ModelName(req, []*core.Sequence{s}), "choices", choices)
}

// Opening is chat's role chunk.
func (d sglangDialect) Opening(req *core.Request, s *core.Sequence) []any {
	if !req.Chat {
		return nil
	}
	return []any{d.chunk(req, s, core.Obj("index", s.Choice, "delta", core.Obj("role", "assistant", "content", ""),
		"logprobs", nil, "finish_reason", nil, "matched_stop", nil))}
}

func (d sglangDialect) Event(req *core.Request, s *core.Sequence, p core.Piece) any {
	if req.Route == RouteGenerate {
		c := nativeChunk(s)
		if req.Ext.(*SGLangRequest).batch {
			c = c.With("index", s.Choice)
		}
		return c
	}
	choice := core.Obj("index", s.Choice)
	if req.Chat {
		choice = choice.With("delta", core.Obj("role", nil, "content", p.Text, "reasoning_content", nil, "tool_calls", nil))
	} else {
		text := p.Text
		if len(s.Output) == len(p.Tokens) {
			text = core.Echoed(s) + text
		}
		choice = choice.With("text", text)
	}
	choice = choice.With("logprobs", openAILogprobs(s, p.Tokens)).With("finish_reason", core.OrNull(p.Finish)).With("matched_stop", matchedStop(s))
	if _, all := wantsIDs(req); all { // serving_completions.py, _generate_completion_stream
		choice = choice.With("token_ids", append([]core.Token{}, p.Tokens...))
		if len(s.Output) == len(p.Tokens) {
			choice = choice.With("prompt_token_ids", s.Prompt)
		}
	}
	event := d.chunk(req, s, choice)
	var use any
	if req.ContinuousUsage {
		use = sglangUsage([]*core.Sequence{s})
	}
	return event.With("usage", use)
}

func (d sglangDialect) Closing(req *core.Request, seqs []*core.Sequence) []any {
	if req.Route == RouteGenerate {
		return nil
	}
	var events []any
	if ext := chatIDs(req, seqs); ext != nil {
		events = append(events, d.chunk(req, seqs[0]).With("usage", nil).With("sglext", ext))
	}
	if req.IncludeUsage {
		events = append(events, d.chunk(req, seqs[0]).With("usage", sglangUsage(seqs)))
	}
	return events
}

// wantsIDs reports which token ids a request wants in its answer: those of the prompt, and all.
func wantsIDs(req *core.Request) (prompt, all bool) {
	all, _ = req.Fields.Boolean("return_token_ids", false)
	prompt, _ = req.Fields.Boolean("return_prompt_token_ids", false)
	return prompt || all, all
}

// chatIDs are the token ids that a chat stream has after its last token, nil if none are wanted
// (serving_chat.py, _generate_chat_stream).
func chatIDs(req *core.Request, seqs []*core.Sequence) core.Object {
	var ext core.Object
	wants := func(field, header string) bool {
		wanted, _ := req.Fields.Boolean(field, false)
		return req.Chat && (wanted || req.Header.Get(header) == "1")
	}
	if wants("return_input_ids_in_sglext", "X-Sglext-Return-Input-Ids") {
		ext = ext.With("input_ids", seqs[0].Prompt)
	}
	if wants("return_output_ids_in_sglext", "X-Sglext-Return-Output-Ids") {
		lists := [][]core.Token{}
		for _, s := range seqs {
			lists = append(lists, append([]core.Token{}, s.Output...))
		}
		ext = ext.With("output_ids", lists)
	}
	return ext
}
