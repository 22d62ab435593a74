package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
)

// report holds the results of a run of the suite.
type report struct {
	Machine  string            `json:"machine"`
	Others   float64           `json:"others"` // share of the two cores that other programs used: median of the runs
	Rounds   int               `json:"rounds"`
	Versions map[string]string `json:"versions"`
	Missing  map[string]string `json:"missing"`
	Rows     []row             `json:"rows"`
	Runs     []run             `json:"runs"`
}

// row is one goal with its measurements. Values are medians over the rounds,
// and Ratio is their ratio. RatioMin and RatioMax are of the single rounds with
// both values.
type row struct {
	What     string  `json:"what"`
	Unit     string  `json:"unit"`
	Peer     string  `json:"peer"`
	Mine     float64 `json:"mine"`
	Theirs   float64 `json:"theirs"`
	Ratio    float64 `json:"ratio"`
	RatioMin float64 `json:"ratio_min"`
	RatioMax float64 `json:"ratio_max"`
	Must     float64 `json:"must"`
	Aim      float64 `json:"aim"`
	Verdict  string  `json:"verdict"`
	// Disturbed: one side has no quiet run, so the ratio may mislead.
	Disturbed bool `json:"disturbed"`
}

// disturbed is the share of the two cores used by other programs above which
// ratios mislead.
const disturbed = 0.05

// Verdicts of a row. A row without a ratio contains the reason.
const (
	reachedAim  = "aim"
	reachedMust = "must"
	missedMust  = "MISSED"
	noGoal      = "-"
)

func (s *suite) report() *report {
	r := &report{
		Machine: machine(), Rounds: s.rounds,
		Versions: s.versions, Missing: s.missing, Runs: s.runs,
	}
	var others []float64
	for _, one := range s.runs {
		others = append(others, one.Others)
	}
	r.Others = median(others)
	for _, g := range goals() {
		if s.only.MatchString(g.mine.kind + "/" + g.mine.name) {
			r.Rows = append(r.Rows, s.row(g))
		}
	}
	for _, c := range s.cases {
		if c.name == caseHoldMax && s.only.MatchString(pdproxy+"/"+c.name) {
			r.Rows = append(r.Rows, s.openRow(c.load.Conns))
		}
	}
	return r
}

func (s *suite) row(g goal) row {
	r := row{What: g.what, Unit: g.metric.unit, Peer: g.peer.kind, Must: g.must, Aim: g.aim}
	if g.peer.kind == g.mine.kind || g.peer.kind == pdproxy {
		r.Peer = g.peer.kind + "/" + g.peer.name
	}
	mine, quietMine := s.values(g.mine, g.metric)
	theirs, quietTheirs := s.values(g.peer, g.metric)
	r.Disturbed = !quietMine || !quietTheirs
	r.Mine, r.Theirs = median(values(mine)), median(values(theirs))
	switch {
	case len(mine) == 0:
		r.Verdict = s.why(g.mine)
		return r
	case len(theirs) == 0:
		r.Verdict = s.why(g.peer)
		return r
	}
	r.Ratio = r.Mine / r.Theirs
	var paired []float64
	for round, m := range mine {
		if t := theirs[round]; t > 0 {
			paired = append(paired, m/t)
		}
	}
	if len(paired) > 0 {
		r.RatioMin, r.RatioMax = slices.Min(paired), slices.Max(paired)
	}
	r.Verdict = verdict(r.Ratio, g.must, g.aim)
	return r
}

// openRow compares the largest number of streams: all requested ones, in each
// round.
func (s *suite) openRow(asked int) row {
	at := place{pdproxy, caseHoldMax}
	r := row{What: "open streams", Unit: open.unit, Peer: "asked for", Theirs: float64(asked), Must: 1, Aim: 1}
	byRound, _ := s.values(at, open) // a count does not depend on disturbances
	got := values(byRound)
	if len(got) == 0 {
		r.Verdict = s.why(at)
		return r
	}
	r.Mine = slices.Min(got)
	r.Ratio = r.Mine / r.Theirs
	r.RatioMin, r.RatioMax = r.Ratio, slices.Max(got)/r.Theirs
	r.Verdict = reachedAim
	if r.Ratio < 1 {
		r.Verdict = missedMust
	}
	return r
}

func verdict(ratio, must, aim float64) string {
	switch {
	case must == 0:
		return noGoal
	case ratio <= aim:
		return reachedAim
	case ratio <= must:
		return reachedMust
	}
	return missedMust
}

// values returns one value per round, from the runs without a fault. If any round was quiet (other
// programs used little processor time), values leaves out the other rounds. The result does not
// influence which rounds are quiet. quiet is false if no round was quiet. A value of 0 was too
// small to measure.
func (s *suite) values(at place, m metric) (byRound map[int]float64, quiet bool) {
	byRound = map[int]float64{}
	for _, r := range s.runs {
		if r.Kind != at.kind || r.Case != at.name || r.Failed != "" {
			continue
		}
		v := m.of(r.Result)
		if v == 0 || quiet && r.Others > disturbed {
			continue
		}
		if !quiet && r.Others <= disturbed {
			quiet = true
			clear(byRound)
		}
		byRound[r.Round] = v
	}
	return byRound, quiet
}

func values(byRound map[int]float64) []float64 { return slices.Collect(maps.Values(byRound)) }

// why returns the reason for a missing value.
func (s *suite) why(at place) string {
	if _, ok := s.missing[at.kind]; ok {
		return "missing: " + at.kind
	}
	for _, r := range s.runs {
		if r.Kind == at.kind && r.Case == at.name {
			return at.kind + ": failed"
		}
	}
	return at.kind + ": not run"
}

// median returns the middle value, or the mean of the two middle ones; 0
// without values.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "%s, rounds: %d\n", r.Machine, r.Rounds)
	fmt.Fprintf(w, "other programs took %.0f %% of the two cores\n", r.Others*100)
	if r.Others > disturbed {
		fmt.Fprintln(w, "a proxy that has to wait finds several events in one read and looks cheap: rows without a quiet run are marked as disturbed")
	}
	for _, name := range slices.Sorted(maps.Keys(r.Versions)) {
		fmt.Fprintf(w, "  %s: %s\n", name, r.Versions[name])
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Missing)) {
		fmt.Fprintf(w, "  missing: %s: %s\n", kind, r.Missing[kind])
	}
	r.printRuns(w)
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tpeer\tpdproxy\tpeer's\tunit\tratio\trounds\tmust\taim\tverdict")
	for _, x := range r.Rows {
		spread := noGoal
		if x.RatioMin > 0 {
			spread = ratio(x.RatioMin) + ".." + ratio(x.RatioMax)
		}
		verdict := x.Verdict
		if x.Disturbed && x.Ratio > 0 {
			verdict += " (disturbed)"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", x.What, x.Peer,
			figure(x.Mine), figure(x.Theirs), x.Unit, ratio(x.Ratio), spread, ratio(x.Must), ratio(x.Aim), verdict)
	}
	t.Flush()
	for _, x := range r.Runs {
		if x.Failed != "" {
			fmt.Fprintf(w, "failed: round %d %s/%s: %s\n", x.Round, x.Kind, x.Case, x.Failed)
		}
	}
}

// printRuns prints the medians of all measurements, one line for each case and
// kind.
func (r *report) printRuns(w io.Writer) {
	type key struct{ name, kind string }
	all := map[key][]*result{}
	var order []key
	for _, x := range r.Runs {
		if x.Failed != "" {
			continue
		}
		k := key{x.Case, x.Kind}
		if all[k] == nil {
			order = append(order, k)
		}
		all[k] = append(all[k], x.Result)
	}
	slices.SortStableFunc(order, func(a, b key) int { return cmp.Compare(a.name, b.name) })
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	columns := []struct {
		head string
		of   func(*result) float64
	}{
		{"µs CPU/request", cpuRequest.of}, {"µs CPU/event", cpuEvent.of},
		{"of a core", func(r *result) float64 { return r.Core }},
		{"requests/s", func(r *result) float64 { return float64(r.Requests) / r.Seconds }},
		{"p50 µs", func(r *result) float64 { return 1000 * r.Request.P50 }}, {"p99 µs", requestP99.of},
		{"event p50 µs", eventP50.of}, {"p99 µs", func(r *result) float64 { return 1000 * r.Event.P99 }},
		{"first p50 ms", firstP50.of}, {"RSS MB", func(r *result) float64 { return r.RSS }},
		{"KB/stream", streamRSS.of}, {"open", open.of},
	}
	fmt.Fprint(t, "case\tkind\t")
	for _, c := range columns {
		fmt.Fprint(t, c.head, "\t")
	}
	for _, k := range order {
		fmt.Fprintf(t, "\n%s\t%s\t", k.name, k.kind)
		for _, c := range columns {
			var v []float64
			for _, one := range all[k] {
				v = append(v, c.of(one))
			}
			fmt.Fprint(t, figure(median(v)), "\t")
		}
	}
	fmt.Fprintln(t)
	t.Flush()
}

// summary is a short text about a run, to show progress.
func (r run) summary() string {
	if r.Failed != "" {
		return "FAILED: " + r.Failed
	}
	x := r.Result
	text := ""
	switch {
	case x.Open > 0:
		text = fmt.Sprintf("%d streams open, %.1f KB each", x.Open, x.StreamRSS)
	case x.Events > x.Requests:
		text = fmt.Sprintf("%.1f µs/event, %.0f µs/request, event p50 %.0f µs, first p50 %.1f ms", x.CPUEvent, x.CPURequest, 1000*x.Event.P50, x.First.P50)
	default:
		text = fmt.Sprintf("%.1f µs/request, %.0f/s, p50 %.0f p99 %.0f µs", x.CPURequest, float64(x.Requests)/x.Seconds, 1000*x.Request.P50, 1000*x.Request.P99)
	}
	return fmt.Sprintf("%s, others %.0f %%", text, r.Others*100)
}

// ratio prints a small ratio as one part of a number.
func ratio(r float64) string {
	switch {
	case r == 0:
		return "-"
	case r < 0.3:
		return fmt.Sprintf("1/%.1f", 1/r)
	}
	return fmt.Sprintf("%.2f", r)
}

func figure(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// machine returns the names of the CPU and the kernel.
func machine() string {
	model := runtime.GOARCH
	text, err := os.ReadFile("/proc/cpuinfo")
	if err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%d x %s, Linux %s", runtime.NumCPU(), model, firstLine("/proc/sys/kernel/osrelease"))
}

func firstLine(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "?"
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}
