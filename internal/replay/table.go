package replay

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/pdproxy/pdproxy/internal/plot"
)

// WriteTable writes the report as a table for readers.
func (r *Report) WriteTable(w io.Writer) error {
	c := &r.Config
	fmt.Fprintf(w, "%s: %d requests, %.1f times as fast as recorded, load %.2f\n", r.Trace, r.Requests, r.Speed, r.Load)
	fmt.Fprintf(w, "%s: %d x %d prefill ranks of %d blocks, %d decode; ideal hit ratio %.4f\n\n",
		r.Model, c.Prefill, c.Ranks, c.BlocksPerRank, c.Decode, r.IdealHitRatio)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\tTTFT p50\tp95\tp99\tITL p50\tp99\treq/s\tgood/s\tgood\thits\tof ideal\tload CV\tmax/min\tdecisions/s\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%.2f\t%.2f\t%.1f%%\t%.4f\t%.1f%%\t%.3f\t%.2f\t%.0f\t\n",
			row.Policy, plot.Milliseconds(row.TTFTP50), plot.Milliseconds(row.TTFTP95), plot.Milliseconds(row.TTFTP99), plot.Milliseconds(row.ITLP50), plot.Milliseconds(row.ITLP99),
			row.Throughput, row.Goodput, 100*row.GoodRatio, row.HitRatio, 100*r.ofIdeal(row), row.LoadCV, row.LoadMaxMin, row.DecisionsPerS)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, row := range r.Rows {
		if row.Predicted != nil {
			fmt.Fprintf(w, "\n%s: %.1f%% of the times to first token are within 20 %% of their prediction\n", row.Policy, 100**row.Predicted)
		}
		if row.Fallbacks > 0 {
			fmt.Fprintf(w, "\n%s left %d of %d decisions to least_load\n", row.Policy, row.Fallbacks, row.Requests)
		}
	}
	if err := r.writeScores(w); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\ngood: first token within %s, then %s a token on average\n", plot.Milliseconds(r.TTFTLimit), plot.Milliseconds(r.ITLLimit))
	return err
}

// ofIdeal returns a policy's share of the possible hits.
func (r *Report) ofIdeal(row *Row) float64 {
	if r.IdealHitRatio == 0 {
		return 0
	}
	return row.HitRatio / r.IdealHitRatio
}
