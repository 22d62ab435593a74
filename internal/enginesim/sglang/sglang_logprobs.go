package enginesim

import (
	"encoding/json"
	"strings"
)

// sglangLogprobs are the log probabilities that one sequence of a /generate request
// requires (return_logprob and related members). The zero value requires none.
type sglangLogprobs struct {
	wanted bool
	// start is the first token of the prompt with a log probability, -1 for none.
	start int
	// top is the number of the most likely tokens at each position.
	top int
	// text adds the tokens' texts.
	text bool
}

// parseLogprobs reads the members of /generate that request log probabilities. Each is
// one value, or a list with one value for each prompt.
func parseLogprobs(f fields, prompts, n int) ([]sglangLogprobs, *fieldError) {
	list := make([]sglangLogprobs, prompts*n)
	for i := range list {
		var err *fieldError
		of := func(name string) fields {
			one, bad := elementOf(f, name, prompts, i/n)
			if err == nil {
				err = bad
			}
			return one
		}
		p := fieldReader{f: of("return_logprob")}
		list[i].wanted = p.boolean("return_logprob")
		p.f = of("logprob_start_len")
		list[i].start = int(p.integer("logprob_start_len", -1))
		p.f = of("top_logprobs_num")
		list[i].top = int(p.integer("top_logprobs_num", 0))
		p.f = f
		list[i].text = p.boolean("return_text_in_logprobs")
		if err == nil {
			err = p.err
		}
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// elementOf returns the fields with the i-th element of a member that may be a
// list with one value for each prompt.
func elementOf(f fields, name string, prompts, i int) (fields, *fieldError) {
	raw := f[name]
	var list []json.RawMessage
	if !f.has(name) || json.Unmarshal(raw, &list) != nil {
		return f, nil
	}
	if len(list) != prompts {
		return nil, &fieldError{name, "value_error", "The length of " + name + " should be equal to the batch size."}
	}
	return fields{name: list[i]}, nil
}

// logprobs adds a sequence's log probabilities to meta_info. A decode engine
// has none for the prompt.
func (g *sglang) logprobs(meta object, s *sequence) object {
	ext := s.req.Ext.(*sglangRequest)
	if len(ext.logprobs) == 0 || !ext.logprobs[s.choice].wanted {
		return meta
	}
	ask := ext.logprobs[s.choice]
	from := len(s.prompt)
	if ask.start >= 0 && g.mode != modeDecode {
		from = min(ask.start, from)
	}
	all := append(append([]token{}, s.prompt...), s.output...)
	input, inputTop := ask.lists(all, from, len(s.prompt), true)
	output, outputTop := ask.lists(all, len(s.prompt), len(all), false)
	meta = meta.with("input_token_logprobs", input).with("output_token_logprobs", output).with("output_token_logprobs_length", len(output))
	if ask.top > 0 {
		meta = meta.with("input_top_logprobs", inputTop).with("output_top_logprobs", outputTop)
	}
	return meta
}

// lists returns the log probabilities of the tokens in [from, to): each token's
// probability after the tokens before it. The first token of a prompt has none.
func (ask sglangLogprobs) lists(all []token, from, to int, prompt bool) (chosen, top []any) {
	chosen, top = []any{}, []any{}
	for i := from; i < to; i++ {
		if prompt && i == from {
			chosen, top = append(chosen, []any{nil, all[i], ask.textOf(all[i])}), append(top, nil)
			continue
		}
		chosen = append(chosen, ask.entry(all, i, all[i]))
		var likely []any
		for n := range ask.top {
			likely = append(likely, ask.entry(all, i, tokenWord+token((i+n)%len(wordTokens))))
		}
		top = append(top, likely)
	}
	return chosen, top
}

// entry returns the triple of token t at position i.
func (ask sglangLogprobs) entry(all []token, i int, t token) any {
	h := uint64(i)*0x9e3779b97f4a7c15 ^ uint64(t)<<20
	if i > 0 {
		h ^= uint64(all[i-1])
	}
	return []any{-float64(h%4096) / 512, t, ask.textOf(t)}
}

func (ask sglangLogprobs) textOf(t token) any {
	if !ask.text {
		return nil
	}
	return strings.ToValidUTF8(t.text(), "\uFFFD")
}
