package admin

import (
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
)

// SnapshotEngine is one engine of a Snapshot.
type SnapshotEngine struct {
	Name      string  `json:"name"`
	Role      string  `json:"role"`
	State     string  `json:"state"`
	Since     float64 `json:"since"` // of the state, in seconds since the Unix epoch
	Circuit   string  `json:"circuit"`
	Failures  int     `json:"failures"` // of legs, in a row
	Restarts  uint32  `json:"restarts"`
	Connector string  `json:"connector"`
	Model     string  `json:"model"`
	// Prompts are the prompts that the engine computed lately.
	Prompts journal.PromptTokens `json:"prompts"`
	// Index is the result of comparing the cached tokens that the engine reports with the KV index:
	// agrees, disagrees, unchecked (no request could be compared), engine_down (the engine does not
	// answer probes, so nothing is known about its blocks), or "" without an index.
	Index string `json:"index"`
	// Distrust is the likely reason if the two disagree, else "".
	Distrust string         `json:"distrust"`
	Ranks    []SnapshotRank `json:"ranks"`
}

// SnapshotRank is the load of one rank. Running and Waiting are the engine's last report, nil
// before the first one.
type SnapshotRank struct {
	Requests int32   `json:"requests"`
	Tokens   int64   `json:"tokens"`
	Queued   int64   `json:"queued"` // uncached prompt tokens whose prefill is not done
	QueueMS  float64 `json:"queue_ms"`
	Running  *int32  `json:"running"`
	Waiting  *int32  `json:"waiting"`
	// Usage is the share of KV memory in use, 0 to 1; nil without a recent report.
	Usage  *float32 `json:"kv_usage"`
	Blocks int      `json:"kv_blocks"` // in the KV index
}

// SnapshotPair is a prefill and a decode engine that have been used together, with the worst
// state of their ranks.
type SnapshotPair struct {
	Prefill string `json:"prefill"`
	Decode  string `json:"decode"`
	State   string `json:"state"`
	// Refused and Unavailable are those of engine.PairRow.
	Refused          string `json:"refused,omitempty"`
	Unavailable      string `json:"unavailable,omitempty"`
	Failures         int    `json:"failures"`
	LastError        string `json:"last_error"`
	engine.PairSpeed        // the samples of all ranks, and the means of their speeds
}

// SnapshotKV is the state of the KV index. All fields are 0 in a process without an index.
type SnapshotKV struct {
	EventBlocks    int   `json:"event_blocks"`    // known by events of engines
	ExpectedBlocks int   `json:"expected_blocks"` // expected after prompts that were sent
	Bytes          int64 `json:"bytes"`
}

var circuitNames = map[circuit.State]string{circuit.Closed: "closed", circuit.HalfOpen: "half_open", circuit.Open: "open"}

// engines returns the engines by name. While an engine drains, a new one may have its name;
// the list has both.
func (d *dashboardView) engines(now time.Time, hits map[string]journal.PromptTokens) []SnapshotEngine {
	verdicts := make(map[string]indexcheck.Verdict)
	if d.o.Knowledge.Trust != nil {
		for _, v := range d.o.Knowledge.Trust.Verdicts() {
			verdicts[v.Engine] = v
		}
	}
	instances := d.o.Registry.Snapshot().Instances
	rows := make([]SnapshotEngine, 0, len(instances))
	for _, i := range instances {
		row := SnapshotEngine{
			Name: i.Spec.Name, Role: i.Role.String(), State: i.Shown(), Since: float64(i.Since().UnixMilli()) / 1e3,
			Circuit: circuitNames[i.Breaker.Circuit(now)], Failures: i.Breaker.Failures(), Restarts: i.Restarts(),
			Connector: i.Spec.Connector, Model: strings.Join(i.Models(), ","), Prompts: hits[i.Spec.Name],
		}
		if d.o.Knowledge.Trust != nil {
			row.Index, row.Distrust = compared(i, verdicts[i.Spec.Name])
		}
		for rank := range i.Load {
			row.Ranks = append(row.Ranks, d.rank(i, rank, now))
		}
		rows = append(rows, row)
	}
	slices.SortStableFunc(rows, func(a, b SnapshotEngine) int { return strings.Compare(a.Name, b.Name) })
	return rows
}

// compared returns Index and Distrust of an engine with this verdict.
func compared(i *engine.Instance, v indexcheck.Verdict) (index, distrust string) {
	switch {
	case !i.Answers():
		return "engine_down", ""
	case v.Reason != indexcheck.Agrees:
		return "disagrees", v.Reason.String()
	case v.Requests == 0:
		return "unchecked", ""
	}
	return "agrees", ""
}

func (d *dashboardView) rank(i *engine.Instance, rank int, now time.Time) SnapshotRank {
	v := i.Load[rank].View(now)
	row := SnapshotRank{
		Requests: v.Requests, Tokens: v.Tokens, Queued: v.Queued, QueueMS: float64(v.Queued) * float64(v.PrefillMicros) / 1e3,
	}
	if report, ok := i.Load[rank].Reported(); ok && report.Counts(now) {
		row.Running, row.Waiting, row.Usage = &report.Running, &report.Waiting, &report.Usage
	}
	if d.o.Knowledge.Index != nil && rank < len(i.KV) {
		row.Blocks = d.o.Knowledge.Index.Held(i.KV[rank])
	}
	return row
}

// pairStates are the states from the best to the worst.
var pairStates = []string{"unknown", "warming", "ready", "broken"}

// pairs returns the pairs of engines, at most maxPairs, and how many more there are.
func (d *dashboardView) pairs() (list []SnapshotPair, more int) {
	list = []SnapshotPair{}
	measured := []int{} // for each pair, its ranks with a measurement
	places := make(map[[2]string]int)
	for _, p := range d.o.Registry.Pairs() {
		key := [2]string{p.Prefill, p.Decode}
		n, ok := places[key]
		if !ok {
			n = len(list)
			places[key] = n
			list, measured = append(list, SnapshotPair{Prefill: p.Prefill, Decode: p.Decode, State: p.State}), append(measured, 0)
		}
		row := &list[n]
		if slices.Index(pairStates, p.State) > slices.Index(pairStates, row.State) {
			row.State = p.State
		}
		row.Refused, row.Unavailable, row.LastError = max(row.Refused, p.Refused), max(row.Unavailable, p.Unavailable), max(row.LastError, p.LastError)
		row.Failures, row.Samples = row.Failures+p.Failures, row.Samples+p.Samples
		if p.Bandwidth != nil {
			measured[n]++
			row.Bandwidth, row.SetUpMS = mean(row.Bandwidth, p.Bandwidth, measured[n]), mean(row.SetUpMS, p.SetUpMS, measured[n])
			row.AtLeast = row.AtLeast || p.AtLeast
		}
	}
	if len(list) > maxPairs {
		return list[:maxPairs], len(list) - maxPairs
	}
	return list, 0
}

// mean returns the mean of n values: the n-th one, and the others, whose mean is before.
func mean(before, value *float64, n int) *float64 {
	if before == nil {
		return value
	}
	m := *before + (*value-*before)/float64(n)
	return &m
}

func (d *dashboardView) kv() SnapshotKV {
	if d.o.Knowledge.Index == nil {
		return SnapshotKV{}
	}
	s := d.o.Knowledge.Index.Stats()
	return SnapshotKV{EventBlocks: s.Entries - s.Guesses, ExpectedBlocks: s.Guesses, Bytes: s.Bytes}
}

// SnapshotPolicy is a policy or filter of a Snapshot.
type SnapshotPolicy struct {
	PolicyRow
	// Share is the share of requests that a canary gets, 0 to 1; 0 for other states.
	Share float64 `json:"share"`
}

// shares adds the configured shares to the policies.
func (d *dashboardView) shares(rows []PolicyRow) []SnapshotPolicy {
	list := make([]SnapshotPolicy, 0, len(rows))
	for _, r := range rows {
		p := SnapshotPolicy{PolicyRow: r}
		if plugin, _, _ := strings.Cut(r.Name, "/"); r.State == "canary" {
			for _, c := range d.o.Config().Plugins {
				if c.Name == plugin {
					p.Share = c.Canary
				}
			}
		}
		list = append(list, p)
	}
	return list
}
