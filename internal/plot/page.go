package plot

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"math"
	"strconv"
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

// inkOn returns the color of text on a bar: black or white, the one with more contrast.
func inkOn(color string) string {
	if contrast(color, "#000000") > contrast(color, "#ffffff") {
		return "#000000"
	}
	return "#ffffff"
}

// contrast returns the contrast ratio of two colors, 1 to 21, as WCAG 2.2 defines the ratio.
func contrast(a, b string) float64 {
	x, y := luminance(a), luminance(b)
	return (max(x, y) + .05) / (min(x, y) + .05)
}

func luminance(color string) float64 {
	rgb, _ := strconv.ParseUint(color[1:], 16, 32)
	sum := 0.0
	for i, weight := range []float64{.0722, .7152, .2126} {
		v := float64(rgb>>(8*i)&0xff) / 255
		if v <= .04045 {
			v /= 12.92
		} else {
			v = math.Pow((v+.055)/1.055, 2.4)
		}
		sum += weight * v
	}
	return sum
}

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
	p.X.To = max(most, p.X.From*1.001, .2)
	p.Y.From, p.Y.To = 0, 1
	p.Axes(xLabel, "share of requests", TickTime, TickPercent)
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
	if limit > p.X.From && limit < p.X.To {
		p.Mark(limit, "limit "+Milliseconds(limit))
	}
	return p.HTML()
}

// Quantile returns the smallest value that is at least as large as the share q of the values. sorted
// has at least one value, and its order is ascending.
func Quantile[T cmp.Ordered](sorted []T, q float64) T {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// Counts draws counts over the time on a logarithmic scale that contains 0.
func Counts(label, xLabel, yLabel string, curves []Series) template.HTML {
	p := New(label, 300)
	p.X.To, p.Y.Zero, p.Y.To = 1e-3, true, 1
	for _, c := range curves {
		for _, v := range c.Points {
			p.X.To, p.Y.To = max(p.X.To, v[0]), max(p.Y.To, v[1])
		}
	}
	p.Axes(xLabel, yLabel, TickCount, TickCount)
	for i, c := range curves {
		p.Line(Color(i), c.Name, c.Points)
	}
	return p.HTML()
}
