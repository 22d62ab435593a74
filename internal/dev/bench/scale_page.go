package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
)

// writePage replaces the parts of the page that begin with <!-- scale: ROW --> and end with
// <!-- end -->, and writes the plots.
func (s *scale) writePage(page string) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	images := filepath.Join(filepath.Dir(page), "images")
	all := map[string]*curves{}
	for i := range scaleRows {
		r := &scaleRows[i]
		f, err := s.read(r)
		if err != nil {
			return fmt.Errorf("the page needs each row once: %s: %w", r.name, err)
		}
		all[r.name] = f
		if err := os.WriteFile(filepath.Join(images, "scale-"+r.name+".svg"), []byte(r.plot(f)), 0o644); err != nil {
			return err
		}
		block := fmt.Sprintf("![%s](images/scale-%s.svg)\n\n%s", strings.ToUpper(r.about[:1])+r.about[1:], r.name, r.table(f))
		if text, err = replaceBlock(text, r.name, block); err != nil {
			return err
		}
	}
	plan, err := sizing(all)
	if err != nil {
		return err
	}
	if text, err = replaceBlock(text, "sizing", plan); err != nil {
		return err
	}
	if text, err = replaceBlock(text, "machine", measuredOn()); err != nil {
		return err
	}
	return os.WriteFile(page, text, 0o644)
}

// replaceBlock replaces the part of a page with that name.
func replaceBlock(text []byte, name, block string) ([]byte, error) {
	begin, end := "<!-- scale: "+name+" -->\n", "<!-- end -->"
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		return nil, fmt.Errorf("the page has no part %q", name)
	}
	return []byte(before + begin + block + end + after), nil
}

// measuredOn describes where and when the figures were measured.
func measuredOn() string {
	load, _, _ := strings.Cut(firstLine("/proc/loadavg"), " ")
	return fmt.Sprintf("Measured on %s with %s: %s, load average %s.\n", time.Now().UTC().Format("2 January 2006"), runtime.Version(), machine(), load)
}

// table returns the figures as a table, with the columns of each curve.
func (r *scaleRow) table(f *curves) string {
	var text strings.Builder
	text.WriteString("| " + r.size + " |")
	for _, curve := range f.names {
		for _, c := range r.columns {
			text.WriteString(" " + strings.TrimSpace(codeName(curve)+" "+c.head) + " |")
		}
	}
	text.WriteString("\n|" + strings.Repeat(" --- |", 1+len(f.names)*len(r.columns)) + "\n")
	for _, size := range f.sizes {
		text.WriteString("| " + shortCount(size) + " |")
		for _, curve := range f.names {
			for _, c := range r.columns {
				text.WriteString(" " + f.cell(curve, c.unit, size) + " |")
			}
		}
		text.WriteByte('\n')
	}
	return text.String()
}

func codeName(curve string) string {
	if curve == "" {
		return ""
	}
	return "`" + curve + "`"
}

func (f *curves) cell(curve, unit string, size float64) string {
	for _, point := range f.values[[2]string{curve, unit}] {
		if point[0] == size {
			return shortCount(point[1])
		}
	}
	return "–"
}

// shortCount writes a number with about two digits after its first one, and k or M for thousands
// and millions.
func shortCount(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%g M", math.Round(v/1e4)/100)
	case v >= 10_000:
		return fmt.Sprintf("%gk", math.Round(v/100)/10)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%g", math.Round(v*10)/10)
	}
	return fmt.Sprintf("%g", math.Round(v*100)/100)
}

// plot draws columns over the sizes, both on logarithmic scales.
func (r *scaleRow) plot(f *curves) string {
	var names []string
	var lines [][][2]float64
	for _, curve := range f.names {
		for _, c := range r.columns {
			if !c.drawn {
				continue
			}
			name := curve
			if len(f.names) == 1 {
				name, _, _ = strings.Cut(c.head, ",")
			}
			names = append(names, name)
			lines = append(lines, f.values[[2]string{curve, c.unit}])
		}
	}
	p := plot.New(r.about, 300)
	p.X = within(p.X, f.sizes[0], f.sizes[len(f.sizes)-1])
	low, high := math.Inf(1), 0.0
	for _, line := range lines {
		for _, point := range line {
			low, high = min(low, point[1]), max(high, point[1])
		}
	}
	p.Y = within(p.Y, low/1.3, high*1.3)
	p.Axes("", r.axis, plot.TickCount, plot.TickCount)
	for i, line := range lines {
		p.Line(plot.Color(i), names[i], line)
	}
	p.Legend(names)
	return p.File()
}

// within returns a logarithmic scale at the same position.
func within(s plot.Scale, from, to float64) plot.Scale {
	s.From, s.To, s.Logarithmic = from, to, true
	return s
}
