// Package plot draws SVG pictures for the reports of the replay lab, of pdproxy bench and
// of the documents. The pictures have no scripts and load nothing.
package plot

import (
	"fmt"
	"html"
	"html/template"
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
	rowLeft    = 190 // left margin of a plot with rows
	rowHeight  = 30
	rowLetters = 26 // longest name of a row
)

// Scale maps values to positions.
type Scale struct {
	From, To    float64 // values
	Logarithmic bool
	start, end  float64 // positions
}

// At returns the position of a value.
func (s *Scale) At(v float64) float64 {
	from, to := s.From, s.To
	if s.Logarithmic {
		v, from, to = math.Log(math.Max(v, s.From)), math.Log(from), math.Log(to)
	}
	if to <= from {
		return s.start
	}
	return s.start + (v-from)/(to-from)*(s.end-s.start)
}

// ticks returns round values within the scale: at most about n.
func (s *Scale) ticks(n int) []float64 {
	if s.Logarithmic {
		return s.decades(n)
	}
	step := math.Pow(10, math.Floor(math.Log10((s.To-s.From)/float64(n))))
	for _, f := range []float64{1, 2, 5, 10} {
		if (s.To-s.From)/(step*f) <= float64(n) {
			step *= f
			break
		}
	}
	var ticks []float64
	for i := math.Ceil(s.From / step); i*step <= s.To*(1+1e-9); i++ {
		ticks = append(ticks, i*step)
	}
	return ticks
}

// decades returns 1, 2 and 5 of each power of ten, or only the powers where
// these are too many.
func (s *Scale) decades(n int) []float64 {
	var all, powers []float64
	for p := math.Floor(math.Log10(s.From)); p <= math.Log10(s.To); p++ {
		for _, f := range []float64{1, 2, 5} {
			v := f * math.Pow(10, p)
			if v < s.From*(1-1e-9) || v > s.To*(1+1e-9) {
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

// Plot is an SVG picture in progress. X and Y must be set before the first drawing that
// uses them.
type Plot struct {
	X, Y   Scale
	text   strings.Builder
	height float64
}

// New begins a plot whose field has the given height. The label is its text for screen
// readers.
func New(label string, height float64) *Plot {
	p := &Plot{height: height + plotTop + plotBottom}
	p.X.start, p.X.end = plotLeft, plotWidth-plotRight
	p.Y.start, p.Y.end = plotTop+height, plotTop
	fmt.Fprintf(&p.text, `<svg viewBox="0 0 %d %g" role="img" aria-label="%s">`, plotWidth, p.height, html.EscapeString(label))
	return p
}

// NewRows begins a plot with a named row for each name.
func NewRows(label string, names []string) *Plot {
	p := New(label, float64(len(names)*rowHeight))
	p.X.start = rowLeft
	for i, name := range names {
		if letters := []rune(name); len(letters) > rowLetters {
			name = "…" + string(letters[len(letters)-rowLetters+1:])
		}
		p.write(p.X.start-10, rowMiddle(i)+4, "end", "name", name)
	}
	return p
}

// rowMiddle is the height of the middle of row i.
func rowMiddle(i int) float64 { return plotTop + float64(i)*rowHeight + rowHeight/2 }

// Axes draws the grid, the ticks and the names of both axes. An axis without a
// format has no ticks.
func (p *Plot) Axes(xLabel, yLabel string, xFormat, yFormat func(float64) string) {
	if yFormat != nil {
		for _, v := range p.Y.ticks(7) {
			p.GridY(v, yFormat(v))
		}
	}
	for _, v := range p.X.ticks(12) {
		x := p.X.At(v)
		fmt.Fprintf(&p.text, `<line class="grid" x1="%.1f" x2="%.1f" y1="%g" y2="%g"/>`, x, x, p.Y.start, p.Y.end)
		p.write(x, p.Y.start+18, "middle", "tick", xFormat(v))
	}
	fmt.Fprintf(&p.text, `<line class="axis" x1="%g" x2="%g" y1="%g" y2="%g"/>`, p.X.start, p.X.end, p.Y.start, p.Y.start)
	p.write((p.X.start+p.X.end)/2, p.height-6, "middle", "label", xLabel)
	if yLabel != "" {
		fmt.Fprintf(&p.text, `<text class="label" text-anchor="middle" transform="translate(14 %g) rotate(-90)">%s</text>`,
			(p.Y.start+p.Y.end)/2, html.EscapeString(yLabel))
	}
}

func (p *Plot) write(x, y float64, anchor, class, text string) {
	fmt.Fprintf(&p.text, `<text class="%s" text-anchor="%s" x="%.1f" y="%.1f">%s</text>`, class, anchor, x, y, html.EscapeString(text))
}

// Mark draws a labelled vertical line.
func (p *Plot) Mark(v float64, label string) {
	x := p.X.At(v)
	fmt.Fprintf(&p.text, `<line class="mark" x1="%.1f" x2="%.1f" y1="%g" y2="%g"/>`, x, x, p.Y.start, p.Y.end)
	anchor, dx := "start", 5.0
	if x > (p.X.start+p.X.end)*.75 {
		anchor, dx = "end", -5
	}
	p.write(x+dx, p.Y.end+11, anchor, "note", label)
}

// Legend writes the names of the curves with the first colors below the field, on the
// right. It is for pictures without a page around them.
func (p *Plot) Legend(names []string) {
	column := 110.0
	for _, name := range names {
		column = max(column, float64(30+8*len([]rune(name))))
	}
	y := p.height - 6
	for i, name := range names {
		x := p.X.end - column*float64(len(names)-i)
		fmt.Fprintf(&p.text, `<rect fill="%s" x="%.1f" y="%.1f" width="11" height="11"/>`, Color(i), x, y-10)
		p.write(x+16, y, "start", "name", name)
	}
}

// Line draws a curve through points.
func (p *Plot) Line(color, name string, points [][2]float64) {
	fmt.Fprintf(&p.text, `<polyline class="curve" stroke="%s" points="`, color)
	for _, v := range points {
		fmt.Fprintf(&p.text, "%.1f,%.1f ", p.X.At(v[0]), p.Y.At(v[1]))
	}
	fmt.Fprintf(&p.text, `"><title>%s</title></polyline>`, html.EscapeString(name))
}

// Bar draws the bar of row i, with its value after it, or inside it if it is long.
func (p *Plot) Bar(i int, color string, v float64, text string) {
	y, x := rowMiddle(i), p.X.At(v)
	fmt.Fprintf(&p.text, `<rect class="bar" fill="%s" x="%g" y="%.1f" width="%.1f" height="%d"/>`, color, p.X.start, y+6-rowHeight/2, max(0, x-p.X.start), rowHeight-12)
	if x > p.X.start+(p.X.end-p.X.start)/2 {
		p.write(x-8, y+4, "end", "inside", text)
		return
	}
	p.write(x+6, y+4, "start", "value", text)
}

// Dot draws a dot in row i.
func (p *Plot) Dot(i int, color string, v float64, title string) {
	fmt.Fprintf(&p.text, `<circle class="dot" fill="%s" cx="%.1f" cy="%.1f" r="5"><title>%s</title></circle>`,
		color, p.X.At(v), rowMiddle(i), html.EscapeString(title))
}

// GridY draws a horizontal line of the grid with its label, for axes without ticks of
// their own. Values outside the field are not drawn.
func (p *Plot) GridY(v float64, label string) {
	y := p.Y.At(v)
	if y < p.Y.end || y > p.Y.start {
		return
	}
	fmt.Fprintf(&p.text, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`, p.X.start, p.X.end, y, y)
	p.write(p.X.start-8, y+4, "end", "tick", label)
}

// Steps draws a curve that keeps each value until the next point.
func (p *Plot) Steps(color, name string, points [][2]float64) {
	var stairs [][2]float64
	for i, v := range points {
		if i > 0 {
			stairs = append(stairs, [2]float64{v[0], points[i-1][1]})
		}
		stairs = append(stairs, v)
	}
	p.Line(color, name, stairs)
}

// HTML ends the plot and returns it as an element of a page.
func (p *Plot) HTML() template.HTML { return template.HTML(p.text.String() + "</svg>") }

// File ends the plot. It returns the plot as a complete SVG file that contains the
// stylesheet.
func (p *Plot) File() string {
	head, rest, _ := strings.Cut(string(p.HTML()), ">")
	return strings.Replace(head, "<svg", `<svg xmlns="`+namespace+`"`, 1) + "><style>" + style + "</style>" + rest + "\n"
}
