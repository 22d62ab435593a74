package scorers

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// The loops of this package read the facts from local slices and call no function for a row, because
// in a guest built by Go a call costs more than the work for a row. They use no min and max of floats
// for the same reason.

// count is one of the counts in the last report of an engine. Without a report it is 0.
type count int

const (
	running count = iota
	waiting
	recent // requests that the proxy has placed recently
)

// fill writes the counts of the open rows as values, and returns the lowest and the highest.
func (n count) fill(f *abi.ScoreFacts, to *abi.Scores) (least, most float32) {
	open, details, candidates, rows, first := f.Open, f.Details, f.Candidates, to.Rows, true
	for i := range open {
		if !open[i] {
			continue
		}
		v := float32(0)
		switch {
		case n == recent:
			v = candidates[i].RecentRequests
		case i >= len(details):
		case n == running:
			v = float32(max(details[i].Running, 0))
		default:
			v = float32(max(details[i].Waiting, 0))
		}
		if rows[i].Value = v; first {
			least, most, first = v, v, false
		}
		if v < least {
			least = v
		}
		if v > most {
			most = v
		}
	}
	to.Unit = abi.UnitRequests
	return least, most
}

// spread scores a count: 1 for the lowest, 0 for the highest, and 1 for all if they are equal.
type spread struct {
	none
	count count
}

func (s *spread) score(f *abi.ScoreFacts, to *abi.Scores) {
	least, most := s.count.fill(f, to)
	open, rows, width := f.Open, to.Rows, most-least
	for i := range open {
		if !open[i] {
			continue
		}
		if rows[i].Score = 1; width > 0 {
			rows[i].Score = (most - rows[i].Value) / width
		}
	}
}

// kvUsage scores the free share of the KV memory. Without a report all memory is free.
type kvUsage struct{ none }

func (*kvUsage) score(f *abi.ScoreFacts, to *abi.Scores) {
	open, candidates, rows := f.Open, f.Candidates, to.Rows
	for i := range open {
		if !open[i] {
			continue
		}
		used := candidates[i].Usage
		if rows[i].Value = used; used < 1 {
			rows[i].Score = 1 - used
		}
	}
	to.Unit = abi.UnitShare
}

// activeRequests scores the requests in flight through the proxy.
type activeRequests struct{ idle, busy float64 }

func (s *activeRequests) table() param.Table {
	return param.Table{
		{Name: "idle_threshold", Value: &s.idle, Most: 1e6, Unit: "requests", Meaning: "number of requests up to which a candidate counts as idle, with the score 1"},
		{Name: "max_busy_score", Value: &s.busy, Default: 1, Most: 1, Meaning: "highest score of a candidate that is not idle"},
	}
}

func (s *activeRequests) score(f *abi.ScoreFacts, to *abi.Scores) {
	open, candidates, rows, most := f.Open, f.Candidates, to.Rows, float32(0)
	for i := range open {
		if !open[i] {
			continue
		}
		n := float32(candidates[i].Requests)
		if rows[i].Value = n; n > most {
			most = n
		}
	}
	idle, busy := float32(s.idle), float32(s.busy)
	for i := range open {
		switch n := rows[i].Value; {
		case !open[i]:
		case n <= idle:
			rows[i].Score = 1
		default:
			rows[i].Score = (most - n) / most * busy
		}
	}
	to.Unit = abi.UnitRequests
}

// loadAware scores the requests that wait in the engine, up to a threshold.
type loadAware struct{ threshold float64 }

func (s *loadAware) table() param.Table {
	return param.Table{{Name: "threshold", Value: &s.threshold, Default: 128, Least: 1, Most: 1e6, Unit: "requests", Meaning: "waiting requests from which on the score is 0"}}
}

func (s *loadAware) score(f *abi.ScoreFacts, to *abi.Scores) {
	waiting.fill(f, to)
	open, rows, threshold := f.Open, to.Rows, float32(s.threshold)
	for i := range open {
		if n := rows[i].Value; open[i] && n < threshold {
			rows[i].Score = 0.5 * (1 - n/threshold)
		}
	}
}

// tokenLoad scores the tokens in flight, up to a threshold.
type tokenLoad struct{ threshold float64 }

func (s *tokenLoad) table() param.Table {
	return param.Table{{Name: "queue_threshold_tokens", Value: &s.threshold, Default: 4194304, Least: 1, Most: 1e12, Unit: "tokens", Meaning: "tokens from which on the score is 0"}}
}

func (s *tokenLoad) score(f *abi.ScoreFacts, to *abi.Scores) {
	open, candidates, rows, prompt, threshold := f.Open, f.Candidates, to.Rows, f.Request.PromptTokens, float32(s.threshold)
	for i := range open {
		if !open[i] {
			continue
		}
		c := &candidates[i]
		n := float32(c.Tokens + max(0, prompt-c.Matched()))
		if rows[i].Value = n; n < threshold {
			rows[i].Score = 1 - n/threshold
		}
	}
	to.Unit = abi.UnitTokens
}

// noHitLRU spreads prompts of which no candidate has a part. llm-d orders the engines by the time of
// their last such request; the score here counts the recent requests, which are in the facts.
type noHitLRU struct{ none }

func (*noHitLRU) score(f *abi.ScoreFacts, to *abi.Scores) {
	open, candidates, rows, hit := f.Open, f.Candidates, to.Rows, false
	for i := range open {
		hit = hit || open[i] && candidates[i].Matched() > 0
	}
	if !hit {
		few := spread{count: recent}
		few.score(f, to)
		return
	}
	recent.fill(f, to)
	for i := range open {
		if open[i] {
			rows[i].Score = 0.5
		}
	}
}

// utilizationFilter removes engines above a limit.
type utilizationFilter struct{ active, running, waiting, usage float64 }

func (s *utilizationFilter) table() param.Table {
	return param.Table{
		{Name: "max_active_requests", Value: &s.active, Default: -1, Least: -1, Most: 1e9, Unit: "requests", Meaning: "requests in flight through the proxy; -1: no limit"},
		{Name: "max_running_requests", Value: &s.running, Default: -1, Least: -1, Most: 1e9, Unit: "requests", Meaning: "requests that run in the engine; -1: no limit"},
		{Name: "max_waiting_requests", Value: &s.waiting, Default: -1, Least: -1, Most: 1e9, Unit: "requests", Meaning: "requests that wait in the engine; -1: no limit"},
		{Name: "max_kv_usage", Value: &s.usage, Default: -1, Least: -1, Most: 1, Meaning: "share of the KV memory in use; -1: no limit"},
	}
}

func (s *utilizationFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	for i, open := range f.Open {
		if !open {
			continue
		}
		c, running, waiting := &f.Candidates[i], int32(0), int32(0)
		if i < len(f.Details) {
			running, waiting = f.Details[i].Running, f.Details[i].Waiting
		}
		if above(float64(c.Requests), s.active) || above(float64(running), s.running) || above(float64(waiting), s.waiting) || above(float64(c.Usage), s.usage) {
			to.Remove(i)
		}
	}
}

func above(v, limit float64) bool { return limit >= 0 && v > limit }
