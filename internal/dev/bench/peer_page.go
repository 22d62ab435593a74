package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// pageCommand writes the page from the results of `bench peers`.
func pageCommand(args []string) error {
	fs := flag.NewFlagSet("page", flag.ContinueOnError)
	in := fs.String("json", "docs/benchmarks.json", "`file` of the results")
	out := fs.String("out", "docs/benchmarks.md", "`file` of the page; its plots go to the folder images beside it")
	if err := fs.Parse(args); err != nil {
		return err
	}
	p := &page{}
	if err := p.read(*in); err != nil {
		return err
	}
	p.all()
	for name, text := range p.plots {
		if err := os.WriteFile(filepath.Join(filepath.Dir(*out), "images", name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(*out, []byte(p.text.String()), 0o644)
}

// page is the page in progress.
type page struct {
	comparison
	text  strings.Builder
	plots map[string]string // by name of the file
}

func (p *page) say(format string, args ...any) { fmt.Fprintf(&p.text, format+"\n", args...) }

// table writes a table. Rows with no cell but the first are left out.
func (p *page) table(head []string, rows [][]string) {
	rows = slices.DeleteFunc(rows, func(row []string) bool { return strings.Trim(strings.Join(row[1:], ""), "–") == "" })
	if len(rows) == 0 {
		p.say("No figures: other programs disturbed all rounds.\n")
		return
	}
	p.say("| %s |", strings.Join(head, " | "))
	p.say("|%s", strings.Repeat(" --- |", len(head)))
	for _, row := range rows {
		p.say("| %s |", strings.Join(row, " | "))
	}
	p.say("")
}

func (p *page) all() {
	p.plots = map[string]string{}
	p.say("# Benchmarks\n\n<!-- Written by `bench page` from benchmarks.json. Do not edit. -->\n")
	p.say("pdproxy beside other proxies and routers, under the same load, on the same machine. `make bench-peers` installs all of them from their ordinary packages, " +
		"checks what each one relays, measures all in turns, and writes the results to [benchmarks.json](benchmarks.json) and this page.\n")
	p.method()
	p.installedTable()
	p.checkTable()
	p.behind()
	p.requests()
	p.latency()
	p.streams()
	p.pairs()
	p.memory()
	p.faultTable()
	p.hitTable()
	p.overheadTable()
	p.failures()
}

func (p *page) method() {
	if others := p.others(); others > disturbed || slices.ContainsFunc(p.Loads, func(m measured) bool { return m.Quick }) {
		p.say("!!! warning\n    These figures are provisional: other programs used %.0f %% of the two cores during the measurement, or the rounds were short. Ratios may be wrong by more than their ranges.\n", others*100)
	}
	p.say("Machine: %s, %s. Program: %s.\n", p.Machine, p.Go, p.Parts["load"].Program)
	p.say("- The proxy has one core alone, load generator and engines share another one. All of them use loopback.")
	p.say("- Figures are medians over %s rounds, with their range in brackets. Peers take turns within a round, and the first one changes. A ratio (×) is the median over the rounds of peer / pdproxy in the same round: above 1, pdproxy needs less.", p.rounds())
	p.say("- Times and rates of a round count only if other programs used less than %.0f %% of the two cores meanwhile.", disturbedTime*100)
	p.say("- Ignore differences below 20 %%, and those within the ranges.")
	p.say("- CPU is user and system time of all processes of a proxy, from `/proc`.")
	p.say("- Programs log at their default levels, into files.")
	p.say("- Defaults for all, but for addresses, engines, and limits below the load. pdproxy's limits of one client are off, because all load comes from one address.")
	p.say("- The engines count their requests. A result is discarded if they got fewer legs than the load got answers, or if any answer was not complete.\n")
	var rows [][]string
	for _, name := range parts {
		if r, ok := p.Parts[name]; ok {
			rows = append(rows, []string{name, r.Begin, fmt.Sprintf("%.0f", r.Minutes)})
		}
	}
	p.table([]string{"part", "measured (UTC)", "minutes"}, rows)
}

// rounds is the number of rounds of the part load: "5", or "3 to 5".
func (p *page) rounds() string {
	least, most := 0, 0
	for i, m := range p.Loads {
		if n := len(m.Rounds); n > 0 {
			if most = max(most, n); i == 0 || n < least || least == 0 {
				least = n
			}
		}
	}
	if least == most {
		return strconv.Itoa(most)
	}
	return fmt.Sprintf("%d to %d", least, most)
}

// failures lists the measurements that failed in a round.
func (p *page) failures() {
	cases := map[[2]string][]string{} // by peer and reason
	for _, m := range p.Loads {
		for _, why := range m.Failed {
			key := [2]string{m.Peer, why}
			cases[key] = append(cases[key], m.Case)
		}
	}
	if p.Overhead != nil {
		for _, c := range p.Overhead.Cells {
			if c.Failed != "" {
				key := [2]string{c.Peer, c.Failed}
				cases[key] = append(cases[key], strings.TrimSpace("router_overhead "+c.Corpus))
			}
		}
	}
	var rows [][]string
	for _, q := range p.Peers {
		for key, names := range cases {
			if key[0] == q.Name {
				rows = append(rows, []string{q.Name, strings.Join(slices.Compact(names), ", "), oneLine(key[1])})
			}
		}
	}
	if rows == nil {
		return
	}
	slices.SortFunc(rows, slices.Compare)
	p.say("## Failed measurements\n\nA cell without a figure elsewhere on this page has its reason here, or other programs disturbed all of its rounds.\n")
	p.table([]string{"peer", "measurement", "reason"}, rows)
}

func (p *page) installedTable() {
	p.say("## Peers\n")
	var rows [][]string
	for _, s := range p.Software {
		version, mb := s.Version, fmt.Sprintf("%.0f", s.MB)
		if s.MB < 10 {
			mb = fmt.Sprintf("%.1f", s.MB)
		}
		if s.Error != "" {
			version, mb = "**not installed**: "+oneLine(s.Error), "–"
		}
		rows = append(rows, []string{s.Name, version, s.How, mb})
	}
	p.table([]string{"software", "version", "installation", "MB on disk"}, rows)
	p.say("The size of wheels includes the packages that they need, without Python. TensorRT-LLM's orchestrator is not compared.\n")
	rows = nil
	for _, q := range p.Peers {
		if q.Flags != "" {
			rows = append(rows, []string{q.Name, worksText[q.Work], escaped(q.Flags), orDash(strings.Join(q.Cannot, "; "))})
		}
	}
	p.table([]string{"peer", "work", "settings", "cannot"}, rows)
}

var worksText = map[string]string{
	workPass: "one engine for a request", workVLLM: "prefill and decode, vLLM", workSGLang: "prefill and decode, SGLang", workDynamo: "prefill and decode, Dynamo",
}

func (p *page) checkTable() {
	p.say("## What each one relays\n\nAnswers are compared with the engine's own bytes, for prompts of 200, 2,048 and 32,768 bytes, unary and streamed. The last column says what became of a body with an escape, a number above 2^53, blanks, and a field that no engine knows.\n")
	var rows [][]string
	for _, c := range p.Checks {
		answers := c.Answers
		if !c.Works {
			answers = "**fails**: " + oneLine(c.Error)
		}
		rows = append(rows, []string{c.Peer, answers, orDash(c.Legs), orDash(c.Request)})
	}
	p.table([]string{"peer", "answers", "legs", "request at the engine"}, rows)
}

// column is one figure of a case.
type column struct {
	kase, key string
	head      string
	less      bool // smaller is better
	minus     string
}

// disturbedTime is the share of the two cores used by other programs above
// which the times and rates of a round are left out.
const disturbedTime = 0.2

// robust are the figures that other programs change little.
var robust = []string{figCPU, figRSS, figStream, figStart, figIdle}

// values returns a peer's figures by round, less those without a proxy where
// the figure is a difference.
func (p *page) values(peer string, f column) map[int]float64 {
	m := p.find(peer, f.kase)
	if m == nil || len(m.Figures[f.key]) != len(m.Rounds) {
		return nil
	}
	base := map[int]float64{}
	if f.minus != "" {
		base = p.values(f.minus, column{kase: f.kase, key: f.key})
	}
	v := map[int]float64{}
	for i, round := range m.Rounds {
		if !slices.Contains(robust, f.key) && m.Others[i] > disturbedTime {
			continue
		}
		if b, ok := base[round]; ok || f.minus == "" {
			v[round] = m.Figures[f.key][i] - b
		}
	}
	return v
}

func (p *page) find(peer, kase string) *measured {
	for i := range p.Loads {
		if p.Loads[i].Peer == peer && p.Loads[i].Case == kase {
			return &p.Loads[i]
		}
	}
	return nil
}

// middle returns the median of a figure; ok is false without one.
func (p *page) middle(peer string, f column) (v float64, ok bool) {
	byRound := p.values(peer, f)
	return median(values(byRound)), len(byRound) > 0
}

// cell is a figure with its range and its ratio to pdproxy's.
func (p *page) cell(peer, mine string, f column) string {
	byRound := p.values(peer, f)
	if len(byRound) == 0 || peer == noProxy && (f.minus != "" || slices.Contains(robust, f.key)) {
		return "–"
	}
	all := values(byRound)
	text := spread(all)
	if ratio, ok := p.ratio(peer, mine, f); ok && peer != mine && peer != noProxy {
		text += " ×" + twoDigits(ratio)
	}
	return text
}

// ratio is the median over the rounds of peer / mine.
func (p *page) ratio(peer, mine string, f column) (float64, bool) {
	theirs, own := p.values(peer, f), p.values(mine, f)
	var ratios []float64
	for round, v := range theirs {
		if o := own[round]; o > 0 {
			ratios = append(ratios, v/o)
		}
	}
	return median(ratios), len(ratios) > 0
}

// compared writes a table of figures of all peers of a work.
func (p *page) compared(works []string, mine string, figures ...column) {
	head := []string{"peer"}
	for _, f := range figures {
		head = append(head, f.head)
	}
	var rows [][]string
	for _, q := range p.Peers {
		if !slices.Contains(works, q.Work) {
			continue
		}
		row := []string{q.Name}
		for _, f := range figures {
			row = append(row, p.cell(q.Name, cmp.Or(mine, p.own(q.Work)), f))
		}
		rows = append(rows, row)
	}
	p.table(head, rows)
}

// own is the row of pdproxy for a work.
func (p *page) own(work string) string {
	for _, q := range p.Peers {
		if q.Software == pdproxy && q.Work == work {
			return q.Name
		}
	}
	return "pdproxy, vLLM PD" // Dynamo's engines speak no protocol of pdproxy
}

func (p *page) faultTable() {
	p.say("## Faults\n\nEngines are `pdproxy sim` processes, 20 ms a token, in real time; one run of each. A client waits %d s. Pinned are KV blocks of prefill engines that wait for a transfer %d s after the last client is done; they block room until the engine's lease ends (30 s here). Busy are requests that engines still compute or keep waiting then. [Failures and freed KV](concepts/failures.md) explains what pdproxy does in each case.\n",
		int(faultPatience.Seconds()), int(settleLimit.Seconds()))
	for _, c := range faultCases {
		var rows [][]string
		for _, q := range p.Peers {
			for _, o := range p.Faults {
				if o.Peer != q.Name || o.Case != c.name {
					continue
				}
				if o.Failed != "" {
					rows = append(rows, []string{q.Name, "not tried: " + oneLine(o.Failed), "–", "–", "–", "–"})
					continue
				}
				rows = append(rows, []string{q.Name, orDash(sawText(o.Clients)), orDash(sawText(o.Later)), fmt.Sprintf("%.1f", o.Slowest), fmt.Sprint(o.Pinned), fmt.Sprint(o.Busy)})
			}
		}
		if rows != nil {
			p.say("### %s\n\n%s.\n", strings.ToUpper(c.name[:1])+c.name[1:], strings.ToUpper(c.what[:1])+c.what[1:])
			p.table([]string{"peer", "clients saw", "later requests", "slowest, s", "pinned", "busy"}, rows)
		}
	}
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

// oneLine makes a text fit into a cell of a table.
func oneLine(s string) string {
	const most = 25
	words := strings.Fields(strings.NewReplacer("|", "\\|", "`", "'").Replace(s))
	if len(words) > most {
		words = append(words[:most], "…")
	}
	return "`" + strings.Join(words, " ") + "`"
}

// twoDigits writes a number with about two digits.
func twoDigits(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2g", v)
}

func escaped(s string) string { return strings.ReplaceAll(s, "|", "\\|") }

// number3 writes a number with about three digits.
func number3(v float64) string {
	switch {
	case v >= 1000 || v <= -1000:
		s := fmt.Sprintf("%.0f", v)
		for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
			s = s[:i] + "," + s[i:]
		}
		return s
	case v >= 100 || v <= -100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10 || v <= -10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}
