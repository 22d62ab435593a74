package replay

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// The size of a plot in its own units, and the margins around its field.
const (
	plotWidth  = 960
	plotLeft   = 64
	plotRight  = 20
	plotTop    = 14
	plotBottom = 46
	rowHeight  = 30 // of a plot with a row for each policy
)

// scale maps values to positions.
type scale struct {
	from, to    float64 // values
	start, end  float64 // positions
	logarithmic bool
}

func (s *scale) at(v float64) float64 {
	from, to := s.from, s.to
	if s.logarithmic {
		v, from, to = math.Log(math.Max(v, s.from)), math.Log(from), math.Log(to)
	}
	if to <= from {
		return s.start
	}
	return s.start + (v-from)/(to-from)*(s.end-s.start)
}

// ticks returns round values within the scale: at most about n.
func (s *scale) ticks(n int) []float64 {
	if s.logarithmic {
		return s.decades(n)
	}
	step := math.Pow(10, math.Floor(math.Log10((s.to-s.from)/float64(n))))
	for _, f := range []float64{1, 2, 5, 10} {
		if (s.to-s.from)/(step*f) <= float64(n) {
			step *= f
			break
		}
	}
	var ticks []float64
	for i := math.Ceil(s.from / step); i*step <= s.to*(1+1e-9); i++ {
		ticks = append(ticks, i*step)
	}
	return ticks
}

// decades returns 1, 2 and 5 of each power of ten, or only the powers where
// these are too many.
func (s *scale) decades(n int) []float64 {
	var all, powers []float64
	for p := math.Floor(math.Log10(s.from)); p <= math.Log10(s.to); p++ {
		for _, f := range []float64{1, 2, 5} {
			v := f * math.Pow(10, p)
			if v < s.from*(1-1e-9) || v > s.to*(1+1e-9) {
				continue
			}
			all = append(all, v)
			if f == 1 {
				powers = append(powers, v)
			}
		}
	}
	if len(all) > n {
		return powers
	}
	return all
}

// plot is an SVG picture in progress.
type plot struct {
	strings.Builder
	height float64
	x, y   scale
}

// newPlot begins a plot whose field has the given height.
func newPlot(label string, height float64) *plot {
	p := &plot{height: height + plotTop + plotBottom}
	p.x.start, p.x.end = plotLeft, plotWidth-plotRight
	p.y.start, p.y.end = plotTop+height, plotTop
	fmt.Fprintf(p, `<svg viewBox="0 0 %d %g" role="img" aria-label="%s">`, plotWidth, p.height, html.EscapeString(label))
	return p
}

// axes draws the grid, the ticks and the names of both axes. An axis without a
// format has no ticks.
func (p *plot) axes(xLabel, yLabel string, xFormat, yFormat func(float64) string) {
	if yFormat != nil {
		for _, v := range p.y.ticks(7) {
			y := p.y.at(v)
			fmt.Fprintf(p, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`, p.x.start, p.x.end, y, y)
			p.text(p.x.start-8, y+4, "end", "tick", yFormat(v))
		}
	}
	for _, v := range p.x.ticks(12) {
		x := p.x.at(v)
		fmt.Fprintf(p, `<line class="grid" x1="%.1f" x2="%.1f" y1="%g" y2="%g"/>`, x, x, p.y.start, p.y.end)
		p.text(x, p.y.start+18, "middle", "tick", xFormat(v))
	}
	fmt.Fprintf(p, `<line class="axis" x1="%g" x2="%g" y1="%g" y2="%g"/>`, p.x.start, p.x.end, p.y.start, p.y.start)
	p.text((p.x.start+p.x.end)/2, p.height-6, "middle", "label", xLabel)
	if yLabel != "" {
		fmt.Fprintf(p, `<text class="label" text-anchor="middle" transform="translate(14 %g) rotate(-90)">%s</text>`,
			(p.y.start+p.y.end)/2, html.EscapeString(yLabel))
	}
}

func (p *plot) text(x, y float64, anchor, class, text string) {
	fmt.Fprintf(p, `<text class="%s" text-anchor="%s" x="%.1f" y="%.1f">%s</text>`, class, anchor, x, y, html.EscapeString(text))
}

// mark draws a labelled vertical line.
func (p *plot) mark(v float64, label string) {
	x := p.x.at(v)
	fmt.Fprintf(p, `<line class="mark" x1="%.1f" x2="%.1f" y1="%g" y2="%g"/>`, x, x, p.y.start, p.y.end)
	anchor, dx := "start", 5.0
	if x > (p.x.start+p.x.end)*.75 {
		anchor, dx = "end", -5
	}
	p.text(x+dx, p.y.end+11, anchor, "note", label)
}

// line draws a curve through points.
func (p *plot) line(color, name string, points [][2]float64) {
	fmt.Fprintf(p, `<polyline class="curve" stroke="%s" points="`, color)
	for _, v := range points {
		fmt.Fprintf(p, "%.1f,%.1f ", p.x.at(v[0]), p.y.at(v[1]))
	}
	fmt.Fprintf(p, `"><title>%s</title></polyline>`, html.EscapeString(name))
}

// bar draws the bar of row i, with its value after it, or inside it if it is long.
func (p *plot) bar(i int, color string, v float64, text string) {
	y := plotTop + float64(i)*rowHeight
	x := p.x.at(v)
	fmt.Fprintf(p, `<rect class="bar" fill="%s" x="%g" y="%.1f" width="%.1f" height="%d"/>`, color, p.x.start, y+6, max(0, x-p.x.start), rowHeight-12)
	if x > p.x.start+(p.x.end-p.x.start)/2 {
		p.text(x-8, y+rowHeight/2+4, "end", "inside", text)
		return
	}
	p.text(x+6, y+rowHeight/2+4, "start", "value", text)
}

// rowName writes the name of row i to its left.
func (p *plot) rowName(i int, name string) {
	p.text(p.x.start-10, plotTop+float64(i)*rowHeight+rowHeight/2+4, "end", "name", name)
}

// dot draws a dot in row i.
func (p *plot) dot(i int, color string, v float64, title string) {
	fmt.Fprintf(p, `<circle class="dot" fill="%s" cx="%.1f" cy="%.1f" r="5"><title>%s</title></circle>`,
		color, p.x.at(v), plotTop+float64(i)*rowHeight+rowHeight/2, html.EscapeString(title))
}

func (p *plot) end() string {
	p.WriteString("</svg>")
	return p.String()
}
