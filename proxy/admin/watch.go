package admin

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin/dashboard"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// dashboardView serves the data of the dashboard.
type dashboardView struct {
	fleetView
	process string // identifies this process among those of a fleet
	began   time.Time
	hub     *dashboard.Hub
	history *dashboard.History
}

func newDashboardView(o Options) *dashboardView {
	d := &dashboardView{fleetView: fleetView{o}, process: rand.Text(), began: time.Now(), history: dashboard.NewHistory()}
	d.hub = &dashboard.Hub{
		Begin: func() dashboard.Snapshots { return (&watch{collector: newCollector(d, false)}).snapshot },
		End:   o.Unwatch,
	}
	if o.Unwatch != nil {
		d.record(o.Unwatch)
	}
	return d
}

// DashboardPart is the answer of GET /v1/dashboard/part: the data that only one process of a fleet
// has.
type DashboardPart struct {
	Process  string           `json:"process"` // differs after a restart
	Running  int              `json:"running"`
	Waiting  int              `json:"waiting"`
	Totals   telemetry.Totals `json:"totals"`
	Recent   journal.Recent   `json:"recent"`
	Policies []PolicyRow      `json:"policies"`
}

// The path of a part, and its query parameters.
const (
	partPath    = "/v1/dashboard/part"
	partAfter   = "after"
	partTraffic = "traffic"
)

// part answers GET /v1/dashboard/part. Each query parameter after is the Process and the
// Recent.Next of an earlier part, with a point between them. With traffic=true, the lists of requests
// and policies are empty.
func (d *dashboardView) part(w http.ResponseWriter, r *http.Request) {
	var after uint64
	for _, position := range r.URL.Query()[partAfter] {
		if process, next, _ := strings.Cut(position, "."); process == d.process {
			after, _ = strconv.ParseUint(next, 10, 64) // 0 after an error: all
		}
	}
	downstream.JSON(w, 200, d.own(after, r.URL.Query().Get(partTraffic) == "true"))
}

// own returns the part of this process. traffic: without requests and policies.
func (d *dashboardView) own(after uint64, traffic bool) DashboardPart {
	waiting := d.o.Waiting()
	p := DashboardPart{Process: d.process, Running: max(0, d.o.Running.Len()-waiting), Waiting: waiting, Totals: d.o.Metrics.Totals()}
	if traffic {
		p.Recent, p.Policies = journal.NoRecent(), []PolicyRow{}
	} else {
		p.Recent, p.Policies = d.o.Ended.Recent(after), d.o.Policies.List()
	}
	return p
}

// Limits of the lists of a Snapshot.
const (
	maxLatest   = 12
	maxTroubled = 40
	maxPairs    = 1024
)

// promptWindow is how long prompts count in the hit ratios of engines.
const promptWindow = 5 * time.Minute

// Snapshot is the data of an event of GET /v1/dashboard/events.
type Snapshot struct {
	Time    float64 `json:"time"` // seconds since the Unix epoch
	Version string  `json:"version"`
	// Workers is the number of workers of a coordinator, nil if the process is none; Silent
	// is how many of them gave no answer in time.
	Workers  *int               `json:"workers"`
	Silent   int                `json:"silent_workers"`
	Seconds  float64            `json:"seconds"` // the traffic has begun so long before Time
	Traffic  dashboard.Traffic  `json:"traffic"`
	Engines  []SnapshotEngine   `json:"engines"`
	Pairs    []SnapshotPair     `json:"pairs"`
	MorePair int                `json:"more_pairs"` // how many pairs the list leaves out
	KV       SnapshotKV         `json:"kv"`
	Policies []SnapshotPolicy   `json:"policies"`
	Streams  SnapshotStreams    `json:"streams"`
	Troubled []journal.EndedRow `json:"troubled"` // the newest first, as Latest
	Latest   []journal.EndedRow `json:"latest"`
}

// SnapshotStreams counts the streams that broke off, since the start of the processes.
type SnapshotStreams struct {
	Broken        float64            `json:"broken"`        // that ended in an error event
	Continuations map[string]float64 `json:"continuations"` // as pdproxy_continuations_total, by result
}

// add adds the streams of a process.
func (s *SnapshotStreams) add(t telemetry.Totals) {
	s.Broken += t.Broken
	for result, n := range t.Continuations {
		s.Continuations[result] += n
	}
}

// watch takes the snapshots while somebody watches. One goroutine uses it.
type watch struct {
	*collector
	latest, troubled []journal.EndedRow
	prompts          []promptSample // of the last promptWindow; oldest first
}

// promptSample are the prompts that ended since the sample before it.
type promptSample struct {
	at      time.Time
	prompts map[string]journal.PromptTokens // by engine
}

// snapshot is a dashboard.Snapshots.
func (w *watch) snapshot(ctx context.Context) []byte {
	now, parts, silent, gauges := w.collect(ctx)
	s := Snapshot{Time: float64(now.UnixMilli()) / 1e3, Version: w.view.o.Version, Silent: silent, Streams: SnapshotStreams{Continuations: make(map[string]float64)}}
	if w.view.o.Workers != nil {
		workers := len(parts) - 1 + silent
		s.Workers = &workers
	}
	prompts := make(map[string]journal.PromptTokens)
	policies := []PolicyRow{}
	for _, p := range parts {
		s.Streams.add(p.Totals)
		policies = sumPolicies(policies, p.Policies)
		w.latest = append(w.latest, p.Recent.Latest...)
		w.troubled = append(w.troubled, p.Recent.Troubled...)
		addPrompts(prompts, p.Recent.Prompts)
	}
	var took time.Duration
	s.Traffic, took = w.meter.Traffic()
	s.Traffic.Gauges, s.Seconds = gauges, took.Seconds()
	w.latest, w.troubled = newest(w.latest, maxLatest, nil), newest(w.troubled, maxTroubled, make(journal.Troubles))
	s.Latest, s.Troubled = w.latest, w.troubled
	s.Engines = w.view.engines(now, w.hits(now, prompts))
	s.Pairs, s.MorePair = w.view.pairs()
	s.KV = w.view.kv()
	s.Policies = w.view.shares(policies)
	text, err := json.Marshal(s)
	if err != nil { // no field can be the cause
		w.view.o.Log.Error("the dashboard has no snapshot", "error", err)
		return []byte("{}")
	}
	return text
}

// hits adds the prompts of now and returns those of the last promptWindow.
func (w *watch) hits(now time.Time, prompts map[string]journal.PromptTokens) map[string]journal.PromptTokens {
	if len(prompts) > 0 {
		w.prompts = append(w.prompts, promptSample{now, prompts})
	}
	for len(w.prompts) > 0 && now.Sub(w.prompts[0].at) > promptWindow {
		w.prompts = w.prompts[1:]
	}
	sum := make(map[string]journal.PromptTokens)
	for _, s := range w.prompts {
		addPrompts(sum, s.prompts)
	}
	return sum
}

func addPrompts(sum, more map[string]journal.PromptTokens) {
	for engine, n := range more {
		sum[engine] = journal.PromptTokens{Tokens: sum[engine].Tokens + n.Tokens, Cached: sum[engine].Cached + n.Cached}
	}
}

// newest returns the n rows that ended last, the newest first, and only a few with the same
// trouble unless kinds is nil.
func newest(rows []journal.EndedRow, n int, kinds journal.Troubles) []journal.EndedRow {
	slices.SortStableFunc(rows, func(a, b journal.EndedRow) int {
		return cmp.Or(cmp.Compare(b.End, a.End), cmp.Compare(a.RequestID, b.RequestID))
	})
	rows = slices.CompactFunc(rows, func(a, b journal.EndedRow) bool { return a.End == b.End && a.RequestID == b.RequestID })
	if kinds != nil {
		rows = slices.DeleteFunc(rows, func(r journal.EndedRow) bool { return !kinds.Few(&r) })
	}
	return append([]journal.EndedRow{}, rows[:min(n, len(rows))]...) // never nil, so that JSON shows a list
}
