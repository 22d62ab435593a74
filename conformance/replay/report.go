package replay

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
)

//go:embed report.html
var page string

// colors are the colors of policies on light and on dark pages.
var colors = [...]string{
	"#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#38b2c0",
	"#e15fa6", "#9c6b4e", "#7d8597", "#6b8e23", "#b8336a", "#2f7f6f",
}

// WriteHTML writes the reports as one page without external parts.
func WriteHTML(w io.Writer, reports []*Report) error {
	t, err := template.New("report").Funcs(template.FuncMap{
		"color": color, "short": short,
		"percent": func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) },
	}).Parse(page)
	if err != nil {
		return err
	}
	return t.Execute(w, reports)
}

func color(i int) string { return colors[i%len(colors)] }

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
	p := newPlot("Time to first token", 340)
	least, most := math.Inf(1), 0.0
	for _, result := range r.Results {
		least = min(least, millis(quantile(result.ttft, .01)))
		most = max(most, millis(result.ttft[len(result.ttft)-1]))
	}
	p.x.logarithmic, p.x.from, p.x.to = true, max(least, .1), max(most, least*1.01, .2)
	p.y.from, p.y.to = 0, 1
	p.axes("time to first token", "share of requests", short, percent)
	if limit := r.TTFTLimit; limit > p.x.from && limit < p.x.to {
		p.mark(limit, "limit "+short(limit))
	}
	for i, result := range r.Results {
		var points [][2]float64
		for n := 1; n <= 400; n++ {
			q := float64(n) / 400
			points = append(points, [2]float64{millis(quantile(result.ttft, q)), q})
		}
		p.line(color(i), result.Policy, points)
	}
	return template.HTML(p.end())
}

// HitPlot draws the hit ratios and the ideal one.
func (r *Report) HitPlot() template.HTML {
	p := r.rowPlot("Hit ratio")
	p.x.from, p.x.to = 0, max(r.IdealHitRatio*1.15, .01)
	p.axes("share of prompt blocks found in the rank's cache", "", percent, nil)
	for i, row := range r.Rows {
		p.bar(i, color(i), row.HitRatio, fmt.Sprintf("%.1f %% (%.0f %% of ideal)", 100*row.HitRatio, 100*r.ofIdeal(row)))
	}
	p.mark(r.IdealHitRatio, fmt.Sprintf("ideal %.1f %%", 100*r.IdealHitRatio))
	return template.HTML(p.end())
}

// LoadPlot draws the computed blocks of each prefill rank.
func (r *Report) LoadPlot() template.HTML {
	p := r.rowPlot("Load of prefill ranks")
	least, most := math.MaxInt, 0
	for _, row := range r.Rows {
		least, most = min(least, slices.Min(row.UncachedBlocks)), max(most, slices.Max(row.UncachedBlocks))
	}
	margin := max(1, float64(most-least)*.04)
	p.x.from, p.x.to = max(0, float64(least)-margin), float64(most)+margin
	p.axes("uncached blocks computed by each rank", "", count, nil)
	for i, row := range r.Rows {
		for rank, n := range row.UncachedBlocks {
			p.dot(i, color(i), float64(n), fmt.Sprintf("%s: instance %d rank %d computed %d blocks for %d requests",
				row.Policy, rank/r.Config.Ranks, rank%r.Config.Ranks, n, row.Routed[rank]))
		}
	}
	return template.HTML(p.end())
}

// rowPlot begins a plot with a row for each policy.
func (r *Report) rowPlot(label string) *plot {
	p := newPlot(label, float64(len(r.Rows)*rowHeight))
	p.x.start = 190
	for i, row := range r.Rows {
		name := row.Policy
		if n := len(name); n > 26 {
			name = "…" + name[n-25:]
		}
		p.rowName(i, name)
	}
	return p
}

// QueuePlot draws the number of requests that waited for their prefill.
func (r *Report) QueuePlot() template.HTML {
	p := newPlot("Requests waiting for prefill", 300)
	most := 1
	for _, result := range r.Results {
		last := result.queue[len(result.queue)-1].at
		p.x.to = max(p.x.to, last.Seconds())
		for _, s := range result.queue {
			most = max(most, s.prefill)
		}
	}
	// One more than the number, so that 0 has a place on the scale.
	p.y.logarithmic, p.y.from, p.y.to = true, 1, float64(most)*1.2+1
	p.x.to = max(p.x.to, 1e-3)
	p.axes("seconds since the first arrival", "requests waiting", count, nil)
	for _, v := range (&scale{from: 1, to: p.y.to, logarithmic: true}).decades(100) {
		waiting := v
		if v == 1 {
			waiting = 0
		}
		if y := p.y.at(waiting + 1); y >= p.y.end && (v == 1 || isPower(v) || most < 50) {
			fmt.Fprintf(p, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`, p.x.start, p.x.end, y, y)
			p.text(p.x.start-8, y+4, "end", "tick", count(waiting))
		}
	}
	for i, result := range r.Results {
		var points [][2]float64
		for _, s := range result.queue {
			points = append(points, [2]float64{s.at.Seconds(), float64(s.prefill + 1)})
		}
		p.line(color(i), result.Policy, points)
	}
	return template.HTML(p.end())
}

func isPower(v float64) bool { return math.Abs(math.Log10(v)-math.Round(math.Log10(v))) < 1e-9 }

func percent(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }

func count(v float64) string {
	if v >= 10000 {
		return fmt.Sprintf("%gk", math.Round(v/100)/10)
	}
	return fmt.Sprintf("%g", math.Round(v*100)/100)
}
