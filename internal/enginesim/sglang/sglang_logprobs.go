package sglang

import (
	"encoding/json"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
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
func parseLogprobs(f core.Fields, prompts, n int) ([]sglangLogprobs, *core.FieldError) {
	list := make([]sglangLogprobs, prompts*n)
	for i := range list {
		var err *core.FieldError
		of := func(name string) core.Fields {
			one, bad := elementOf(f, name, prompts, i/n)
			if err == nil {
				err = bad
			}
			return one
		}
		p := core.FieldReader{F: of("return_logprob")}
		list[i].wanted = p.Boolean("return_logprob")
		p.F = of("logprob_start_len")
		list[i].start = int(p.Integer("logprob_start_len", -1))
		p.F = of("top_logprobs_num")
		list[i].top = int(p.Integer("top_logprobs_num", 0))
		p.F = f
		list[i].text = p.Boolean("return_text_in_logprobs")
		if err == nil {
			err = p.Err
		}
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// elementOf returns the fields with the i-th element of a member that may be a
// list with one value for each prompt.
func elementOf(f core.Fields, name string, prompts, i int) (core.Fields, *core.FieldError) {
	raw := f[name]
	var list []json.RawMessage
	if !f.Has(name) || json.Unmarshal(raw, &list) != nil {
		return f, nil
	}
	if len(list) != prompts {
		return nil, &core.FieldError{Field: name, Kind: "value_error", Message: "The length of " + name + " should be equal to the batch size."}
	}
	return core.Fields{name: list[i]}, nil
}

// logprobs adds a sequence's log probabilities to meta_info. A decode engine
// has none for the prompt.
func (g *SGLang) logprobs(meta core.Object, s *core.Sequence) core.Object {
	ext := s.Req.Ext.(*SGLangRequest)
	if len(ext.logprobs) == 0 || !ext.logprobs[s.Choice].wanted {
		return meta
	}
	ask := ext.logprobs[s.Choice]
	from := len(s.Prompt)
	if ask.start >= 0 && g.mode != modeDecode {
		from = min(ask.start, from)
	}
	all := append(append([]core.Token{}, s.Prompt...), s.Output...)
	input, inputTop := ask.lists(all, from, len(s.Prompt), true)
	output, outputTop := ask.lists(all, len(s.Prompt), len(all), false)
	meta = meta.With("input_token_logprobs", input).With("output_token_logprobs", output).With("output_token_logprobs_length", len(output))
	if ask.top > 0 {
		meta = meta.With("input_top_logprobs", inputTop).With("output_top_logprobs", outputTop)
	}
	return meta
}

// lists returns the log probabilities of the tokens in [from, to): each token's
// probability after the tokens before it. The first token of a prompt has none.
func (ask sglangLogprobs) lists(all []core.Token, from, to int, prompt bool) (chosen, top []any) {
	chosen, top = []any{}, []any{}
	for i := from; i < to; i++ {
		if prompt && i == from {
			chosen, top = append(chosen, []any{nil, all[i], ask.textOf(all[i])}), append(top, nil)
			continue
		}
		chosen = append(chosen, ask.entry(all, i, all[i]))
		var likely []any
		for n := range ask.top {
			likely = append(likely, ask.entry(all, i, core.TokenWord+core.Token((i+n)%len(core.WordTokens))))
		}
		top = append(top, likely)
	}
	return chosen, top
}

// entry returns the triple of token t at position i.
func (ask sglangLogprobs) entry(all []core.Token, i int, t core.Token) any {
	prev := core.Token(0)
	if i > 0 {
		prev = all[i-1]
	}
	return []any{core.Logprob(i, prev, t), t, ask.textOf(t)}
}

func (ask sglangLogprobs) textOf(t core.Token) any {
	if !ask.text {
		return nil
	}
	return strings.ToValidUTF8(t.Text(), "\uFFFD")
}

// openAILogprobs returns the log probabilities of the newest tokens of a completion, null if the
// request wants none. It has no text offsets (entrypoints/openai/utils.py,
// to_openai_style_logprobs).
func openAILogprobs(s *core.Sequence, tokens []core.Token) any {
	top, _ := s.Req.Fields.Integer("logprobs", -1)
	if top < 0 || s.Req.Chat {
		return nil
	}
	all := append(append([]core.Token{}, s.Prompt...), s.Output...)
	offsets, chosen, texts, tops := []int{}, []float64{}, []string{}, []any{}
	for i, t := range tokens {
		at := len(all) - len(tokens) + i
		prob := core.Logprob(at, all[at-1], t)
		best := core.Obj(core.ValidText(t.Text()), prob)
		for n := 1; n < int(top); n++ {
			other := core.TokenWord + core.Token((at+n)%len(core.WordTokens))
			best = best.With(other.Text(), core.Logprob(at, all[at-1], other))
		}
		offsets, chosen = append(offsets, -1), append(chosen, prob)
		texts, tops = append(texts, core.ValidText(t.Text())), append(tops, best)
	}
	return core.Obj("text_offset", offsets, "token_logprobs", chosen, "tokens", texts, "top_logprobs", tops)
}
