package continuation

import (
	"bytes"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Splicer rewrites the events of the new engine so that they continue those of the first one. It
// parses each event: few streams break.
type Splicer struct {
	// ID and Created are the raw values of the first engine's events; nil: unchanged.
	ID, Created []byte
	// Kept is the number of output ids in the new prompt. In the usage they count as completion.
	Kept int64
	// Repeated is the rest of Meeting.Repeated, which is cut from the next texts.
	Repeated string
	// Drop is the rest of Meeting.Drop: the client has the ids and log probabilities of as many
	// tokens.
	Drop int
	// Offset is added to the text offsets of a completion's log probabilities; 0 for engines that
	// have none.
	Offset int64
	// Wrong is set if the new answer does not begin with Repeated (it begins otherwise, with reasoning
	// or a call, or ends before), or cannot be read. The event with which that happened is not appended.
	Wrong bool
	// Memory counts the memory of scans; nil: it is not counted.
	Memory openai.Memory
}

// SpliceRoom is an upper bound of the memory that Append needs, in bytes for each byte of an event: for the
// ids and text offsets while their lists grow, the text, the edits and the result. The scans are
// counted by Memory.
const SpliceRoom = 16

// Append appends one whole event of the new engine as the client must see it. It appends nothing
// for a second role event and for tokens that the client has, unless the event has new text or an
// end. An event without a JSON object, as [DONE] and comments, is copied. The ids are still in it.
func (s *Splicer) Append(dst, event []byte) []byte {
	data, ok := bytes.CutPrefix(event, []byte("data: "))
	if !ok || len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	e, choice := ReadEvent(event)
	had := s.Repeated
	text := s.cut(e.Text)
	o := openai.Object{Memory: s.Memory}
	if err := o.Parse(bytes.TrimRight(data, "\r\n")); err != nil || e.State != "" && had != "" || e.Ended && s.Repeated != "" {
		s.Wrong = true
	}
	known := min(s.Drop, len(e.IDs))
	s.Drop -= known
	silent := choice && !e.Ended && e.State == "" && text == "" && known == len(e.IDs)
	if s.Wrong || silent {
		return dst
	}
	edits := s.head(&o)
	if choice {
		if choices := s.choices(&o, &e, text, known); choices != nil {
			edits = append(edits, openai.Edit{Key: "choices", Value: choices})
		}
	}
	dst = o.Append(append(dst, "data: "...), edits...)
	return append(dst, data[len(o.Raw()):]...)
}

// cut returns text without its part that the client has.
func (s *Splicer) cut(text string) string {
	n := min(len(text), len(s.Repeated))
	if text[:n] != s.Repeated[:n] {
		s.Wrong = true
		return text
	}
	s.Repeated = s.Repeated[n:]
	return text[n:]
}

// head returns the edits of the members beside the choices.
func (s *Splicer) head(o *openai.Object) (edits []openai.Edit) {
	id := "id"
	if _, ok := o.Get(id); !ok {
		id = "request_id"
	}
	for key, value := range map[string][]byte{id: s.ID, "created": s.Created} {
		if _, ok := o.Get(key); ok && value != nil {
			edits = append(edits, openai.Edit{Key: key, Value: value})
		}
	}
	raw, _ := o.Get("usage")
	usage := openai.Object{Memory: s.Memory}
	if openai.IsNull(raw) || usage.Parse(raw) != nil {
		return edits
	}
	return append(edits, openai.Edit{Key: "usage", Value: usage.Append(nil, s.usage(&usage)...)})
}

// usage moves the kept ids from the prompt to the completion. The total stays.
func (s *Splicer) usage(o *openai.Object) (edits []openai.Edit) {
	prompt := int64(-1)
	if n, ok := intOf(o, "prompt_tokens"); ok {
		prompt = max(0, n-s.Kept)
		edits = append(edits, number("prompt_tokens", prompt))
	}
	if n, ok := intOf(o, "completion_tokens"); ok {
		edits = append(edits, number("completion_tokens", n+s.Kept))
	}
	raw, _ := o.Get("prompt_tokens_details")
	details := openai.Object{Memory: s.Memory}
	if openai.IsNull(raw) || details.Parse(raw) != nil {
		return edits
	}
	if n, ok := intOf(&details, "cached_tokens"); ok && prompt >= 0 && n > prompt {
		edits = append(edits, openai.Edit{Key: "prompt_tokens_details", Value: details.Append(nil, number("cached_tokens", prompt))})
	}
	return edits
}

func intOf(o *openai.Object, key string) (int64, bool) {
	raw, _ := o.Get(key)
	return openai.Int64(raw)
}

// choices returns the list with the only choice rewritten: with text, and without the first known
// tokens. It is nil if nothing changes.
func (s *Splicer) choices(o *openai.Object, e *Event, text string, known int) []byte {
	raw, _ := o.Get("choices")
	one, _ := openai.Find(raw, "0")
	choice, part := openai.Object{Memory: s.Memory}, openai.Object{Memory: s.Memory}
	if choice.Parse(one) != nil {
		return nil
	}
	var edits []openai.Edit
	quoted, changed := openai.AppendQuoted(nil, text), text != e.Text
	if _, ok := choice.Get("text"); ok && changed {
		edits = append(edits, openai.Edit{Key: "text", Value: quoted})
	}
	if raw, ok := choice.Get("delta"); ok && changed && part.Parse(raw) == nil {
		edits = append(edits, openai.Edit{Key: "delta", Value: part.Append(nil, openai.Edit{Key: "content", Value: quoted})})
	}
	if known > 0 {
		edits = append(edits, openai.Edit{Key: "token_ids", Value: AppendIDs(nil, e.IDs[known:])})
	}
	raw, _ = choice.Get("logprobs")
	switch {
	case openai.IsNull(raw):
	case known > 0 && known == len(e.IDs):
		edits = append(edits, openai.Edit{Key: "logprobs", Value: []byte("null")})
	case (known > 0 || s.Offset != 0) && part.Parse(raw) == nil:
		edits = append(edits, openai.Edit{Key: "logprobs", Value: part.Append(nil, s.logprobs(&part, known)...)})
	}
	if len(edits) == 0 {
		return nil
	}
	return append(choice.Append([]byte("["), edits...), ']')
}

// logprobs returns the edits of lists with an element for each token: the first known ones are
// left out, and text offsets continue those of the first engine. The lists are those of completions
// (vLLM entrypoints/openai/completion/protocol.py, CompletionLogProbs; SGLang's protocol.py, LogProbs) and
// of chats (ChatCompletionLogProbs, ChoiceLogprobs).
func (s *Splicer) logprobs(o *openai.Object, known int) (edits []openai.Edit) {
	o.Members(func(key string, value []byte) bool {
		switch key {
		case "text_offset", "token_logprobs", "tokens", "top_logprobs", "content", "refusal":
		default: // so that the number of edits is bounded
			return true
		}
		if len(value) == 0 || value[0] != '[' {
			return true
		}
		list, i := []byte("["), 0
		c := openai.Cursor{Text: value}
		for c.Open('['); c.Next(']'); i++ {
			element := c.Skip()
			if i < known {
				continue
			}
			if len(list) > 1 {
				list = append(list, ',')
			}
			if n, ok := openai.Int64(element); ok && key == "text_offset" {
				list = strconv.AppendInt(list, n+s.Offset, 10)
			} else {
				list = append(list, element...)
			}
		}
		edits = append(edits, openai.Edit{Key: key, Value: append(list, ']')})
		return true
	})
	return edits
}
