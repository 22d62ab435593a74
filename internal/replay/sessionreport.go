package replay

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"text/tabwriter"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
)

// SessionReport holds the results of one SessionLab.
type SessionReport struct {
	Name     string        `json:"name"`
	Sessions int           `json:"sessions"`
	Turns    int           `json:"turns"`
	Later    int           `json:"later_turns"` // that continue a turn before them
	Volatile float64       `json:"volatile"`    // share of the sessions whose client changes the beginning of each prompt
	Seed     uint64        `json:"seed"`
	Model    string        `json:"model"`
	Load     float64       `json:"load"`
	Quick    float64       `json:"quick_gaps"` // share of the gaps that are below 1 s
	Rows     []*SessionRow `json:"rows"`

	Config Config `json:"-"`
}

// SessionRow holds the figures of one setting.
type SessionRow struct {
	Retain       string         `json:"retain"`
	Stable       bool           `json:"stable_prefix"`
	TTFTP50      float64        `json:"ttft_p50_ms"`
	TTFTP95      float64        `json:"ttft_p95_ms"`
	HitRatio     float64        `json:"hit_ratio"`          // prompt tokens that prefill did not compute, of all
	Pulled       int            `json:"pulled_turns"`       // turns whose KV prefill pulled from decode
	Transferred  int64          `json:"transferred_tokens"` // tokens of KV that were sent, in both directions
	ToDecode     float64        `json:"bytes_to_decode"`    // of this KV
	ToPrefill    float64        `json:"bytes_to_prefill"`
	HeldSeconds  float64        `json:"held_block_seconds"` // KV blocks retained between turns, times seconds
	Waits        int            `json:"waits_for_memory"`   // requests for which decode had no room after their prefill
	Results      map[string]int `json:"results"`            // of retained KV, as in pdproxy_turn_kv_kept_seconds
	EndedSeconds float64        `json:"ended_s"`            // time until the last session ended

	ttft []time.Duration // sorted
}

// Report joins the results of runs of this lab.
func (l *SessionLab) Report(rows []*SessionRow) *SessionReport {
	cfg := &l.lab.cfg
	later, quick := l.gaps()
	return &SessionReport{
		Name: l.lab.trace.Name, Sessions: len(l.sessions), Turns: len(l.lab.trace.Requests), Later: later, Volatile: cfg.Volatile,
		Seed: cfg.Seed, Model: cfg.Model.Name, Load: cfg.Load, Quick: float64(quick) / float64(max(1, later)), Rows: rows, Config: *cfg,
	}
}

// WriteTable writes the report as a table for readers.
func (r *SessionReport) WriteTable(w io.Writer) error {
	c := &r.Config
	fmt.Fprintf(w, "%s: %d sessions with %d turns, of which %d continue another one, load %.2f\n", r.Name, r.Sessions, r.Turns, r.Later, r.Load)
	fmt.Fprintf(w, "%s: %d x %d prefill ranks of %d blocks, %d decode; %.0f %% of the gaps are below 1 s; the prompts of %.0f %% of the sessions begin with a text that changes\n\n",
		r.Model, c.Prefill, c.Ranks, c.BlocksPerRank, c.Decode, 100*r.Quick, 100*r.Volatile)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "retain\tstable_prefix\tTTFT p50\tp95\thits\tpulled\tto decode\tto prefill\tKV held\tevicted\twaits for memory\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.4f\t%d\t%s\t%s\t%.0f k block s\t%d\t%d\t\n", row.Retain, onOff(row.Stable), plot.Milliseconds(row.TTFTP50), plot.Milliseconds(row.TTFTP95),
			row.HitRatio, row.Pulled, terabytes(row.ToDecode), terabytes(row.ToPrefill), row.HeldSeconds/1e3, row.Results[turns.Evicted], row.Waits)
	}
	return t.Flush()
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func terabytes(bytes float64) string { return fmt.Sprintf("%.2f TB", bytes/1e12) }

//go:embed sessions.html
var sessionPage string

// WriteSessionHTML writes the reports as one page without external parts.
func WriteSessionHTML(w io.Writer, reports []*SessionReport) error {
	t, err := template.New("sessions").Funcs(template.FuncMap{
		"color": plot.Color, "short": plot.Milliseconds, "style": plot.Style, "bytes": terabytes,
		"percent":   func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) },
		"thousands": func(v float64) string { return fmt.Sprintf("%.0f k", v/1e3) },
	}).Parse(sessionPage)
	if err != nil {
		return err
	}
	return t.Execute(w, reports)
}

// Name is the name of a row in plots.
func (row *SessionRow) Name() string {
	if row.Stable {
		return row.Retain + ", stable_prefix"
	}
	return row.Retain
}

// TTFTPlot draws the number of requests by their time to first token.
func (r *SessionReport) TTFTPlot() template.HTML {
	var curves []plot.Curve
	for _, row := range r.Rows {
		c := plot.Curve{Name: row.Name()}
		for _, d := range row.ttft {
			c.Sorted = append(c.Sorted, millis(d))
		}
		curves = append(curves, c)
	}
	return plot.Shares("Time to first token", "time to first token", curves, r.Config.Model.TTFTMillis)
}

// HitPlot draws the shares of tokens that prefill did not compute.
func (r *SessionReport) HitPlot() template.HTML {
	return r.bars("Hits", "share of the tokens of prompts that prefill did not compute", plot.TickPercent,
		func(row *SessionRow) (float64, string) { return row.HitRatio, fmt.Sprintf("%.1f %%", 100*row.HitRatio) })
}

// SentPlot draws the bytes that were sent in both directions.
func (r *SessionReport) SentPlot() template.HTML {
	return r.bars("Transfers", "TB of KV sent, in both directions", plot.TickCount, func(row *SessionRow) (float64, string) {
		return (row.ToDecode + row.ToPrefill) / 1e12, terabytes(row.ToDecode) + " to decode, " + terabytes(row.ToPrefill) + " to prefill"
	})
}

// HeldPlot draws the memory of decode that KV between turns took.
func (r *SessionReport) HeldPlot() template.HTML {
	return r.bars("Memory", "KV blocks held between turns, times seconds", plot.TickCount, func(row *SessionRow) (float64, string) {
		return row.HeldSeconds, fmt.Sprintf("%.0f k block s, evicted %d times", row.HeldSeconds/1e3, row.Results[turns.Evicted])
	})
}

// bars draws one value of each row.
func (r *SessionReport) bars(label, xLabel string, tick func(float64) string, of func(*SessionRow) (v float64, text string)) template.HTML {
	var names []string
	most := 0.0
	for _, row := range r.Rows {
		v, _ := of(row)
		names, most = append(names, row.Name()), max(most, v)
	}
	p := plot.NewRows(label, names)
	p.X.To = max(1.03*most, 0.01)
	p.Axes(xLabel, "", tick, nil)
	for i, row := range r.Rows {
		v, text := of(row)
		p.Bar(i, plot.Color(i), v, text)
	}
	return p.HTML()
}
