package loadgen

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
)

// Result holds the measurements of a run. Times are those of complete answers only, in
// milliseconds. They count from the time at which the request was due, unless their name
// ends in sent: those count from the time at which it was sent.
type Result struct {
	Run      string         `json:"run,omitempty"` // its label
	Requests int            `json:"requests"`      // that ended
	Failed   int            `json:"failed"`
	Failures map[string]int `json:"failures"` // by reason
	// Skipped are turns of conversations that were not sent because an earlier turn failed.
	Skipped int     `json:"skipped"`
	Seconds float64 `json:"duration_s"`

	Throughput       float64 `json:"throughput_rps"` // complete answers per second
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens"`
	OutputTokens     int     `json:"output_tokens"`
	OutputThroughput float64 `json:"output_tokens_per_s"`

	TTFT      Spread `json:"ttft_ms"` // until the first event that the model wrote
	TPOT      Spread `json:"tpot_ms"` // mean time of each token after the first, one value a request
	ITL       Spread `json:"itl_ms"`  // between events that the model wrote; an event may have several tokens
	Total     Spread `json:"e2e_ms"`  // until the end of the answer
	TTFTSent  Spread `json:"ttft_sent_ms"`
	TotalSent Spread `json:"e2e_sent_ms"`
	Late      Spread `json:"late_ms"` // from the time at which a request was due until it was sent

	// Limits are those of a good request; nil without limits. Good requests are complete
	// and within all limits. Goodput is their number per second.
	Limits    *Limits `json:"slo,omitempty"`
	Good      int     `json:"good,omitempty"`
	GoodRatio float64 `json:"good_ratio,omitempty"`
	Goodput   float64 `json:"goodput_rps,omitempty"`

	Samples []Sample `json:"-"` // in the order in which the requests were due
}

// MarshalJSON writes the figures of good requests whenever there are limits, even if they are 0, and
// omits them otherwise.
func (r Result) MarshalJSON() ([]byte, error) {
	type plain Result // without this method
	out := struct {
		plain
		Good      *int     `json:"good,omitempty"`
		GoodRatio *float64 `json:"good_ratio,omitempty"`
		Goodput   *float64 `json:"goodput_rps,omitempty"`
	}{plain: plain(r)}
	if r.Limits != nil {
		out.Good, out.GoodRatio, out.Goodput = &r.Good, &r.GoodRatio, &r.Goodput
	}
	return json.Marshal(out)
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

// summarize computes the result of a run. It sorts the samples.
func summarize(c *Config, samples []Sample, skipped int, took time.Duration) *Result {
	slices.SortStableFunc(samples, func(a, b Sample) int { return cmp.Compare(a.Scheduled, b.Scheduled) })
	r := &Result{Run: c.Label, Requests: len(samples), Failures: map[string]int{}, Skipped: skipped, Seconds: took.Seconds(), Samples: samples}
	var v [7][]float64
	add := func(i int, ms float64) { v[i] = append(v[i], ms) }
	for i := range samples {
		s := &samples[i]
		if s.Failure != "" {
			r.Failed++
			r.Failures[s.Failure]++
			continue
		}
		if s.First > 0 {
			add(0, s.First)
			add(4, s.First-s.Late)
		}
		if ms, ok := s.perToken(); ok {
			add(1, ms)
		}
		v[2] = append(v[2], s.Gaps...)
		add(3, s.Total)
		add(5, s.Total-s.Late)
		add(6, s.Late)
		r.PromptTokens += s.Prompt
		r.CachedTokens += s.Cached
		r.OutputTokens += s.Output
		if c.Limits.within(s) {
			r.Good++
		}
	}
	for i, to := range []*Spread{&r.TTFT, &r.TPOT, &r.ITL, &r.Total, &r.TTFTSent, &r.TotalSent, &r.Late} {
		*to = NewSpread(v[i])
	}
	if r.Seconds > 0 {
		r.Throughput = float64(r.Requests-r.Failed) / r.Seconds
		r.OutputThroughput = float64(r.OutputTokens) / r.Seconds
	}
	r.judge(c.Limits)
	return r
}

// judge sets the figures of good requests, or removes their number where there are no
// limits.
func (r *Result) judge(limits Limits) {
	if limits == (Limits{}) {
		r.Good = 0
		return
	}
	r.Limits = &limits
	if r.Requests > 0 {
		r.GoodRatio = float64(r.Good) / float64(r.Requests)
	}
	if r.Seconds > 0 {
		r.Goodput = float64(r.Good) / r.Seconds
	}
}

// NewSpread sorts times in milliseconds and returns their distribution: the p-th percentile is the
// smallest time that is at least as large as p percent of them.
func NewSpread(ms []float64) (s Spread) {
	if len(ms) == 0 {
		return s
	}
	slices.Sort(ms)
	at := func(p float64) float64 { return plot.Quantile(ms, p) }
	for _, v := range ms {
		s.Mean += v / float64(len(ms))
	}
	s.P50, s.P90, s.P95, s.P99, s.Max = at(0.50), at(0.90), at(0.95), at(0.99), at(1)
	return s
}
