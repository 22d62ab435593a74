package admin

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
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
	hub     *dashboard.Hub
}

func newDashboardView(o Options) *dashboardView {
	d := &dashboardView{fleetView: fleetView{o}, process: rand.Text()}
	d.hub = &dashboard.Hub{
		Begin: func() dashboard.Snapshots { return (&watch{view: d, next: make(map[string]position)}).snapshot },
		End:   o.Unwatch,
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

// The path of a part, and its query parameter.
const (
	partPath  = "/v1/dashboard/part"
	partAfter = "after"
)

// position is where the reader of a process's Recent continues.
type position struct {
	next uint64
	seen time.Time // when the process answered last
}

// part answers GET /v1/dashboard/part. Each query parameter after is the Process and the
// Recent.Next of an earlier part, with a point between them.
func (d *dashboardView) part(w http.ResponseWriter, r *http.Request) {
	var after uint64
	for _, position := range r.URL.Query()[partAfter] {
		if process, next, _ := strings.Cut(position, "."); process == d.process {
			after, _ = strconv.ParseUint(next, 10, 64) // 0 after an error: all
		}
	}
	downstream.JSON(w, 200, d.own(after))
}

// own returns the part of this process.
func (d *dashboardView) own(after uint64) DashboardPart {
	waiting := d.o.Waiting()
	return DashboardPart{
		Process: d.process, Running: max(0, d.o.Running.Len()-waiting), Waiting: waiting,
		Totals: d.o.Metrics.Totals(), Recent: d.o.Ended.Recent(after), Policies: d.o.Policies.List(),
	}
}

// parts returns the parts of this process and of its workers. next has the positions by
// process.
func (d *dashboardView) parts(ctx context.Context, next map[string]position) (list []DashboardPart, silent int) {
	list = []DashboardPart{d.own(next[d.process].next)}
	if d.o.Workers == nil {
		return list, 0
	}
	query := make(url.Values)
	for process, p := range next {
		query.Add(partAfter, fmt.Sprintf("%s.%d", process, p.next))
	}
	for _, a := range d.o.Workers.Each(ctx, http.MethodGet, partPath+"?"+query.Encode(), nil) {
		var p DashboardPart
		if a.Err != nil || a.Status != http.StatusOK || json.Unmarshal(a.Body, &p) != nil {
			silent++
			continue
		}
		list = append(list, p)
	}
	return list, silent
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
	Traffic  dashboard.Traffic  `json:"traffic"`
	Engines  []SnapshotEngine   `json:"engines"`
	Pairs    []SnapshotPair     `json:"pairs"`
	MorePair int                `json:"more_pairs"` // how many pairs the list leaves out
	KV       SnapshotKV         `json:"kv"`
	Policies []SnapshotPolicy   `json:"policies"`
	Troubled []journal.EndedRow `json:"troubled"` // the newest first, as Latest
	Latest   []journal.EndedRow `json:"latest"`
}

// watch takes the snapshots while somebody watches. One goroutine uses it.
type watch struct {
	view             *dashboardView
	meter            dashboard.Meter
	next             map[string]position // by process
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
	parts, silent := w.view.parts(ctx, w.next)
	now := time.Now()
	s := Snapshot{Time: float64(now.UnixMilli()) / 1e3, Version: w.view.o.Version, Silent: silent}
	if w.view.o.Workers != nil {
		workers := len(parts) - 1 + silent
		s.Workers = &workers
	}
	prompts := make(map[string]journal.PromptTokens)
	policies := []PolicyRow{}
	running, waiting := 0, 0
	for _, p := range parts {
		w.next[p.Process] = position{p.Recent.Next, now}
		w.meter.Report(p.Process, p.Totals)
		running, waiting = running+p.Running, waiting+p.Waiting
		policies = sumPolicies(policies, p.Policies)
		w.latest = append(w.latest, p.Recent.Latest...)
		w.troubled = append(w.troubled, p.Recent.Troubled...)
		addPrompts(prompts, p.Recent.Prompts)
	}
	w.forget(now)
	s.Traffic = w.meter.Traffic(now)
	s.Traffic.Running, s.Traffic.Waiting = running, waiting
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

// forget drops the processes that have not answered for promptWindow.
func (w *watch) forget(now time.Time) {
	for process, p := range w.next {
		if now.Sub(p.seen) > promptWindow {
			delete(w.next, process)
			w.meter.Forget(process)
		}
	}
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
