package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/internal/plot"
)

const otherColor = 8 // gray: every peer but pdproxy

// bars draws one figure of all peers of some works, the smallest first.
func (p *page) bars(file, label, unit string, works []string, f column) {
	type bar struct {
		name string
		mine bool
		v    float64
	}
	var all []bar
	most := 0.0
	for _, q := range p.Peers {
		if v, ok := p.middle(q.Name, f); ok && slices.Contains(works, q.Work) && q.Name != noProxy {
			all = append(all, bar{q.Name, q.Software == pdproxy, v})
			most = max(most, v)
		}
	}
	if all == nil || most <= 0 {
		return
	}
	slices.SortStableFunc(all, func(a, b bar) int { return cmp.Compare(a.v, b.v) })
	names := make([]string, len(all))
	for i, b := range all {
		names[i] = b.name
	}
	d := plot.NewRows(label, names)
	d.X.From, d.X.To = 0, most*1.05
	d.Axes(label+", "+unit, "", plot.TickCount, nil)
	for i, b := range all {
		color := otherColor
		if b.mine {
			color = 0
		}
		d.Bar(i, plot.Color(color), max(0, b.v), number3(b.v))
	}
	p.add(file, label, d)
}

// curves draws the CPU of requests with prefill and decode by the size of the prompt.
func (p *page) curves(file, label string) {
	d := plot.New(label, 320)
	d.X.Logarithmic, d.X.From, d.X.To = true, 2, 256
	d.Y.Logarithmic = true
	sizes := []float64{2, 32, 256}
	var names []string
	var lines [][][2]float64
	least, most := 0.0, 0.0
	for _, q := range p.Peers {
		var line [][2]float64
		for i, f := range pairFigures[:len(sizes)] {
			if v, ok := p.middle(q.Name, f); ok && v > 0 {
				line = append(line, [2]float64{sizes[i], v})
				if least == 0 || v < least {
					least = v
				}
				most = max(most, v)
			}
		}
		if line != nil {
			names, lines = append(names, shortName(q.Name)), append(lines, line)
		}
	}
	if lines == nil {
		return
	}
	d.Y.From, d.Y.To = least*0.8, most*1.25
	d.Axes("KB of a request", "CPU of a request, µs", plot.TickCount, plot.TickCount)
	for i, line := range lines {
		d.Line(plot.Color(i), names[i], line)
	}
	p.add(file, label, d)
	var key []string
	for i, name := range names {
		key = append(key, fmt.Sprintf(`<span style="color:%s">■</span> %s`, plot.Color(i), name))
	}
	p.say("%s\n", strings.Join(key, " &nbsp; "))
}

func shortName(name string) string { return strings.TrimSuffix(name, ", PD") }

// add puts a plot into the page.
func (p *page) add(file, label string, d *plot.Plot) {
	p.plots[file] = d.File()
	p.say("![%s](images/%s)\n", label, file)
}
