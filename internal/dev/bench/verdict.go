package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
)

var errSlower = errors.New("the working tree is slower")

// leastRounds is the number of rounds from which on interval has a meaning.
const leastRounds = 8

// interval returns the median of the ratios and an interval that contains the true one with a
// confidence of 99 %, by the signed ranks of Wilcoxon (Hodges and Lehmann): disturbed rounds change
// both little. It needs leastRounds.
func interval(ratios []float64) (median, from, to float64) {
	var means []float64
	for i, a := range ratios {
		for _, b := range ratios[i:] {
			means = append(means, math.Sqrt(a*b))
		}
	}
	slices.Sort(means)
	n, m := float64(len(ratios)), len(means)
	k := int(max(0, math.Floor(float64(m)/2-2.576*math.Sqrt(n*(n+1)*(2*n+1)/24))))
	return (means[(m-1)/2] + means[m/2]) / 2, means[k], means[m-1-k]
}

// Verdicts of a row.
const (
	faster  = "faster"
	equal   = "equal"
	slower  = "slower"
	unclear = "unclear"
)

// judge returns the verdict, and whether more rounds would not change it.
func (c *checker) judge(r *checkRow) (verdict string, sure bool) {
	if len(r.rounds) < leastRounds {
		return unclear, false
	}
	ratio, from, to := interval(r.ratios())
	switch narrow := (to - from) / 2; {
	case from > 1 && ratio >= 1+c.threshold:
		return slower, true
	case to < 1 && ratio <= 1-c.threshold:
		return faster, true
	case narrow <= c.threshold && math.Abs(ratio-1) < c.threshold:
		return equal, true
	}
	return unclear, false
}

func (r *checkRow) ratios() (ratios []float64) {
	for _, pair := range r.rounds {
		ratios = append(ratios, pair[1].cpu/pair[0].cpu)
	}
	return ratios
}

// print writes the rows. It returns an error if one is slower or failed.
func (c *checker) print(w io.Writer, base string) (err error) {
	fmt.Fprintf(w, "%s\n%s and the working tree: medians of CPU, system calls, instructions and allocations of a request or an event\n", machine(), base)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tµs\tcalls\tinstructions\tallocations\trounds\tchange (99 %)\tverdict")
	for _, r := range c.rows {
		if r.failed != nil {
			fmt.Fprintf(t, "%s\t\t\t\t\t%d\t\tfailed: %v\n", r.name, len(r.rounds), r.failed)
			err = cmp.Or(err, fmt.Errorf("%s: %w", r.name, r.failed))
			continue
		}
		both := func(of func(figures) float64) string {
			var values [2][]float64
			for _, pair := range r.rounds {
				for i := range pair {
					values[i] = append(values[i], of(pair[i]))
				}
			}
			return figure(median(values[0])) + " " + figure(median(values[1]))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t", r.name, both(func(f figures) float64 { return f.cpu }), both(func(f figures) float64 { return f.calls }),
			both(func(f figures) float64 { return f.instructions }), both(func(f figures) float64 { return f.mallocs }), len(r.rounds))
		verdict, _ := c.judge(r)
		if len(r.rounds) >= leastRounds {
			ratio, from, to := interval(r.ratios())
			fmt.Fprintf(t, "%+.1f %% (%+.1f to %+.1f)", 100*(ratio-1), 100*(from-1), 100*(to-1))
		}
		fmt.Fprintf(t, "\t%s\n", verdict)
		if verdict == slower {
			err = cmp.Or(err, errSlower)
		}
	}
	return cmp.Or(t.Flush(), err)
}
