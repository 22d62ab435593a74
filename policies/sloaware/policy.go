// Package sloaware is the built-in place policy slo_aware: it places a request where the
// predicted times keep its targets, and keeps requests that no target can serve in time
// away from those that can be served in time.
package sloaware

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/kvaware"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Params are the parameters for operators: those of kv_aware, the targets, and the rules for
// requests that miss them.
type Params struct {
	KV                        kvaware.Params
	TTFTSeconds, TokenSeconds float64
	Margin                    float64
	LateShare                 float64
}

// Needs returns the additional facts that the policy needs with these parameters.
func (p *Params) Needs() abi.Needs { return p.KV.Needs() | abi.NeedPredictions | abi.NeedTraits }

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	return append(p.KV.Table(),
		param.Param{Name: "ttft_seconds", Value: &p.TTFTSeconds, Default: 4, Least: 0.001, Most: 1e6, Unit: "s", Meaning: "target of the time to first token, of requests without a deadline"},
		param.Param{Name: "token_seconds", Value: &p.TokenSeconds, Default: 0.04, Least: 0.0001, Most: 1e6, Unit: "s", Meaning: "target of the time between two tokens of the answer, of requests without such a limit"},
		param.Param{Name: "margin", Value: &p.Margin, Default: 0.7, Most: 100, Meaning: "expected errors of a prediction that are added to the prediction before the comparison with a target"},
		param.Param{Name: "late_share", Value: &p.LateShare, Default: 0.4, Most: 1, Meaning: "share of the targets that may be late for requests that no target serves in time"},
	)
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// Place is the policy, a pure function of the facts that does not allocate. It reads p,
// which must not change during the call. Without predictions of prefill it decides as
// kv_aware does. An index of -1 for a leg means that no candidate fits. The scores are
// those of kv_aware, in seconds.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	d := p.KV.Place(f)
	if len(f.Predictions) != len(f.Candidates) || d.Decode < 0 {
		return d
	}
	if f.Flow == abi.FlowAggregated {
		d.Decode = p.prompt(f, candidates.Aggregated(), d.Decode, 0)
		return d
	}
	if f.Fixed < 0 {
		chosen := p.prompt(f, candidates.Prefill(), d.Prefill, float64(f.Predictions[d.Decode].Start))
		if chosen != d.Prefill {
			d = abi.PlaceDecision{Prefill: chosen, Decode: p.KV.DecodeOf(f, chosen)}
		}
	}
	d.Decode = p.stream(f, candidates.Decode(f.Candidates, d.Prefill), d.Decode)
	return d
}

// choice is the best row so far.
type choice struct {
	row  int32
	cost float64
}

func (c *choice) offer(row int, cost float64) {
	if c.row < 0 || cost < c.cost {
		c.row, c.cost = int32(row), cost
	}
}

// uncached returns the tokens of the prompt to compute on a row.
func uncached(f *abi.PlaceFacts, c *abi.Candidate) float64 {
	return float64(max(1, f.Request.PromptTokens-c.Matched()))
}

// prompt returns the row for the prompt: usual, if that row meets the target or if times are
// unknown. Otherwise, of the rows that meet the target and are worth their additional work,
// it returns the one of kv_aware's lowest cost. If no row meets the target, see late. start
// is the expected time in µs from the end of prefill to the first token.
//
// Additional work delays the requests behind it: none on an idle row, more on a row where
// more requests wait. So a move to a row whose requests wait for the whole limit may double
// the work of the request, or add half the work of the mean request. A shorter wait allows
// proportionally more.
func (p *Params) prompt(f *abi.PlaceFacts, leg candidates.Leg, usual int32, start float64) int32 {
	limit := max(1, p.firstToken(&f.Request)-start)
	if q := &f.Predictions[usual]; q.Prefill == 0 || p.end(q) <= limit {
		return usual
	}
	grade, own := leg.Grade(&f.Candidates[usual]), uncached(f, &f.Candidates[usual])
	recent, requests := 0.0, 0.0
	for i := range f.Candidates {
		c := &f.Candidates[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade {
			continue
		}
		if f.Predictions[i].Prefill == 0 {
			return usual
		}
		recent += float64(c.RecentTokens)
		requests += float64(c.RecentRequests)
	}
	mean, best := recent/max(1, requests), choice{row: -1}
	for i := range f.Candidates {
		c := &f.Candidates[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade {
			continue
		}
		q := &f.Predictions[i]
		if p.end(q) <= limit && (uncached(f, c)-own)*float64(q.Wait) <= max(own, mean/2)*limit {
			best.offer(i, float64(c.Score))
		}
	}
	switch {
	case best.row >= 0:
		return best.row
	case own < mean:
		return usual // its delay frees little time
	}
	return p.late(f, leg, usual, limit)
}

// end returns the latest likely end of prefill in µs.
func (p *Params) end(q *abi.Prediction) float64 {
	return float64(q.Prefill) + float64(p.Margin*float64(q.PrefillError))
}

// late returns the row for a long prompt that no row serves in time. Such a prompt goes to
// late rows, where requests already wait longer than the limit, so that the other rows can
// serve later requests in time. Of the late rows where the prompt has at most twice the
// uncached tokens of the usual row, it takes the one of kv_aware's lowest cost. If less than
// LateShare of the rows are late, it takes the row that finishes it first of those that are
// not late and are worth their additional work.
func (p *Params) late(f *abi.PlaceFacts, leg candidates.Leg, usual int32, limit float64) int32 {
	rows, full := 0, 0
	late, fresh := choice{row: -1}, choice{row: -1}
	grade, own := leg.Grade(&f.Candidates[usual]), uncached(f, &f.Candidates[usual])
	for i := range f.Candidates {
		c := &f.Candidates[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade {
			continue
		}
		rows++
		q, more := &f.Predictions[i], uncached(f, c)-own
		wait := float64(q.Wait)
		if wait > limit {
			full++
			if more <= own {
				late.offer(i, float64(c.Score))
			}
		} else if more*wait <= own*limit {
			fresh.offer(i, float64(q.Prefill))
		}
	}
	if fresh.row < 0 || late.row >= 0 && float64(full) >= p.LateShare*float64(rows) {
		return late.row
	}
	return fresh.row
}

// firstToken returns the target of the time to first token in µs: the deadline of the request, if it
// has one.
func (p *Params) firstToken(r *abi.RequestFacts) float64 {
	if r.Remaining != 0 {
		return float64(r.Remaining) * 1e3
	}
	return p.TTFTSeconds * 1e6
}

// tokenTime returns the target of the time between two tokens in µs: the limit of the request, if it
// has one.
func (p *Params) tokenTime(r *abi.RequestFacts) float64 {
	if r.TokenMicros != 0 {
		return float64(r.TokenMicros)
	}
	return p.TokenSeconds * 1e6
}

// lost is the number of expected errors by which a row must miss the target for tokens, so that its
// streams count as lost. With less, the policy gives up rows whose work soon falls again: on a trace
// with short answers (azure_code) the rule then costs up to 7 points of good requests.
const lost = 3

// stream returns the row for the stream: usual, or if usual misses the target for tokens, the row of
// kv_aware's lowest cost of the rows of the same grade that meet it. If no row does, the stream goes to
// the row with the slowest tokens if the streams of that row are lost: it misses its target anyway, and
// the other rows meet those of later streams again.
func (p *Params) stream(f *abi.PlaceFacts, leg candidates.Leg, usual int32) int32 {
	limit := p.tokenTime(&f.Request)
	if usual < 0 || float64(f.Predictions[usual].Token) <= limit {
		return usual
	}
	met, slowest, grade := choice{row: -1}, choice{row: -1}, leg.Grade(&f.Candidates[usual])
	for i := range f.Candidates {
		c, q := &f.Candidates[i], &f.Predictions[i]
		if !leg.Suits(c, i) || leg.Grade(c) != grade || q.Token <= 0 {
			continue
		}
		if float64(q.Token) <= limit {
			met.offer(i, float64(c.Score))
		} else if float64(q.Token)-float64(lost*q.TokenError) > limit {
			slowest.offer(i, -float64(q.Token))
		}
	}
	switch {
	case met.row >= 0:
		return met.row
	case slowest.row >= 0:
		return slowest.row
	}
	return usual
}
