package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// done handles an answer whose first token ended the text. The client gets the answer
// without the params. If the client requested a stream, done composes a stream from the
// answer. TensorRT-LLM's own orchestrator sends such a client an empty stream without the
// token.
func (trtllm) done(a *Attempt, answer *openai.Object) (Handoff, error) {
	choices, _ := answer.Get("choices")
	list, err := openai.Elements(choices)
	if err != nil {
		return Handoff{}, badReply("no choices")
	}
	var each []openai.Object
	for raw := range list {
		var choice openai.Object
		if choice.Parse(raw) != nil {
			return Handoff{}, badReply("a choice is no object")
		}
		each = append(each, choice)
	}
	h := Handoff{Done: true}
	if !a.Request.Stream {
		h.Answer = unaryAnswer(answer, each)
		return h, nil
	}
	for i := range each {
		h.Answer = appendChoiceEvents(h.Answer, a.Request.API, answer, &each[i])
	}
	if a.Request.IncludeUsage {
		h.Answer = appendEventHead(h.Answer, a.Request.API, answer)
		h.Answer = append(h.Answer, `[],"usage":`...)
		h.Answer = appendMember(h.Answer, answer, "usage")
		h.Answer = append(h.Answer, "}\n\n"...)
	}
	h.Answer = openai.AppendDone(h.Answer)
	return h, nil
}

// Public clears the params that a generation worker repeats in each choice of a unary
// answer, so that the answer is like that of one engine.
func (trtllm) Public(a *Attempt, answer []byte) []byte {
	if a.Trust || a.Prefill.IsZero() || !bytes.Contains(answer, []byte(`"disaggregated_params"`)) {
		return answer
	}
	var whole openai.Object
	if whole.Parse(answer) != nil {
		return answer
	}
	choices, _ := whole.Get("choices")
	list, err := openai.Elements(choices)
	if err != nil {
		return answer
	}
	empty := openai.Edit{Key: "disaggregated_params", Value: literal("null")}
	changed := []byte{'['}
	for raw := range list {
		var choice openai.Object
		if choice.Parse(raw) != nil {
			return answer
		}
		if len(changed) > 1 {
			changed = append(changed, ',')
		}
		if _, has := choice.Get(empty.Key); has {
			changed = choice.Append(changed, empty)
		} else {
			changed = append(changed, raw...)
		}
	}
	return whole.Append(nil, openai.Edit{Key: "choices", Value: append(changed, ']')})
}

// unaryAnswer returns the answer without the params of its choices.
func unaryAnswer(answer *openai.Object, choices []openai.Object) []byte {
	list := []byte{'['}
	for i := range choices {
		if i > 0 {
			list = append(list, ',')
		}
		list = choices[i].Append(list, cut("disaggregated_params"))
	}
	return answer.Append(nil, openai.Edit{Key: "choices", Value: append(list, ']')})
}

// appendChoiceEvents appends the events that a worker would have streamed of a choice:
// its text, then for chat a separate final event.
func appendChoiceEvents(dst []byte, api openai.API, answer, choice *openai.Object) []byte {
	dst = appendEventHead(dst, api, answer)
	dst = append(dst, `[{"index":`...)
	dst = appendMember(dst, choice, "index")
	if api == openai.Chat {
		dst = append(dst, `,"delta":`...)
		dst = appendMember(dst, choice, "message")
		dst = append(dst, `,"logprobs":`...)
		dst = appendMember(dst, choice, "logprobs")
		dst = append(dst, ",\"finish_reason\":null}]}\n\n"...)
		dst = appendEventHead(dst, api, answer)
		dst = append(dst, `[{"index":`...)
		dst = appendMember(dst, choice, "index")
		dst = append(dst, `,"delta":{}`...)
	} else {
		dst = append(dst, `,"text":`...)
		dst = appendMember(dst, choice, "text")
		dst = append(dst, `,"logprobs":`...)
		dst = appendMember(dst, choice, "logprobs")
	}
	dst = append(dst, `,"finish_reason":`...)
	dst = appendMember(dst, choice, "finish_reason")
	dst = append(dst, `,"stop_reason":`...)
	dst = appendMember(dst, choice, "stop_reason")
	return append(dst, "}]}\n\n"...)
}

// appendEventHead appends an event of the stream up to the value of choices.
func appendEventHead(dst []byte, api openai.API, answer *openai.Object) []byte {
	object := `"text_completion"`
	if api == openai.Chat {
		object = `"chat.completion.chunk"`
	}
	dst = append(dst, `data: {"id":`...)
	dst = appendMember(dst, answer, "id")
	dst = append(append(dst, `,"object":`...), object...)
	dst = append(dst, `,"created":`...)
	dst = appendMember(dst, answer, "created")
	dst = append(dst, `,"model":`...)
	dst = appendMember(dst, answer, "model")
	return append(dst, `,"choices":`...)
}

// appendMember appends the raw value of a member, or null if there is none. It drops
// line breaks, which would end the event; in JSON they are only white space.
func appendMember(dst []byte, o *openai.Object, key string) []byte {
	v, ok := o.Get(key)
	if !ok {
		return append(dst, "null"...)
	}
	return appendOneLine(dst, v)
}

// appendOneLine appends JSON without its line breaks.
func appendOneLine(dst, raw []byte) []byte {
	for _, c := range raw {
		if c != '\n' && c != '\r' {
			dst = append(dst, c)
		}
	}
	return dst
}
