package scorers

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/param"
)

// first returns the predicted time to the first token at a row in µs, as far as the leg decides it;
// 0: not known.
func first(f *abi.ScoreFacts, i int) float32 {
	if i >= len(f.Predictions) {
		return 0
	}
	if f.Phases == abi.RoleDecode {
		return f.Predictions[i].Start
	}
	return f.Predictions[i].Prefill
}

// token returns the predicted time between two tokens at a row in µs; 0: not known, or another leg
// decides it.
func token(f *abi.ScoreFacts, i int) float32 {
	if f.Phases == abi.RolePrefill || i >= len(f.Predictions) {
		return 0
	}
	return f.Predictions[i].Token
}

// limits are those of the request in µs, as far as the leg decides them. unlimited: there is none.
type limits struct{ first, token float32 }

const unlimited = math.MaxFloat32

// limitsOf returns the limits of the request. ok is false without one.
func limitsOf(f *abi.ScoreFacts) (l limits, ok bool) {
	l = limits{unlimited, unlimited}
	if f.Request.Remaining != 0 {
		l.first = float32(f.Request.Remaining) * 1000
		if f.Phases == abi.RoleDecode && f.Prefill >= 0 && int(f.Prefill) < len(f.Predictions) {
			l.first -= f.Predictions[f.Prefill].Prefill
		}
	}
	if f.Request.TokenMicros != 0 && f.Phases != abi.RolePrefill {
		l.token = float32(f.Request.TokenMicros)
	}
	return l, l.first < unlimited || l.token < unlimited
}

// meets reports whether a row is predicted to stay within the limits.
func (l limits) meets(f *abi.ScoreFacts, i int) bool {
	start, between := first(f, i), token(f, i)
	return start > 0 && start <= l.first && (l.token == unlimited || between > 0 && between <= l.token)
}

// predicted reports whether an open row has a predicted time to the first token.
func predicted(f *abi.ScoreFacts) bool {
	for i, open := range f.Open {
		if open && first(f, i) > 0 {
			return true
		}
	}
	return false
}

// latency scores the predicted times. Candidates that meet the limits of the request come before all
// others. Among them the one with the least room is best, so that the others stay free, or with
// most_headroom the one with the most. Without a limit, and among late ones, the shortest time is best.
type latency struct{ firstWeight, tokenWeight, most float64 }

func (s *latency) table() param.Table {
	return param.Table{
		{Name: "ttft_weight", Value: &s.firstWeight, Default: 0.8, Most: 1e6, Meaning: "weight of the time to the first token"},
		{Name: "tpot_weight", Value: &s.tokenWeight, Default: 0.2, Most: 1e6, Meaning: "weight of the time between two tokens"},
		{Name: "most_headroom", Value: &s.most, Most: 1, Meaning: "1: of the candidates that meet the limits, the one with the most room is best"},
	}
}

// bounds are the lowest and the highest of some values.
type bounds struct {
	least, most float32
	any         bool
}

func (b *bounds) add(v float32) {
	if !b.any {
		b.least, b.most, b.any = v, v, true
	}
	b.least, b.most = min(b.least, v), max(b.most, v)
}

// place returns where v is between the bounds, from 0 to 1; 0.5 if all values are equal.
func (b *bounds) place(v float32) float32 {
	if b.most <= b.least {
		return 0.5
	}
	return (v - b.least) / (b.most - b.least)
}

func (s *latency) score(f *abi.ScoreFacts, to *abi.Scores) {
	if !predicted(f) {
		s.composite(f, to)
		return
	}
	to.Unit = abi.UnitSeconds
	due, limited := limitsOf(f)
	inTime := false
	for i, open := range f.Open {
		inTime = inTime || open && limited && due.meets(f, i)
	}
	var firsts, tokens bounds
	considered := func(i int) bool { return f.Open[i] && first(f, i) > 0 && (!inTime || due.meets(f, i)) }
	for i := range f.Open {
		if considered(i) {
			firsts.add(first(f, i))
			tokens.add(token(f, i))
		}
	}
	a, b := s.weights(&firsts, &tokens)
	for i := range f.Open {
		to.Rows[i].Value = first(f, i) / 1e6
		if !considered(i) {
			continue
		}
		early := firsts.place(first(f, i))
		if !inTime || s.most != 0 {
			early = 1 - early // with a limit, the latest of those in time has the least room
		}
		to.Rows[i].Score = 0.01 + 0.99*(a*early+b*(1-tokens.place(token(f, i))))
	}
}

// weights returns the shares of both times. A time that is equal everywhere has none.
func (s *latency) weights(firsts, tokens *bounds) (first, token float32) {
	first, token = float32(s.firstWeight), float32(s.tokenWeight)
	switch {
	case tokens.most <= tokens.least && firsts.most > firsts.least, first+token <= 0:
		return 1, 0
	case firsts.most <= firsts.least && tokens.most > tokens.least:
		return 0, 1
	}
	return first / (first + token), token / (first + token)
}

// composite scores without predictions: the means of free KV memory, the queue and the cached prefix.
func (s *latency) composite(f *abi.ScoreFacts, to *abi.Scores) {
	_, most := waiting.fill(f, to)
	to.Unit = abi.UnitShare
	for i, open := range f.Open {
		if !open {
			continue
		}
		c, short := &f.Candidates[i], float32(1)
		if most > 0 {
			short = (most - to.Rows[i].Value) / most
		}
		mean := (1 - c.Usage + short + share(f, c)) / 3
		to.Rows[i] = abi.RowScore{Score: mean, Value: mean}
	}
}

// sloHeadroomFilter keeps the candidates that meet the limits of the request, and rarely the others, so that a
// prediction that became wrong is corrected.
type sloHeadroomFilter struct{ explore float64 }

func (s *sloHeadroomFilter) table() param.Table {
	return param.Table{{Name: "epsilon_explore_neg", Value: &s.explore, Default: 0.01, Most: 1, Meaning: "share of the requests for which the candidates stay that miss a limit"}}
}

func (s *sloHeadroomFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	due, limited := limitsOf(f)
	if !limited || !predicted(f) {
		return
	}
	late := chance(f, s.explore)
	for i, open := range f.Open {
		if open && due.meets(f, i) == late {
			to.Remove(i)
		}
	}
}

// chance reports true for that share of the requests.
func chance(f *abi.ScoreFacts, share float64) bool {
	return float64(candidates.Draw(f.Random, -1)) < share*(1<<32)
}

// prefixAffinityFilter keeps the candidates that have most of the prompt.
type prefixAffinityFilter struct{ threshold, explore, penalty float64 }

func (s *prefixAffinityFilter) table() param.Table {
	return param.Table{
		{Name: "affinity_threshold", Value: &s.threshold, Default: 0.8, Most: 1, Meaning: "share of the prompt in the KV cache from which on a candidate stays; 0: all stay"},
		{Name: "exploration_probability", Value: &s.explore, Most: 1, Meaning: "share of the requests for which all candidates stay"},
		{Name: "max_ttft_penalty_ms", Value: &s.penalty, Default: 18000, Most: 1e9, Unit: "ms", Meaning: "all candidates stay if the first token is predicted to take that much longer with the prefix; 0: no limit"},
	}
}

func (s *prefixAffinityFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	if s.threshold <= 0 || chance(f, s.explore) {
		return
	}
	var with, without bounds // of the predicted times
	some := false
	for i, open := range f.Open {
		if !open {
			continue
		}
		times := &without
		if s.has(f, i) {
			times, some = &with, true
		}
		if t := first(f, i); t > 0 {
			times.add(t)
		}
	}
	if !some || s.penalty > 0 && with.any && without.any && float64(with.least-without.least) > s.penalty*1000 {
		return
	}
	for i, open := range f.Open {
		if open && !s.has(f, i) {
			to.Remove(i)
		}
	}
}

// has reports whether a candidate has enough of the prompt.
func (s *prefixAffinityFilter) has(f *abi.ScoreFacts, i int) bool {
	return float64(share(f, &f.Candidates[i])) >= s.threshold
}
