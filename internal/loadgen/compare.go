package loadgen

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
)

// Comparison is that of two runs.
type Comparison struct {
	Run         string       `json:"run,omitempty"` // label of both runs, if it is the same
	Differences []Difference `json:"differences"`
}

// Difference is that of one figure. Interval contains the true change with a confidence
// of 95 %, as far as the choice of requests causes it; nil for figures of which a run
// has one value only, and where the requests are too few.
type Difference struct {
	Name     string      `json:"name"`
	A        float64     `json:"a"`
	B        float64     `json:"b"`
	Change   *float64    `json:"change,omitempty"` // of B relative to A: 0.1 is 10 % more; nil if A is 0
	Interval *[2]float64 `json:"interval,omitempty"`
	Verdict  string      `json:"verdict"`
}

// The verdicts.
const (
	VerdictHigher = "higher"
	VerdictLower  = "lower"
	VerdictSame   = "no difference shown"
	VerdictNone   = "not tested"
)

// resamples is the number of random samples that give an interval. leastRequests is the
// number of requests that an interval needs in each run.
const (
	resamples     = 1000
	leastRequests = 20
)

// CompareRuns compares the runs of two files. Files of one run each are compared
// whatever their labels; of others, the runs with the same label.
func CompareRuns(a, b []*Result) ([]Comparison, error) {
	if len(a) == 1 && len(b) == 1 {
		c := Compare(a[0], b[0])
		if a[0].Run == b[0].Run {
			c.Run = a[0].Run
		}
		return []Comparison{c}, nil
	}
	var all []Comparison
	for _, x := range a {
		for _, y := range b {
			if x.Run == y.Run {
				c := Compare(x, y)
				c.Run = x.Run
				all = append(all, c)
			}
		}
	}
	if all == nil {
		return nil, errors.New("no run occurs in both files")
	}
	return all, nil
}

// Compare compares two runs. The same runs give the same result.
//
// The intervals are those of a bootstrap: the requests of each run are drawn again with
// replacement, in blocks of neighbours, because requests that are open at the same time
// delay each other. The gaps of a request stay together.
func Compare(a, b *Result) Comparison {
	c := Comparison{Differences: []Difference{
		once("requests/s", a.Throughput, b.Throughput),
		once("output tokens/s", a.OutputThroughput, b.OutputThroughput),
	}}
	if a.Limits != nil && b.Limits != nil {
		c.Differences = append(c.Differences, once("good requests/s", a.Goodput, b.Goodput))
	}
	x, y := figures(a), figures(b)
	base, changes := x.measure(ones(len(a.Samples))), make([][]float64, len(x.names))
	other := y.measure(ones(len(b.Samples)))
	if len(a.Samples) >= leastRequests && len(b.Samples) >= leastRequests {
		random := rand.New(rand.NewPCG(1, 17))
		for range resamples {
			from, to := x.measure(draw(random, len(a.Samples))), y.measure(draw(random, len(b.Samples)))
			for i := range changes {
				if from[i] > 0 {
					changes[i] = append(changes[i], to[i]/from[i]-1)
				}
			}
		}
	}
	for i, name := range x.names {
		d := once(name, base[i], other[i])
		d.judge(changes[i])
		c.Differences = append(c.Differences, d)
	}
	return c
}

// once returns the difference of figures of which each run has one value.
func once(name string, a, b float64) Difference {
	d := Difference{Name: name, A: a, B: b, Verdict: VerdictNone}
	if a > 0 {
		change := b/a - 1
		d.Change = &change
	}
	return d
}

// judge sets the interval and the verdict, if almost all samples gave a change.
func (d *Difference) judge(changes []float64) {
	if d.Change == nil || len(changes) < resamples*95/100 {
		return
	}
	slices.Sort(changes)
	n := float64(len(changes) - 1)
	d.Interval = &[2]float64{changes[int(math.Floor(.025*n))], changes[int(math.Ceil(.975*n))]}
	switch {
	case d.Interval[0] > 0:
		d.Verdict = VerdictHigher
	case d.Interval[1] < 0:
		d.Verdict = VerdictLower
	default:
		d.Verdict = VerdictSame
	}
}

// values are measured values in ascending order with the index of the request of each.
type values []owned

type owned struct {
	ms      float64
	request int
}

// population holds the values of a run from which its figures are computed.
type population struct {
	names  []string
	values []values
}

// quantiles of each kind of times, besides the mean.
var quantiles = []float64{.5, .95, .99}

// figures returns the population of a run.
func figures(r *Result) *population {
	p := &population{}
	var ttft, tpot, itl, total values
	for i := range r.Samples {
		s := &r.Samples[i]
		if s.Failure != "" {
			continue
		}
		if s.First > 0 {
			ttft = append(ttft, owned{s.First, i})
		}
		if ms, ok := s.perToken(); ok {
			tpot = append(tpot, owned{ms, i})
		}
		for _, gap := range s.Gaps {
			itl = append(itl, owned{gap, i})
		}
		total = append(total, owned{s.Total, i})
	}
	for i, v := range []values{ttft, tpot, itl, total} {
		slices.SortFunc(v, func(a, b owned) int { return cmp.Compare(a.ms, b.ms) })
		kind := []string{"TTFT", "TPOT", "ITL", "whole answer"}[i]
		for _, of := range []string{"mean", "p50", "p95", "p99"} {
			p.names = append(p.names, kind+" "+of)
		}
		p.values = append(p.values, v)
	}
	return p
}

// measure returns the figures, if request i occurs weights[i] times.
func (p *population) measure(weights []int) (figures []float64) {
	for _, v := range p.values {
		figures = append(figures, v.measure(weights)...)
	}
	return figures
}

// measure returns the mean and the quantiles; zeros without values.
func (v values) measure(weights []int) []float64 {
	out, all, sum := make([]float64, 1+len(quantiles)), 0, 0.0
	for _, o := range v {
		all += weights[o.request]
		sum += float64(weights[o.request]) * o.ms
	}
	if all == 0 {
		return out
	}
	out[0] = sum / float64(all)
	seen, next := 0, 0
	for _, o := range v {
		seen += weights[o.request]
		for next < len(quantiles) && seen >= max(1, int(math.Ceil(quantiles[next]*float64(all)))) {
			next++
			out[next] = o.ms
		}
	}
	return out
}

func ones(n int) []int {
	w := make([]int, n)
	for i := range w {
		w[i] = 1
	}
	return w
}

// draw returns how often each of n requests occurs in a sample of n, drawn in blocks of
// neighbours. The block after the last request begins with the first.
func draw(random *rand.Rand, n int) []int {
	w := make([]int, n)
	block := int(math.Ceil(math.Cbrt(float64(n))))
	for drawn := 0; drawn < n; {
		at := random.IntN(n)
		for range min(block, n-drawn) {
			w[at%n]++
			at++
			drawn++
		}
	}
	return w
}
