package replay

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
)

// AgentReport holds the results of one AgentLab.
type AgentReport struct {
	Sessions int         `json:"sessions"`
	Turns    int         `json:"turns"`
	Seed     uint64      `json:"seed"`
	Model    string      `json:"model"`
	Load     float64     `json:"load"`
	Quick    float64     `json:"quick_gaps"` // share of the gaps that are below 1 s
	Rows     []*AgentRow `json:"rows"`
}

// AgentRow holds the figures of one retain policy.
type AgentRow struct {
	Retain       string         `json:"retain"`
	TTFTP50      float64        `json:"ttft_p50_ms"`
	TTFTP95      float64        `json:"ttft_p95_ms"`
	HitRatio     float64        `json:"hit_ratio"`          // prompt tokens that prefill did not compute, of all
	Pulled       int            `json:"pulled_turns"`       // turns whose KV prefill pulled from decode
	Transferred  int64          `json:"transferred_tokens"` // tokens of KV that were sent, in both directions
	HeldSeconds  float64        `json:"held_block_seconds"` // KV blocks retained between turns, times seconds
	Waits        int            `json:"waits_for_memory"`   // requests for which decode had no room after their prefill
	Results      map[string]int `json:"results"`            // of retained KV, as in pdproxy_turn_kv_kept_seconds
	EndedSeconds float64        `json:"ended_s"`            // time until the last session ended
}

// Report joins the results of runs of this lab.
func (l *AgentLab) Report(rows []*AgentRow) *AgentReport {
	quick, all := 0, 0
	for _, q := range l.all() {
		if all++; q.gap < time.Second && q.child == nil {
			quick++
		}
	}
	cfg := &l.lab.cfg
	return &AgentReport{
		Sessions: len(l.sessions), Turns: l.turns, Seed: cfg.Seed, Model: cfg.Model.Name, Load: cfg.Load,
		Quick: float64(quick) / float64(max(1, all)), Rows: rows,
	}
}

// all returns the turns that another turn of their session follows.
func (l *AgentLab) all() (list []*turn) {
	var add func(s *session)
	add = func(s *session) {
		for i := range s.turns {
			if i < len(s.turns)-1 {
				list = append(list, &s.turns[i])
			}
			if child := s.turns[i].child; child != nil {
				add(child)
			}
		}
	}
	for _, s := range l.sessions {
		add(s)
	}
	return list
}

// Run plays the sessions. p places the requests, and decide is the retain policy.
func (l *AgentLab) Run(name string, p Placer, decide turns.Decide) *AgentRow {
	r := l.lab.newRun(p)
	r.left = l.turns
	r.retention = newRetention(r, decide)
	jobs := make([]*job, 0, l.turns)
	for _, s := range l.sessions {
		r.clock.at(s.begin, func() { l.begin(r, s, 0, &jobs, nil) })
	}
	r.poll()
	for r.clock.next() {
	}
	return l.row(name, r, jobs)
}

// begin begins turn i of a session, and the turns after it. ended is called at the end of the session.
func (l *AgentLab) begin(r *run, s *session, i int, jobs *[]*job, ended func()) {
	t := &s.turns[i]
	j := &job{Request: t.Request, turn: t, session: s.number, arrived: r.clock.now}
	*jobs = append(*jobs, j)
	next := func() {
		switch {
		case i+1 < len(s.turns):
			r.clock.after(t.gap, func() { l.begin(r, s, i+1, jobs, ended) })
		case ended != nil:
			ended()
		}
	}
	j.after = next
	if t.child != nil {
		j.after = func() { l.begin(r, t.child, 0, jobs, next) }
	}
	j.kept = r.retention.take(j)
	j.lease = r.view.place(r.placer, &j.Request, r.clock.now)
	r.ranks[j.lease.prefill].add(j)
}

// row computes the figures of a run.
func (l *AgentLab) row(name string, r *run, jobs []*job) *AgentRow {
	row := &AgentRow{
		Retain: name, Pulled: r.retention.pulled, Transferred: r.transferred + int64(r.retention.pulledTokens),
		HeldSeconds: r.retention.held, Results: r.retention.results,
	}
	var ttft []time.Duration
	var prompts int64
	for _, j := range jobs {
		ttft = append(ttft, j.first-j.arrived)
		prompts += int64(j.InputLength)
		row.EndedSeconds = max(row.EndedSeconds, j.ended.Seconds())
	}
	slices.Sort(ttft)
	row.TTFTP50, row.TTFTP95 = millis(plot.Quantile(ttft, .5)), millis(plot.Quantile(ttft, .95))
	row.HitRatio = float64(r.found) / float64(prompts)
	for _, d := range r.decode {
		row.Waits += d.waits
	}
	return row
}

// WriteTable writes the report as a table for readers.
func (r *AgentReport) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%d sessions of agents with %d turns, seed %d, load %.2f, %s; %.0f %% of the gaps are below 1 s\n\n", r.Sessions, r.Turns, r.Seed, r.Load, r.Model, 100*r.Quick)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "retain\tTTFT p50\tp95\thits\tpulled\ttransferred\tKV held\tevicted\twaits for memory\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%.4f\t%d\t%.1f M tokens\t%.0f k block s\t%d\t%d\t\n", row.Retain, plot.Milliseconds(row.TTFTP50), plot.Milliseconds(row.TTFTP95),
			row.HitRatio, row.Pulled, float64(row.Transferred)/1e6, row.HeldSeconds/1e3, row.Results[turns.Evicted], row.Waits)
	}
	return t.Flush()
}
