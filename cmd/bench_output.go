package cmd

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/pdproxy/pdproxy/internal/loadgen"
)

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull) // the other character device that outputs go to
	return err != nil || !os.SameFile(info, null)
}

// progress shows on a terminal how far a run is: one line that is written again.
type progress struct {
	out          io.Writer
	label        string
	total        int
	began, shown time.Time
	done, failed int
}

// showEvery is the least time between two writes; barWidth is the length of the bar.
const (
	showEvery = 200 * time.Millisecond
	barWidth  = 30
)

// ended counts a request. Its calls do not overlap.
func (p *progress) ended(failed bool) {
	p.done++
	if failed {
		p.failed++
	}
	now := time.Now()
	if now.Sub(p.shown) < showEvery && p.done < p.total {
		return
	}
	p.shown = now
	full := barWidth * p.done / max(1, p.total)
	fmt.Fprintf(p.out, "\r\x1b[K%s[%s%s] %d of %d requests, %d failed, %.0f s", prefixed(p.label), strings.Repeat("#", full), strings.Repeat(".", barWidth-full),
		p.done, p.total, p.failed, now.Sub(p.began).Seconds())
}

// end removes the line.
func (p *progress) end() { fmt.Fprint(p.out, "\r\x1b[K") }

// prefixed returns a label with a space, or nothing.
func prefixed(label string) string {
	if label == "" {
		return ""
	}
	return label + " "
}

// writeBench writes the results in the forms that the flags request. page is the file for the
// report with plots, nil for none.
func (a *app) writeBench(b *benchFlags, results []*loadgen.Result, page *os.File) error {
	var err error
	if page != nil {
		report := loadgen.Report{Title: b.title(), Facts: b.facts(), Runs: named(results)}
		if err = errors.Join(report.WriteHTML(page), page.Close()); err != nil {
			err = fmt.Errorf("--html: %w", err)
		}
	}
	return errors.Join(a.printRuns(b, results), err)
}

// printRuns prints the results of the runs.
func (a *app) printRuns(b *benchFlags, results []*loadgen.Result) error {
	switch {
	case a.json && b.sweep != "":
		return a.printJSON(map[string]any{"sweep": b.sweep, "runs": results})
	case a.json:
		return a.printJSON(results[0])
	}
	for i, r := range results {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := a.printBench(r); err != nil {
			return err
		}
	}
	if b.sweep != "" {
		return a.printSweep(results)
	}
	return nil
}

// named returns results that all have a label.
func named(results []*loadgen.Result) []*loadgen.Result {
	results = slices.Clone(results)
	for i, r := range results {
		if r.Run == "" {
			c := *r
			c.Run = "run"
			results[i] = &c
		}
	}
	return results
}

func (b *benchFlags) title() string {
	if b.load.Trace != nil {
		return b.load.Trace.Name
	}
	return "Random prompts"
}

// facts are the conditions of the runs for the page.
func (b *benchFlags) facts() [][2]string {
	c := &b.load
	facts := [][2]string{{"endpoint", c.URL}, {"API", c.API}}
	add := func(name string, format string, values ...any) {
		facts = append(facts, [2]string{name, fmt.Sprintf(format, values...)})
	}
	switch {
	case c.Trace != nil && b.sweep == "":
		add("speed", "%g × recorded", c.Speed)
	case c.Trace != nil, b.sweep != "":
	case c.Rate > 0:
		add("arrivals", "%g requests a second", c.Rate)
	default:
		add("open requests", "%d", c.Concurrency)
	}
	if c.Trace == nil {
		add("prompt", "%d words, %d shared", c.PromptWords, min(c.Shared, c.PromptWords))
		add("answer", "at most %d tokens", c.MaxTokens)
	}
	if c.Turns > 1 {
		add("conversation", "%d turns", c.Turns)
	}
	return facts
}

func (a *app) printBench(r *loadgen.Result) error {
	if r.Run != "" {
		fmt.Fprintf(a.out, "%s: ", r.Run)
	}
	fmt.Fprintf(a.out, "%d requests in %.1f s, %d failed\n", r.Requests, r.Seconds, r.Failed)
	for _, reason := range slices.Sorted(maps.Keys(r.Failures)) {
		fmt.Fprintf(a.out, "  %s: %d\n", reason, r.Failures[reason])
	}
	if r.Skipped > 0 {
		fmt.Fprintf(a.out, "  further turns of failed conversations, not sent: %d\n", r.Skipped)
	}
	fmt.Fprintf(a.out, "%.1f requests/s, %.0f output tokens/s; %d prompt tokens (%d cached), %d output tokens\n",
		r.Throughput, r.OutputThroughput, r.PromptTokens, r.CachedTokens, r.OutputTokens)
	if r.Limits != nil {
		fmt.Fprintf(a.out, "%.2f good requests/s: %d of %d within the limits (%.1f %%)\n", r.Goodput, r.Good, r.Requests, 100*r.GoodRatio)
	}
	fmt.Fprintln(a.out)
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "ms\tmean\tp50\tp90\tp95\tp99\tmax\t")
	for _, row := range []struct {
		name string
		s    loadgen.Spread
	}{{"TTFT", r.TTFT}, {"TPOT", r.TPOT}, {"ITL", r.ITL}, {"whole", r.Total}, {"TTFT from sending", r.TTFTSent}, {"whole from sending", r.TotalSent}, {"sent late", r.Late}} {
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t\n", row.name, row.s.Mean, row.s.P50, row.s.P90, row.s.P95, row.s.P99, row.s.Max)
	}
	return w.Flush()
}

// printSweep writes one row for each run.
func (a *app) printSweep(results []*loadgen.Result) error {
	fmt.Fprintln(a.out)
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "run\treq/s\ttokens/s\tgood/s\tgood\tTTFT p50\tp95\tp99\tTPOT p50\tp99\tfailed\t")
	for _, r := range results {
		good, ratio := "-", "-"
		if r.Limits != nil {
			good, ratio = fmt.Sprintf("%.2f", r.Goodput), fmt.Sprintf("%.1f%%", 100*r.GoodRatio)
		}
		fmt.Fprintf(w, "%s\t%.2f\t%.0f\t%s\t%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%d\t\n", r.Run, r.Throughput, r.OutputThroughput, good, ratio,
			r.TTFT.P50, r.TTFT.P95, r.TTFT.P99, r.TPOT.P50, r.TPOT.P99, r.Failed)
	}
	return w.Flush()
}
