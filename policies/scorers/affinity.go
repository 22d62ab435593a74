package scorers

import (
	"errors"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// share returns the share of the prompt that a candidate has in its KV cache.
func share(f *abi.ScoreFacts, c *abi.Candidate) float32 {
	if f.Request.PromptTokens <= 0 {
		return 0
	}
	return min(float32(c.Matched())/float32(f.Request.PromptTokens), 1)
}

// prefix scores the part of the prompt in the KV cache.
type prefix struct{ lengthWeight, scale float64 }

func (s *prefix) table() param.Table {
	return param.Table{
		{Name: "match_length_weight", Value: &s.lengthWeight, Most: 1, Meaning: "weight of the length of the cached part; the rest is the weight of its share of the prompt"},
		{Name: "match_length_scale_tokens", Value: &s.scale, Default: 8192, Least: 1, Most: 1e9, Unit: "tokens", Meaning: "length of the cached part from which on the length counts fully"},
	}
}

func (s *prefix) score(f *abi.ScoreFacts, to *abi.Scores) {
	open, candidates, rows, prompt := f.Open, f.Candidates, to.Rows, float32(max(f.Request.PromptTokens, 1))
	weight, scale := float32(s.lengthWeight), float32(s.scale)
	for i := range open {
		if !open[i] {
			continue
		}
		tokens := float32(candidates[i].Matched())
		length, share := tokens/scale, tokens/prompt
		if length > 1 {
			length = 1
		}
		if share > 1 {
			share = 1
		}
		rows[i].Score, rows[i].Value = weight*length*length+(1-weight)*share, tokens
	}
	to.Unit = abi.UnitTokens
}

// session scores the target of the conversation's last turn.
type session struct{ none }

func (*session) score(f *abi.ScoreFacts, to *abi.Scores) {
	open, candidates, rows, phases := f.Open, f.Candidates, to.Rows, homePhases(f)
	for i := range open {
		if open[i] && candidates[i].Home&phases != 0 {
			rows[i].Score, rows[i].Value = 1, 1
		}
	}
}

// homePhases returns the phases whose last target is the home for the leg. An aggregated leg continues
// a decode leg, whose target has the KV of the prompt and of the answer.
func homePhases(f *abi.ScoreFacts) abi.Role {
	if f.Phases == abi.RoleBoth {
		return abi.RoleDecode
	}
	return f.Phases
}

// mmCache scores the media that a target may still have in encoded form. The leg that computes the
// prompt encodes its media, so a decode leg after prefill has no scores.
type mmCache struct{ none }

func (*mmCache) score(f *abi.ScoreFacts, to *abi.Scores) {
	to.Unit = abi.UnitShare
	if f.Phases == abi.RoleDecode {
		return
	}
	for i, open := range f.Open {
		if c := &f.Candidates[i]; open && c.Media != 0 {
			share := float32(c.MediaSent) / float32(c.Media)
			to.Rows[i] = abi.RowScore{Score: share, Value: share}
		}
	}
}

// sessionFilter keeps the target of the conversation's last turn, if it is a candidate.
type sessionFilter struct{ none }

func (*sessionFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	for i, open := range f.Open {
		if open && f.Candidates[i].Home&homePhases(f) == 0 {
			to.Remove(i)
		}
	}
}

// lora scores the state of the request's adapter. Without an adapter all scores are 0.
type lora struct{ none }

func (*lora) score(f *abi.ScoreFacts, to *abi.Scores) {
	if !f.Adapters {
		return
	}
	for i, open := range f.Open {
		if !open {
			continue
		}
		switch f.Candidates[i].Adapter {
		case abi.AdapterRunning:
			to.Rows[i].Score = 1
		case abi.AdapterFree:
			to.Rows[i].Score = 0.8
		case abi.AdapterWaiting:
			to.Rows[i].Score = 0.6
		}
	}
}

// contextLength scores the range of lengths of prompts that an engine is for. The formula is that of
// llm-d (scorer/contextlengthaware): narrow ranges and ranges with room are better, and an engine for
// other lengths has at most 0.3. An engine without a range has 0.5.
type contextLength struct{ none }

func (*contextLength) score(f *abi.ScoreFacts, to *abi.Scores) {
	to.Unit = abi.UnitTokens
	n := float32(f.Request.PromptTokens)
	for i, open := range f.Open {
		if !open {
			continue
		}
		least, most, ok := contextOf(f, i)
		if to.Rows[i] = (abi.RowScore{Score: 0.5, Value: most}); ok {
			to.Rows[i].Score = rangeScore(n, least, most)
		}
	}
}

// contextOf returns the range of a row.
func contextOf(f *abi.ScoreFacts, i int) (least, most float32, ok bool) {
	if i >= len(f.Details) {
		return 0, 0, false
	}
	d := &f.Details[i]
	return float32(d.ContextLeast), float32(d.ContextMost), d.ContextMost != 0
}

func rangeScore(n, least, most float32) float32 {
	const other = 0.3 // highest score of an engine for other lengths
	width := most - least
	switch {
	case n > most:
		return other / (1 + (n-most)/1000)
	case n < least:
		return other / (1 + (least-n)/1000)
	case width == 0:
		return 1
	}
	narrow, room := 1/(1+width/10000), (most-n)/width
	return other + (0.7*narrow+0.3*room)*(1-other)
}

// contextLengthFilter removes engines whose range excludes the prompt.
type contextLengthFilter struct{ none }

func (*contextLengthFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	n := float32(f.Request.PromptTokens)
	for i, open := range f.Open {
		if least, most, ok := contextOf(f, i); open && ok && (n < least || n > most) {
			to.Remove(i)
		}
	}
}

// label scores a label of the engine.
type label struct {
	name, values string
	not          float64

	id     uint32
	wanted []uint32 // empty: any value
}

func (s *label) table() param.Table {
	return param.Table{
		{Name: "label", Text: &s.name, Meaning: "name of the label; required"},
		{Name: "values", Text: &s.values, Meaning: "values that match, separated by spaces; empty: any value"},
		{Name: "not", Value: &s.not, Most: 1, Meaning: "1: engines match that do not have the label with one of the values"},
	}
}

func (s *label) ready() error {
	if s.name == "" {
		return errors.New("needs the parameter label, the name of a label of engines")
	}
	s.id = abi.LabelID(s.name)
	for _, v := range strings.Fields(s.values) {
		s.wanted = append(s.wanted, abi.LabelID(v))
	}
	return nil
}

// matches reports whether a row has the label with one of the values, or has not, with not.
func (s *label) matches(f *abi.ScoreFacts, i int) bool {
	value := uint32(0)
	if i < len(f.Details) {
		value = f.Details[i].Value(s.id)
	}
	match := value != 0 && len(s.wanted) == 0
	for _, wanted := range s.wanted {
		match = match || value == wanted
	}
	return match == (s.not == 0)
}

func (s *label) score(f *abi.ScoreFacts, to *abi.Scores) {
	for i, open := range f.Open {
		if open && s.matches(f, i) {
			to.Rows[i] = abi.RowScore{Score: 1, Value: 1}
		}
	}
}

// labelFilter removes engines whose label does not match.
type labelFilter struct{ label }

func (s *labelFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	for i, open := range f.Open {
		if open && !s.matches(f, i) {
			to.Remove(i)
		}
	}
}

// headerLabel compares a label of the engine with a header of the request.
type headerLabel struct {
	name, label string
	id          uint32
}

func (s *headerLabel) table() param.Table {
	return param.Table{
		{Name: "header", Text: &s.name, Meaning: "name of the request header; required"},
		{Name: "label", Text: &s.label, Meaning: "name of the label; required"},
	}
}

func (s *headerLabel) ready() error {
	if s.label == "" || s.name == "" {
		return errors.New("needs the parameters header, the name of a request header, and label, the name of a label of engines")
	}
	s.name, s.id = strings.ToLower(s.name), abi.LabelID(s.label)
	_, err := abi.ParseHeaders(s.name)
	return err
}

func (s *headerLabel) header() string { return s.name }

func (s *headerLabel) score(f *abi.ScoreFacts, to *abi.Scores) {
	value, _ := f.Request.Header(s.name)
	id := abi.LabelID(value)
	for i, open := range f.Open {
		if open && id != 0 && i < len(f.Details) && f.Details[i].Value(s.id) == id {
			to.Rows[i] = abi.RowScore{Score: 1, Value: 1}
		}
	}
}
