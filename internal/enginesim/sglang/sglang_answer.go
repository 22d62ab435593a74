package enginesim

import (
	"net/http"
	"strings"
)

// sglangDialect renders answers as SGLang does: OpenAI's shapes on its OpenAI
// routes, its own on /generate.
type sglangDialect struct{}

// errorBody is flat on the OpenAI routes, and only a message on /generate.
func (sglangDialect) errorBody(err *apiError) any {
	if err.Type == nativeError {
		return obj("error", obj("message", err.Message))
	}
	return sglangError(err, err.Type)
}

// sglangError is SGLang's ErrorResponse.
func sglangError(err *apiError, kind string) object {
	return obj("object", "error", "message", err.Message, "type", kind, "param", nil, "code", err.Status)
}

// errorEvents: an abort is the last chunk of a native stream, and an error
// event of an OpenAI stream. The error's type is the name of the status.
func (sglangDialect) errorEvents(req *request, err *apiError) []any {
	if req.Route == routeGenerate {
		abort := obj("type", "abort", "message", err.Message, "status_code", err.Status, "err_type", nil)
		return []any{obj("text", "", "output_ids", []token{}, "meta_info", obj("id", req.ID, "finish_reason", abort, "prompt_tokens", 0, "completion_tokens", 0, "cached_tokens", 0))}
	}
	name := strings.ToUpper(strings.ReplaceAll(http.StatusText(err.Status), " ", "_"))
	return []any{obj("error", sglangError(err, name))}
}

// streamOptions: the OpenAI routes wait for the first chunk before they send
// the head. An abort counts as a chunk.
func (sglangDialect) streamOptions(req *request) streamOptions {
	return streamOptions{HoldHead: req.Route != routeGenerate, HeldErrors: true, ErrorDone: true}
}

// sglangObject is the OpenAI object's name.
func sglangObject(req *request) string {
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
func sglangUsage(seqs []*sequence) object {
	prompt, output, cached := 0, 0, 0
	for _, s := range seqs {
		output += len(s.output)
		if s.sample == 0 {
			prompt += len(s.prompt)
			cached += s.cached
		}
	}
	return obj("prompt_tokens", prompt, "total_tokens", prompt+output, "completion_tokens", output,
		"prompt_tokens_details", obj("cached_tokens", cached), "reasoning_tokens", 0)
}

func (d sglangDialect) unary(req *request, seqs []*sequence) any {
	if req.Route == routeGenerate {
		list := make([]any, 0, len(seqs))
		for _, s := range seqs {
			list = append(list, nativeChunk(s))
		}
		if req.Ext.(*sglangRequest).batch {
			return list
		}
		return list[0]
	}
	choices := make([]any, 0, len(seqs))
	for _, s := range seqs {
		choice := obj("index", s.choice)
		if req.Chat {
			choice = choice.with("message", obj("role", "assistant", "content", s.answerText(), "reasoning_content", nil, "tool_calls", nil))
		} else {
			choice = choice.with("text", echoed(s)+s.answerText())
		}
		choices = append(choices, choice.with("logprobs", nil).with("finish_reason", s.finish).with("matched_stop", matchedStop(s)))
	}
	return obj("id", seqs[0].id, "object", sglangObject(req), "created", req.Created, "model", modelName(req, seqs),
		"choices", choices, "usage", sglangUsage(seqs), "metadata", obj("weight_version", "default"))
}

// nativeChunk is a native answer, or a chunk of a native stream: texts are
// cumulative.
func nativeChunk(s *sequence) object {
	g := s.rank.e.proto.(*sglang)
	text := s.answerText()
	if s.finish == "" {
		text = validText(string(s.text.text[:s.text.sent]))
	}
	return obj("text", text, "output_ids", append([]token{}, s.output...), "meta_info", g.logprobs(obj(
		"id", s.id, "finish_reason", nativeFinish(s), "prompt_tokens", len(s.prompt), "weight_version", "default",
		"completion_tokens", len(s.output), "cached_tokens", s.cached, "dp_rank", s.rank.index, "e2e_latency", 0.0,
	), s))
}

// nativeFinish is meta_info.finish_reason.
func nativeFinish(s *sequence) any {
	switch s.finish {
	case "":
		return nil
	case "length":
		return obj("type", "length", "length", len(s.output))
	case "abort":
		return obj("type", "abort", "message", "Aborted", "status_code", nil, "err_type", nil)
	}
	return obj("type", "stop", "matched", matchedStop(s))
}

// matchedStop is the stop string or token id that ended a sequence, null for
// another end.
func matchedStop(s *sequence) any {
	if s.finish == "stop" && s.stopReason == nil {
		return tokenEOS
	}
	return s.stopReason
}

// chunk returns an OpenAI stream event with choices.
func (sglangDialect) chunk(req *request, s *sequence, choices ...any) object {
	if choices == nil {
		choices = []any{}
	}
	return obj("id", s.id, "object", sglangObject(req), "created", req.Created, "model", modelName(req, []*sequence{s}), "choices", choices)
}

// opening is chat's role chunk.
func (d sglangDialect) opening(req *request, s *sequence) []any {
	if !req.Chat {
		return nil
	}
	return []any{d.chunk(req, s, obj("index", s.choice, "delta", obj("role", "assistant", "content", ""),
		"logprobs", nil, "finish_reason", nil, "matched_stop", nil))}
}

func (d sglangDialect) event(req *request, s *sequence, p piece) any {
	if req.Route == routeGenerate {
		c := nativeChunk(s)
		if req.Ext.(*sglangRequest).batch {
			c = c.with("index", s.choice)
		}
		return c
	}
	choice := obj("index", s.choice)
	if req.Chat {
		choice = choice.with("delta", obj("role", nil, "content", p.Text, "reasoning_content", nil, "tool_calls", nil))
	} else {
		text := p.Text
		if len(s.output) == len(p.Tokens) {
			text = echoed(s) + text
		}
		choice = choice.with("text", text)
	}
	choice = choice.with("logprobs", nil).with("finish_reason", orNull(p.Finish)).with("matched_stop", matchedStop(s))
	event := d.chunk(req, s, choice)
	var use any
	if req.ContinuousUsage {
		use = sglangUsage([]*sequence{s})
	}
	return event.with("usage", use)
}

func (d sglangDialect) closing(req *request, seqs []*sequence) []any {
	if req.Route == routeGenerate || !req.IncludeUsage {
		return nil
	}
	return []any{d.chunk(req, seqs[0]).with("usage", sglangUsage(seqs))}
}
