package load

import (
	"math"
	"slices"
	"time"
)

// Result holds the measurements of a run. Times are those of good answers only;
// a good answer is complete.
type Result struct {
	Requests int            `json:"requests"` // that ended
	Failed   int            `json:"failed"`
	Failures map[string]int `json:"failures"` // by reason
	Seconds  float64        `json:"duration_s"`

	Throughput       float64 `json:"throughput_rps"` // good answers per second
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens"`
	OutputTokens     int     `json:"output_tokens"`
	OutputThroughput float64 `json:"output_tokens_per_s"`

	TTFT  Spread `json:"ttft_ms"` // until the first text
	ITL   Spread `json:"itl_ms"`  // between events with text; an event may have several tokens
	Total Spread `json:"e2e_ms"`  // until the end of the answer
}

// Spread describes the distribution of times in milliseconds; zero without times.
type Spread struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

func summarize(samples []sample, took time.Duration) *Result {
	r := &Result{Requests: len(samples), Failures: map[string]int{}, Seconds: took.Seconds()}
	var first, gaps, total []time.Duration
	for _, s := range samples {
		if s.failure != "" {
			r.Failed++
			r.Failures[s.failure]++
			continue
		}
		if s.first > 0 {
			first = append(first, s.first)
		}
		gaps, total = append(gaps, s.gaps...), append(total, s.total)
		r.PromptTokens += s.prompt
		r.CachedTokens += s.cached
		r.OutputTokens += s.completion
	}
	if r.Seconds > 0 {
		r.Throughput = float64(r.Requests-r.Failed) / r.Seconds
		r.OutputThroughput = float64(r.OutputTokens) / r.Seconds
	}
	r.TTFT, r.ITL, r.Total = spread(first), spread(gaps), spread(total)
	return r
}

// spread sorts times and computes their percentiles: the p-th is the smallest
// time that is at least as large as p percent of them.
func spread(times []time.Duration) (s Spread) {
	if len(times) == 0 {
		return s
	}
	slices.Sort(times)
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	at := func(p float64) float64 { return ms(times[max(0, int(math.Ceil(p*float64(len(times))))-1)]) }
	for _, d := range times {
		s.Mean += ms(d) / float64(len(times))
	}
	s.P50, s.P90, s.P95, s.P99, s.Max = at(0.50), at(0.90), at(0.95), at(0.99), at(1)
	return s
}
