package plot

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"math"
	"time"
)

// namespace is the name of SVG. An SVG that is a file of its own must have it.
const namespace = "http://www.w3.org/2000/svg"

//go:embed style.css
var style string

// Style returns the stylesheet of pages and plots.
func Style() template.CSS { return template.CSS(style) }

// colors are visible on light and on dark pages.
var colors = [...]string{
	"#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#38b2c0",
	"#e15fa6", "#9c6b4e", "#7d8597", "#6b8e23", "#b8336a", "#2f7f6f",
}

// Color returns the color of the i-th curve of a page.
func Color(i int) string { return colors[i%len(colors)] }

// Milliseconds writes a time in milliseconds with about three digits.
func Milliseconds(ms float64) string {
	d := time.Duration(ms * float64(time.Millisecond))
	switch {
	case d >= 100*time.Second:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d >= 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case ms >= 100:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f ms", ms)
}

// Percent writes a share in whole percent.
func Percent(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }

// Count writes a number, thousands with a k.
func Count(v float64) string {
	if v >= 10000 {
		return fmt.Sprintf("%gk", math.Round(v/100)/10)
	}
	return fmt.Sprintf("%g", math.Round(v*100)/100)
}

// Curve is the distribution of one row: its times in milliseconds, in ascending order. A
// curve without times is not drawn.
type Curve struct {
	Name   string
	Sorted []float64
}

// Series is a value over the time, or over another value.
type Series struct {
	Name   string
	Points [][2]float64
}

// Shares draws for each time the share of values up to it. limit, in milliseconds, is
// marked if it is in the field. Colors are in the order of the curves.
func Shares(label, xLabel string, curves []Curve, limit float64) template.HTML {
	const points = 400
	p := New(label, 340)
	least, most := math.Inf(1), 0.0
	for _, c := range curves {
		if len(c.Sorted) > 0 {
			least, most = min(least, Quantile(c.Sorted, .01)), max(most, c.Sorted[len(c.Sorted)-1])
		}
	}
	if math.IsInf(least, 1) {
		least = 1
	}
	p.X.Logarithmic, p.X.From = true, max(least, .1)
	p.X.To = max(most, p.X.From*1.01, .2)
	p.Y.From, p.Y.To = 0, 1
	p.Axes(xLabel, "share of requests", Milliseconds, Percent)
	if limit > p.X.From && limit < p.X.To {
		p.Mark(limit, "limit "+Milliseconds(limit))
	}
	for i, c := range curves {
		var line [][2]float64
		for n := 1; n <= points && len(c.Sorted) > 0; n++ {
			q := float64(n) / points
			line = append(line, [2]float64{Quantile(c.Sorted, q), q})
		}
		if line != nil {
			p.Line(Color(i), c.Name, line)
		}
	}
	return p.HTML()
}

// Quantile returns the smallest of at least one value in ascending order that is at least as large as
// the share q of them.
func Quantile[T cmp.Ordered](sorted []T, q float64) T {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// Counts draws counts over the time on a logarithmic scale that contains 0.
func Counts(label, xLabel, yLabel string, curves []Series) template.HTML {
	p := New(label, 300)
	most := 1.0
	for _, c := range curves {
		for _, v := range c.Points {
			p.X.To, most = max(p.X.To, v[0]), max(most, v[1])
		}
	}
	// The curve shows the number plus 1, because a logarithmic scale has no 0.
	p.Y.Logarithmic, p.Y.From, p.Y.To = true, 1, most*1.2+1
	p.X.To = max(p.X.To, 1e-3)
	p.Axes(xLabel, yLabel, Count, nil)
	for _, v := range (&Scale{From: 1, To: p.Y.To, Logarithmic: true}).decades(100) {
		n := v
		if v == 1 {
			n = 0
		}
		if v == 1 || isPower(v) || most < 50 {
			p.GridY(n+1, Count(n))
		}
	}
	for i, c := range curves {
		var points [][2]float64
		for _, v := range c.Points {
			points = append(points, [2]float64{v[0], v[1] + 1})
		}
		p.Line(Color(i), c.Name, points)
	}
	return p.HTML()
}

func isPower(v float64) bool { return math.Abs(math.Log10(v)-math.Round(math.Log10(v))) < 1e-9 }
