package scorers

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// waiting returns the requests that wait in the engine of a row. Without a report nobody waits.
func waiting(f *abi.ScoreFacts, i int) float32 { return count(f, i, true) }

// running returns the requests that run in the engine of a row.
func running(f *abi.ScoreFacts, i int) float32 { return count(f, i, false) }

func count(f *abi.ScoreFacts, i int, waiting bool) float32 {
	if i >= len(f.Details) {
		return 0
	}
	n := f.Details[i].Running
	if waiting {
		n = f.Details[i].Waiting
	}
	return float32(max(n, 0))
}

// spread scores a value of the candidates: 1 for the lowest, 0 for the highest, and 1 for all if they
// are equal.
type spread struct {
	none
	value func(f *abi.ScoreFacts, i int) float32
	unit  abi.Scale
}

func (s *spread) score(f *abi.ScoreFacts, to *abi.Scores) {
	to.Unit = s.unit
	least, most, first := float32(0), float32(0), true
	for i, open := range f.Open {
		if !open {
			continue
		}
		v := s.value(f, i)
		if to.Rows[i].Value = v; first {
			least, most, first = v, v, false
		}
		least, most = min(least, v), max(most, v)
	}
	for i, open := range f.Open {
		if !open {
			continue
		}
		if to.Rows[i].Score = 1; most > least {
			to.Rows[i].Score = (most - to.Rows[i].Value) / (most - least)
		}
	}
}

// kvUsage scores the free share of the KV memory. Without a report all memory is free.
type kvUsage struct{ none }

func (*kvUsage) score(f *abi.ScoreFacts, to *abi.Scores) {
	to.Unit = abi.UnitShare
	for i, open := range f.Open {
		if open {
			used := f.Candidates[i].Usage
			to.Rows[i] = abi.RowScore{Score: max(1-used, 0), Value: used}
		}
	}
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
	to.Unit = abi.UnitRequests
	most := float32(0)
	for i, open := range f.Open {
		if open {
			to.Rows[i].Value = float32(f.Candidates[i].Requests)
			most = max(most, to.Rows[i].Value)
		}
	}
	for i, open := range f.Open {
		switch n := to.Rows[i].Value; {
		case !open:
		case n <= float32(s.idle):
			to.Rows[i].Score = 1
		default:
			to.Rows[i].Score = (most - n) / most * float32(s.busy)
		}
	}
}

// loadAware scores the requests that wait in the engine, up to a threshold.
type loadAware struct{ threshold float64 }

func (s *loadAware) table() param.Table {
	return param.Table{{Name: "threshold", Value: &s.threshold, Default: 128, Least: 1, Most: 1e6, Unit: "requests", Meaning: "waiting requests from which on the score is 0"}}
}

func (s *loadAware) score(f *abi.ScoreFacts, to *abi.Scores) {
	to.Unit = abi.UnitRequests
	for i, open := range f.Open {
		if open {
			n := waiting(f, i)
			to.Rows[i] = abi.RowScore{Score: 0.5 * (1 - min(n/float32(s.threshold), 1)), Value: n}
		}
	}
}

// tokenLoad scores the tokens in flight, up to a threshold.
type tokenLoad struct{ threshold float64 }

func (s *tokenLoad) table() param.Table {
	return param.Table{{Name: "queue_threshold_tokens", Value: &s.threshold, Default: 4194304, Least: 1, Most: 1e12, Unit: "tokens", Meaning: "tokens from which on the score is 0"}}
}

func (s *tokenLoad) score(f *abi.ScoreFacts, to *abi.Scores) {
	to.Unit = abi.UnitTokens
	for i, open := range f.Open {
		if open {
			c := &f.Candidates[i]
			n := float32(c.Tokens + max(0, f.Request.PromptTokens-c.Matched()))
			to.Rows[i] = abi.RowScore{Score: 1 - min(n/float32(s.threshold), 1), Value: n}
		}
	}
}

// noHitLRU spreads prompts of which no candidate has a part. llm-d orders the engines by the time of
// their last such request; the score here counts the recent requests, which are in the facts.
type noHitLRU struct{ none }

func (*noHitLRU) score(f *abi.ScoreFacts, to *abi.Scores) {
	for i, open := range f.Open {
		if open && f.Candidates[i].Matched() > 0 {
			for n := range to.Rows {
				to.Rows[n] = abi.RowScore{Score: 0.5, Value: f.Candidates[n].RecentRequests}
			}
			to.Unit = abi.UnitRequests
			return
		}
	}
	few := spread{value: func(f *abi.ScoreFacts, i int) float32 { return f.Candidates[i].RecentRequests }, unit: abi.UnitRequests}
	few.score(f, to)
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
		c := &f.Candidates[i]
		if above(float32(c.Requests), s.active) || above(running(f, i), s.running) || above(waiting(f, i), s.waiting) || above(c.Usage, s.usage) {
			to.Rows[i].Score = abi.Removed
		}
	}
}

func above(v float32, limit float64) bool { return limit >= 0 && float64(v) > limit }
