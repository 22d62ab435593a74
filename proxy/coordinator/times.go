package coordinator

import (
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// predict appends the prediction for row c, whose target is r.
func (t *table) predict(r *engine.Row, c *abi.Candidate, v *load.View, now time.Time) {
	var streams predict.Streams
	if r.Role&abi.RoleDecode != 0 {
		streams = predict.Streams{Requests: int64(v.Requests), Tokens: v.Decode}
	}
	prompt := predict.Prompt{Tokens: t.place.Request.PromptTokens, Cached: c.Matched()}
	t.place.Predictions = append(t.place.Predictions, r.Queues[r.Rank].Predict(t.timesOf(r.Target), c.Roles, prompt, streams, now))
}

// timesOf returns the models of a target's type.
func (t *table) timesOf(target engine.Target) *predict.Engine {
	if e := target.Times.Load(); e != nil {
		return e
	}
	of := predict.Type{Role: target.Role, Hardware: target.Instance.Detail().Hardware}
	if models := target.Models(); len(models) > 0 {
		of.Model = models[0]
	}
	e := t.types.Of(of)
	target.Times.Store(e)
	return e
}

// times measures the legs of a placement for later predictions. A lease's mutex guards it.
type times struct {
	prompt *predict.Prefill
	stream *predict.Stream // nil: one leg
	took   time.Duration   // of the prompt; 0: unknown
}

// measure begins to measure the legs of a placement, and adds the prediction to its notes.
func (t *table) measure(prompt int64, chosen abi.PlaceDecision, g *Placement, now time.Time) *times {
	computer, row := g.Decode, chosen.Decode
	if chosen.Prefill >= 0 {
		computer, row = g.Prefill, chosen.Prefill
	}
	facts := func(row int32) predict.Prompt {
		return predict.Prompt{Tokens: prompt, Cached: t.place.Candidates[row].Matched()}
	}
	m := &times{prompt: computer.Queues[computer.Rank].Begin(t.timesOf(computer), facts(row), engine.StreamsOf(computer, now), now)}
	said := t.place.Predictions[row]
	first, off := said.Prefill, said.PrefillError
	if chosen.Prefill >= 0 {
		m.stream = t.timesOf(g.Decode).Stream(facts(chosen.Decode), engine.StreamsOf(g.Decode, now))
		said = t.place.Predictions[chosen.Decode]
		first, off = first+said.Start, off+said.StartError
	}
	if first > 0 {
		g.Notes = append(g.Notes, fmt.Sprintf("predicted: first token after %.1f ms, error %.1f ms; %.2f ms a token, error %.2f ms", first/1000, off/1000, said.Token/1000, said.TokenError/1000))
	}
	return m
}

// computed learns from the prompt of a placement at since; a took of 0 is unknown.
func (m *times) computed(since time.Time, took time.Duration) {
	if m.took = took; took > 0 {
		m.prompt.Done(since.Add(took))
	} else {
		m.prompt.Drop()
	}
}

// answered learns from the first token, which came after took.
func (m *times) answered(took time.Duration) {
	if m.stream != nil && m.took > 0 && took > m.took {
		m.stream.Started(took - m.took)
	}
}

// drop ends the measurement of a prompt that was not computed.
func (m *times) drop() { m.prompt.Drop() }
