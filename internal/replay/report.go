package replay

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"

	"github.com/pdproxy/pdproxy/internal/plot"
)

//go:embed report.html
var page string

// WriteHTML writes the reports as one page without external parts.
func WriteHTML(w io.Writer, reports []*Report) error {
	t, err := template.New("report").Funcs(template.FuncMap{
		"color": plot.Color, "short": plot.Milliseconds, "style": plot.Style,
		"percent": func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) },
	}).Parse(page)
	if err != nil {
		return err
	}
	return t.Execute(w, reports)
}

// OfIdeal returns a row's share of the possible hits.
func (r *Report) OfIdeal(row *Row) float64 { return r.ofIdeal(row) }

// Best reports whether v is the best value of a column of the page's table.
func (r *Report) Best(column string, v float64) bool {
	for _, row := range r.Rows {
		switch column {
		case "ttft_p50":
			if row.TTFTP50 < v {
				return false
			}
		case "ttft_p95":
			if row.TTFTP95 < v {
				return false
			}
		case "ttft_p99":
			if row.TTFTP99 < v {
				return false
			}
		case "good":
			if row.Goodput > v {
				return false
			}
		case "hits":
			if row.HitRatio > v {
				return false
			}
		case "cv":
			if row.LoadCV < v {
				return false
			}
		}
	}
	return len(r.Rows) > 1
}

// TTFTPlot draws the number of requests by their time to first token.
func (r *Report) TTFTPlot() template.HTML {
	var curves []plot.Curve
	for _, result := range r.Results {
		var ms []float64
		for _, d := range result.ttft {
			ms = append(ms, millis(d))
		}
		curves = append(curves, plot.Curve{Name: result.Policy, Sorted: ms})
	}
	return plot.Shares("Time to first token", "time to first token", curves, r.TTFTLimit)
}

// HitPlot draws the hit ratios and the ideal one.
func (r *Report) HitPlot() template.HTML {
	p := r.rowPlot("Hit ratio")
	p.X.From, p.X.To = 0, max(r.IdealHitRatio*1.15, .01)
	p.Axes("share of prompt blocks found in the rank's cache", "", plot.TickPercent, nil)
	for i, row := range r.Rows {
		p.Bar(i, plot.Color(i), row.HitRatio, fmt.Sprintf("%.1f %% (%.0f %% of ideal)", 100*row.HitRatio, 100*r.ofIdeal(row)))
	}
	p.Mark(r.IdealHitRatio, fmt.Sprintf("ideal %.1f %%", 100*r.IdealHitRatio))
	return p.HTML()
}

// LoadPlot draws the computed blocks of each prefill rank.
func (r *Report) LoadPlot() template.HTML {
	p := r.rowPlot("Load of prefill ranks")
	least, most := math.MaxInt, 0
	for _, row := range r.Rows {
		least, most = min(least, slices.Min(row.UncachedBlocks)), max(most, slices.Max(row.UncachedBlocks))
	}
	margin := max(1, float64(most-least)*.04)
	p.X.From, p.X.To = max(0, float64(least)-margin), float64(most)+margin
	p.Axes("uncached blocks computed by each rank", "", plot.TickCount, nil)
	for i, row := range r.Rows {
		for rank, n := range row.UncachedBlocks {
			p.Dot(i, plot.Color(i), float64(n), fmt.Sprintf("%s: instance %d rank %d computed %d blocks for %d requests",
				row.Policy, rank/r.Config.Ranks, rank%r.Config.Ranks, n, row.Routed[rank]))
		}
	}
	return p.HTML()
}

// rowPlot begins a plot with a row for each policy.
func (r *Report) rowPlot(label string) *plot.Plot {
	var names []string
	for _, row := range r.Rows {
		names = append(names, row.Policy)
	}
	return plot.NewRows(label, names)
}

// QueuePlot draws the number of requests that waited for their prefill.
func (r *Report) QueuePlot() template.HTML {
	var curves []plot.Series
	for _, result := range r.Results {
		var points [][2]float64
		for _, s := range result.queue {
			points = append(points, [2]float64{s.at.Seconds(), float64(s.prefill)})
		}
		curves = append(curves, plot.Series{Name: result.Policy, Points: points})
	}
	return plot.Counts("Requests waiting for prefill", "seconds since the first arrival", "requests waiting", curves)
}
