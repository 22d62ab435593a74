package loadgen

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/internal/plot"
)

//go:embed report.html
var page string

// Report is the page of one or more runs.
type Report struct {
	Title string
	// Facts are the conditions of the runs, each a name and a value.
	Facts [][2]string
	Runs  []*Result
	// Comparisons are those of two runs, if the page compares them.
	Comparisons []Comparison
}

// WriteHTML writes the report as one page without external parts.
func (r *Report) WriteHTML(w io.Writer) error {
	t, err := template.New("report").Funcs(template.FuncMap{
		"color": plot.Color, "ms": plot.Milliseconds, "style": plot.Style, "change": Percent,
		"percent": func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) },
	}).Parse(page)
	if err != nil {
		return err
	}
	return t.Execute(w, r)
}

// Percent writes a change, such as +3.1 %.
func Percent(v float64) string { return fmt.Sprintf("%+.1f %%", 100*v) }

// Limits returns the limits of good requests, nil if there are none.
func (r *Report) Limits() *Limits {
	for _, run := range r.Runs {
		if run.Limits != nil {
			return run.Limits
		}
	}
	return nil
}

// TTFTPlot draws the number of requests by their time to first token.
func (r *Report) TTFTPlot() template.HTML {
	limit := 0.0
	if l := r.Limits(); l != nil {
		limit = l.TTFT
	}
	return plot.Shares("Time to first token", "time to first token", r.curves(func(s *Sample) (float64, bool) { return s.First, s.First > 0 }), limit)
}

// TPOTPlot draws the number of requests by their mean time between tokens.
func (r *Report) TPOTPlot() template.HTML {
	limit := 0.0
	if l := r.Limits(); l != nil {
		limit = l.ITL
	}
	return plot.Shares("Time of each token after the first", "mean time of each token after the first", r.curves((*Sample).perToken), limit)
}

// curves returns the values of the complete answers of each run.
func (r *Report) curves(value func(*Sample) (float64, bool)) (curves []plot.Curve) {
	for _, run := range r.Runs {
		c := plot.Curve{Name: run.Run}
		for i := range run.Samples {
			if v, ok := value(&run.Samples[i]); ok && run.Samples[i].Failure == "" {
				c.Sorted = append(c.Sorted, v)
			}
		}
		slices.Sort(c.Sorted)
		curves = append(curves, c)
	}
	return curves
}

// openSamples is the number of points of a curve of open requests.
const openSamples = 240

// OpenPlot draws the number of requests that were due and had not ended.
func (r *Report) OpenPlot() template.HTML {
	var curves []plot.Series
	for _, run := range r.Runs {
		var begins, ends []float64
		for i := range run.Samples {
			begins = append(begins, run.Samples[i].Scheduled)
			ends = append(ends, run.Samples[i].Scheduled+run.Samples[i].Total)
		}
		slices.Sort(begins)
		slices.Sort(ends)
		c := plot.Series{Name: run.Run}
		for n := 0; n <= openSamples && len(ends) > 0; n++ {
			t := ends[len(ends)-1] * float64(n) / openSamples
			begun, _ := slices.BinarySearch(begins, t)
			ended, _ := slices.BinarySearch(ends, t)
			c.Points = append(c.Points, [2]float64{t / 1000, float64(begun - ended)})
		}
		curves = append(curves, c)
	}
	return plot.Counts("Open requests", "seconds since the run began", "open requests", curves)
}

// GoodPlot draws the good requests of each run beside all of its requests per second.
func (r *Report) GoodPlot() template.HTML {
	var names []string
	most := 0.0
	for _, run := range r.Runs {
		names = append(names, run.Run)
		most = max(most, run.Goodput)
	}
	p := plot.NewRows("Good requests per second", names)
	p.X.From, p.X.To = 0, max(most*1.15, .01)
	p.Axes("good requests per second", "", plot.TickCount, nil)
	for i, run := range r.Runs {
		p.Bar(i, plot.Color(i), run.Goodput, fmt.Sprintf("%.2f (%.0f %% of requests)", run.Goodput, 100*run.GoodRatio))
	}
	return p.HTML()
}

// LimitText describes a good request.
func (r *Report) LimitText() string {
	var parts []string
	l := r.Limits()
	for _, limit := range []struct {
		name string
		ms   float64
	}{{"first token", l.TTFT}, {"each further token on average", l.ITL}, {"whole answer", l.Total}} {
		if limit.ms > 0 {
			parts = append(parts, limit.name+" ≤ "+plot.Milliseconds(limit.ms))
		}
	}
	return strings.Join(parts, ", ")
}
