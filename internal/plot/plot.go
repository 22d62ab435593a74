// Package plot draws SVG pictures for the reports of the replay lab, of pdproxy bench and
// of the documents. The pictures have no scripts and load nothing.
package plot

import (
	"fmt"
	"html"
	"html/template"
	"strings"
)

// The size of a plot in its own units, and the margins around its field.
const (
	plotWidth  = 960
	plotLeft   = 72
	plotRight  = 36
	plotTop    = 14
	plotBottom = 46
	rowLeft    = 220 // left margin of a plot with rows
	rowHeight  = 30
	rowGap     = 10 // between a name and the field

	xTicks = 10 // labels of an axis, about
	yTicks = 7
)

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
		x, y := p.X.start-rowGap, rowMiddle(i)+4
		short := shorten(name, rowLeft-rowGap)
		if short == name {
			p.write(x, y, "end", "name", name)
			continue
		}
		fmt.Fprintf(&p.text, `<text class="name" text-anchor="end" x="%.1f" y="%.1f">%s<title>%s</title></text>`, x, y, html.EscapeString(short), html.EscapeString(name))
	}
	return p
}

// shorten replaces the middle of a name by an ellipsis if the name is wider than width.
func shorten(name string, width float64) string {
	letters := []rune(name)
	short := name
	for n := len(letters) - 1; n > 1 && widthOf(short) > width; n-- {
		short = string(letters[:n/2]) + "…" + string(letters[len(letters)-(n-n/2):])
	}
	return short
}

// widthOf returns about the width of bold text of 13 units, rather too much.
func widthOf(text string) float64 {
	width := 0.0
	for _, r := range text {
		switch {
		case r >= 0x1100 || strings.ContainsRune("mwMW@%", r):
			width += 13
		case strings.ContainsRune("ijl.,:;|!' ", r):
			width += 4.5
		case r >= 'A' && r <= 'Z':
			width += 10
		default:
			width += 8
		}
	}
	return width
}

// rowMiddle is the height of the middle of row i.
func rowMiddle(i int) float64 { return plotTop + float64(i)*rowHeight + rowHeight/2 }

// Axes draws the grid, the ticks and the names of both axes. The scales grow to their first and last ticks,
// so Axes comes before the values. An axis without a format has no ticks.
func (p *Plot) Axes(xLabel, yLabel string, xFormat, yFormat func(float64) string) {
	if yFormat != nil {
		for _, v := range p.Y.ticks(yTicks) {
			y := p.Y.At(v)
			fmt.Fprintf(&p.text, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`, p.X.start, p.X.end, y, y)
			p.write(p.X.start-8, y+4, "end", "tick", yFormat(v))
		}
	}
	for _, v := range p.X.ticks(xTicks) {
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
		fmt.Fprintf(&p.text, `<text style="fill:%s" text-anchor="end" x="%.1f" y="%.1f">%s</text>`, inkOn(color), x-8, y+4, html.EscapeString(text))
		return
	}
	p.write(x+6, y+4, "start", "value", text)
}

// Dot draws a dot in row i.
func (p *Plot) Dot(i int, color string, v float64, title string) {
	fmt.Fprintf(&p.text, `<circle class="dot" fill="%s" cx="%.1f" cy="%.1f" r="5"><title>%s</title></circle>`,
		color, p.X.At(v), rowMiddle(i), html.EscapeString(title))
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
// stylesheet. The file has a background, because the page around it may have another color scheme than
// the browser.
func (p *Plot) File() string {
	head, rest, _ := strings.Cut(string(p.HTML()), ">")
	return strings.Replace(head, "<svg", `<svg xmlns="`+namespace+`"`, 1) + "><style>" + style + "svg { background: var(--paper) }\n</style>" + rest + "\n"
}
