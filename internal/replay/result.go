package replay

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
)

// Report holds the measurements on one trace.
type Report struct {
	Trace         string  `json:"trace"`
	Requests      int     `json:"requests"`
	IdealHitRatio float64 `json:"ideal_hit_ratio"`
	Model         string  `json:"model"`
	Load          float64 `json:"load"`
	Speed         float64 `json:"speed"` // how many times faster than recorded requests arrived
	TTFTLimit     float64 `json:"slo_ttft_ms"`
	ITLLimit      float64 `json:"slo_itl_ms"`
	Rows          []*Row  `json:"rows"`

	Config  Config    `json:"-"`
	Results []*Result `json:"-"` // of the rows
}

// Row holds the figures of one policy. Times are those of the client: from the
// request's arrival to the first token, and between two tokens of an answer.
type Row struct {
	Policy        string  `json:"policy"`
	Requests      int     `json:"requests"`
	TTFTP50       float64 `json:"ttft_p50_ms"`
	TTFTP95       float64 `json:"ttft_p95_ms"`
	TTFTP99       float64 `json:"ttft_p99_ms"`
	TTFTMean      float64 `json:"ttft_mean_ms"`
	ITLP50        float64 `json:"itl_p50_ms"`
	ITLP99        float64 `json:"itl_p99_ms"`
	Throughput    float64 `json:"throughput_rps"` // requests a second, from the first arrival to the last answer
	Goodput       float64 `json:"goodput_rps"`    // of these, those within both limits
	GoodRatio     float64 `json:"good_ratio"`     // their share
	HitRatio      float64 `json:"hit_ratio"`      // prompt blocks found on the chosen rank as prefill began, of all
	LoadCV        float64 `json:"load_cv"`        // over prefill ranks, of uncached blocks computed
	LoadMaxMin    float64 `json:"load_max_min"`   // of the same; a rank without any counts as 1
	RoutedCV      float64 `json:"routed_cv"`      // over prefill ranks, of requests
	RoutedMaxMin  float64 `json:"routed_max_min"`
	DecisionsPerS float64 `json:"decisions_per_s"` // facts, matching and the policy; real time
	// Predicted is the share of the times to first token within 20 % of their
	// prediction, of requests that had one; null if no request had one.
	Predicted *float64 `json:"predicted_within_20,omitempty"`
	Fallbacks int      `json:"fallbacks"` // decisions that the policy did not make, or made wrongly
	// Scores are the scorers of a policy that has a set of scorers.
	Scores []ScoreRow `json:"scores,omitempty"`

	UncachedBlocks []int `json:"uncached_blocks"` // computed, by prefill rank
	Routed         []int `json:"routed"`          // requests, by prefill rank
}

// Result is a row with the data for plots.
type Result struct {
	Row
	ttft  []time.Duration // sorted
	queue []sample
}

// Report joins the results of runs of this lab.
func (l *Lab) Report(results []*Result) *Report {
	r := &Report{
		Trace: l.trace.Name, Requests: len(l.trace.Requests), IdealHitRatio: l.trace.IdealHitRatio,
		Model: l.cfg.Model.Name, Load: l.cfg.Load, Speed: l.Speed(),
		TTFTLimit: l.cfg.Model.TTFTMillis, ITLLimit: l.cfg.Model.ITLMillis,
		Config: l.cfg, Results: results,
	}
	for _, result := range results {
		r.Rows = append(r.Rows, &result.Row)
	}
	return r
}

// result computes the result of a run.
func (l *Lab) result(name string, r *run) *Result {
	res := &Result{Row: Row{Policy: name, Requests: len(r.jobs), Fallbacks: r.view.fallbacks}, queue: r.queue}
	var (
		last, sum time.Duration
		good      int
	)
	for i := range r.jobs {
		j := &r.jobs[i]
		ttft := j.first - j.arrived
		res.ttft = append(res.ttft, ttft)
		sum += ttft
		last = max(last, j.ended)
		within := millis(ttft) <= l.cfg.Model.TTFTMillis
		if n := j.OutputLength - 1; n > 0 {
			within = within && millis(j.ended-j.first)/float64(n) <= l.cfg.Model.ITLMillis
		}
		if within {
			good++
		}
	}
	slices.Sort(res.ttft)
	n := float64(len(r.jobs))
	res.TTFTP50, res.TTFTP95, res.TTFTP99 = millis(plot.Quantile(res.ttft, .5)), millis(plot.Quantile(res.ttft, .95)), millis(plot.Quantile(res.ttft, .99))
	res.TTFTMean = millis(sum) / n
	res.ITLP50, res.ITLP99 = between(r.steps)
	res.Throughput, res.Goodput, res.GoodRatio = n/last.Seconds(), float64(good)/last.Seconds(), float64(good)/n
	if l.trace.Blocks > 0 {
		res.HitRatio = float64(r.hits) / float64(l.trace.Blocks)
	}
	for _, p := range r.ranks {
		res.UncachedBlocks = append(res.UncachedBlocks, p.uncached)
		res.Routed = append(res.Routed, p.routed)
	}
	res.LoadCV, res.LoadMaxMin = spread(res.UncachedBlocks)
	res.RoutedCV, res.RoutedMaxMin = spread(res.Routed)
	res.Predicted, res.Scores = r.view.predicted.share(), r.view.scored.result()
	res.DecisionsPerS = n / max(r.view.deciding, 1).Seconds()
	return res
}

// between returns the median and the 99th percentile of the times between
// tokens, each token counted; 0 without an answer of two tokens.
func between(steps []weighted) (p50, p99 float64) {
	steps = slices.Clone(steps)
	slices.SortFunc(steps, func(a, b weighted) int { return cmp.Compare(a.took, b.took) })
	all := 0
	for _, s := range steps {
		all += s.tokens
	}
	if all == 0 {
		return 0, 0
	}
	sum, half, most := 0, (all+1)/2, all-all/100
	for _, s := range steps {
		if sum < half && sum+s.tokens >= half {
			p50 = millis(s.took)
		}
		if sum < most && sum+s.tokens >= most {
			p99 = millis(s.took)
		}
		sum += s.tokens
	}
	return p50, p99
}

// spread returns the coefficient of variation of counts, and the ratio of the
// largest to the smallest.
func spread(counts []int) (cv, maxMin float64) {
	var sum, squares float64
	for _, c := range counts {
		sum += float64(c)
		squares += float64(c) * float64(c)
	}
	n := float64(len(counts))
	if mean := sum / n; mean > 0 {
		cv = math.Sqrt(max(0, squares/n-mean*mean)) / mean
	}
	return cv, float64(slices.Max(counts)) / float64(max(1, slices.Min(counts)))
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
