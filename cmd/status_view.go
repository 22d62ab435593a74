package cmd

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
)

// statusView draws snapshots as lines of text.
type statusView struct {
	columns, rows int // of the terminal; 0: no limit
	color         bool
	problem       string // the reason why there is no newer snapshot; "": there is one each second
}

// good, doubtful and bad are how much attention a state needs.
const (
	good = iota
	doubtful
	bad
)

// attention returns how much attention a state of an engine, pair or policy needs.
func attention(state string) int {
	switch state {
	case "ready", "active":
		return good
	case "draining", "asleep", "waking", "warming", "unknown", "canary":
		return doubtful
	}
	return bad
}

// lines returns the lines of a snapshot, which the proxy at host has sent.
func (v statusView) lines(s *admin.Snapshot, host string) []string {
	sections := []*section{engineSection(s), pairSection(s), policySection(s)}
	top := v.summary(s, host, sections)
	if v.rows > 0 {
		// The lines at the top tell the states of sections without a place for three rows each.
		for len(sections) > 1 && v.rows-len(top) < (2+3)*len(sections) {
			sections = sections[:len(sections)-1]
		}
		wanted := make([]int, len(sections))
		for i, t := range sections {
			wanted[i] = len(t.rows)
		}
		for i, n := range share(v.rows-len(top)-2*len(sections), wanted) { // an empty line and a head each
			sections[i].limit(n)
		}
	}
	var list []string
	for _, line := range top {
		list = append(list, v.text(line))
	}
	for _, t := range sections {
		list = append(list, "")
		for _, line := range t.table() {
			list = append(list, v.text(line))
		}
	}
	if v.rows > 0 && len(list) > v.rows {
		list = list[:v.rows]
	}
	return list
}

// summary returns the lines at the top.
func (v statusView) summary(s *admin.Snapshot, host string, sections []*section) []line {
	head := fmt.Sprintf("pdproxy %s at %s, %s", s.Version, host, time.UnixMilli(int64(s.Time*1e3)).Format(time.TimeOnly))
	if s.Workers != nil {
		head += fmt.Sprintf(", workers %d", *s.Workers)
	}
	all := []line{{cell{text: head}}}
	if s.Silent > 0 {
		all = append(all, line{cell{fmt.Sprintf("%d workers gave no answer in time", s.Silent), bad}})
	}
	if v.problem != "" {
		all = append(all, line{cell{v.problem, bad}}, line{cell{"Connecting again. All that follows is of " + time.UnixMilli(int64(s.Time*1e3)).Format(time.TimeOnly) + ".", doubtful}})
	}
	for _, t := range sections {
		all = append(all, t.summary())
	}
	traffic := s.Traffic
	queue := cell{text: fmt.Sprintf("requests  %d running, ", traffic.Running)}
	waiting := cell{text: fmt.Sprintf("%d waiting", traffic.Waiting)}
	if traffic.Waiting > 0 {
		waiting.attention = doubtful
	}
	requests := line{queue, waiting, cell{text: fmt.Sprintf(", %s ended per second", short(traffic.Requests))}}
	separator := ": "
	for _, outcome := range slices.Sorted(maps.Keys(traffic.Outcomes)) {
		c := cell{text: fmt.Sprintf("%s %s", short(traffic.Outcomes[outcome]), outcome)}
		if outcome != "ok" {
			c.attention = doubtful
		}
		requests, separator = append(requests, cell{text: separator}, c), ", "
	}
	speed := fmt.Sprintf("speed     first token p50 %s, p95 %s; %s events/s", millis(traffic.TTFT.P50), millis(traffic.TTFT.P95), short(traffic.Events))
	all = append(all, requests, line{cell{text: speed}})
	if traffic.Retries > 0 || traffic.Shed > 0 {
		all = append(all, line{cell{fmt.Sprintf("          %s retries and %s refused requests per second", short(traffic.Retries), short(traffic.Shed)), doubtful}})
	}
	return all
}

// engineSection is the table of the engines.
func engineSection(s *admin.Snapshot) *section {
	t := &section{name: "engines", head: []string{"ENGINE", "ROLE", "STATE", "FOR", "REQS", "RUN", "WAIT", "QUEUED", "RESTARTS", "MODEL"}, numbers: "...######."}
	for i := range s.Engines {
		e := &s.Engines[i]
		state, level := e.State, attention(e.State)
		if e.Circuit != "closed" {
			state, level = state+", circuit "+strings.ReplaceAll(e.Circuit, "_", " "), max(level, doubtful)
			if e.Circuit == "open" {
				level = bad
			}
		}
		var requests, running, waiting, queued int64
		reported := false
		for _, r := range e.Ranks {
			requests, queued = requests+int64(r.Requests), queued+r.Queued
			if r.Running != nil && r.Waiting != nil {
				running, waiting, reported = running+int64(*r.Running), waiting+int64(*r.Waiting), true
			}
		}
		counts := []string{"-", "-"} // without a report of the engine
		if reported {
			counts = []string{short(float64(running)), short(float64(waiting))}
		}
		t.add(e.State, level, e.Name, e.Role, state, since(s.Time-e.Since), short(float64(requests)), counts[0], counts[1],
			short(float64(queued)), short(float64(e.Restarts)), e.Model)
	}
	return t
}

// pairSection is the table of the pairs.
func pairSection(s *admin.Snapshot) *section {
	t := &section{name: "pairs", head: []string{"PREFILL", "DECODE", "STATE", "FAILURES", "REASON"}, numbers: "...#.", unlisted: s.MorePair}
	for _, p := range s.Pairs {
		reason := cmp.Or(p.Refused, p.Unavailable)
		if reason == "" && p.State != "ready" {
			reason = p.LastError
		}
		t.add(p.State, attention(p.State), p.Prefill, p.Decode, p.State, fmt.Sprint(p.Failures), reason)
	}
	return t
}

// policySection is the table of the policies and filters.
func policySection(s *admin.Snapshot) *section {
	t := &section{name: "policies", head: []string{"POLICY", "PHASE", "STATE", "CALLS", "FAILURES", "MEAN", "P99"}, numbers: "...####"}
	for _, p := range s.Policies {
		state := p.State
		if p.Share > 0 {
			state += fmt.Sprintf(" %.3g %%", p.Share*100)
		}
		mean, p99 := p.MeanUS/1e3, p.P99US/1e3
		t.add(p.State, attention(p.State), p.Name, p.Phase, state, short(float64(p.Calls)), short(float64(p.Failures)), millis(&mean), millis(&p99))
	}
	return t
}

// since writes seconds with the largest unit that fits.
func since(seconds float64) string {
	d := time.Duration(max(seconds, 0)) * time.Second
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// short writes a number with at most four characters or digits.
func short(n float64) string {
	for _, unit := range []string{"", "k", "M", "G"} {
		switch {
		case n < 9.95 && n != float64(int(n)):
			return fmt.Sprintf("%.1f%s", n, unit)
		case n < 999.5:
			return fmt.Sprintf("%.0f%s", n, unit)
		}
		n /= 1000
	}
	return fmt.Sprintf("%.0fT", n)
}

// millis writes milliseconds; nil: not known.
func millis(ms *float64) string {
	switch {
	case ms == nil:
		return "-"
	case *ms >= 9999.5:
		return fmt.Sprintf("%.0f s", *ms/1e3)
	case *ms < 1:
		return fmt.Sprintf("%.0f µs", *ms*1e3)
	}
	return fmt.Sprintf("%.3g ms", *ms)
}
