package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/admin/dashboard"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// parts are workers that answer with their parts.
type parts struct {
	workers
	mu    sync.Mutex      // guards list while a history records
	list  []DashboardPart // of the workers
	asked []url.Values    // query of each round
	away  bool            // the last worker gives no answer
}

func (p *parts) set(list ...DashboardPart) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = list
}

func (p *parts) Each(_ context.Context, method, path string, _ []byte) (answers []WorkerAnswer) {
	u, err := url.Parse(path)
	if err != nil || method != http.MethodGet || u.Path != "/v1/dashboard/part" {
		panic(path)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, u.Query())
	for i, part := range p.list {
		body, _ := json.Marshal(part)
		a := WorkerAnswer{Name: part.Process, Status: 200, Body: body}
		if p.away && i == len(p.list)-1 {
			a = WorkerAnswer{Name: part.Process, Err: context.DeadlineExceeded}
		}
		answers = append(answers, a)
	}
	return answers
}

// part returns a worker's part: n requests have ended, the last one named after the process.
func part(process string, n int, outcome string) DashboardPart {
	row := journal.EndedRow{RequestID: fmt.Sprint(process, n), End: float64(n), Outcome: outcome}
	p := DashboardPart{
		Process: process, Running: 2, Waiting: 1,
		Totals:   telemetry.Totals{Outcomes: map[string]float64{outcome: float64(n)}, Broken: 1, Continuations: map[string]float64{"continued": 2, process: 1}},
		Recent:   journal.Recent{Next: uint64(n), Latest: []journal.EndedRow{row}, Prompts: map[string]journal.PromptTokens{"p0": {Tokens: 100, Cached: 25}}},
		Policies: []PolicyRow{{Name: "auto", Phase: "plan", Calls: 10, MeanUS: 2}},
	}
	if outcome != "ok" {
		p.Recent.Troubled = p.Recent.Latest
	}
	return p
}

// watched returns a watch of a process with an engine p0 and these workers.
func watched(t *testing.T, w Workers) *watch {
	t.Helper()
	registry := engine.New(engine.Options{})
	t.Cleanup(registry.Close)
	d := newDashboardView(Options{
		Config: func() *config.Config { return new(config.Config) }, Registry: registry, Policies: policies{}, Workers: w,
		Running: new(journal.Running), Ended: new(journal.Ring), Metrics: telemetry.New(prometheus.NewRegistry()), Waiting: func() int { return 0 }, Version: "v",
	})
	return &watch{collector: newCollector(d, false)}
}

func (w *watch) take(t *testing.T) (s Snapshot) {
	t.Helper()
	if err := json.Unmarshal(w.snapshot(t.Context()), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSnapshotOfAllWorkers: a snapshot has the sums of the coordinator and its workers, and
// requests from each process only the new data.
func TestSnapshotOfAllWorkers(t *testing.T) {
	p := &parts{list: []DashboardPart{part("a", 5, "ok"), part("b", 9, "broken")}}
	w := watched(t, p)
	s := w.take(t)
	if s.Workers == nil || *s.Workers != 2 || s.Silent != 0 || s.Traffic.Running != 4 || s.Traffic.Waiting != 2 || s.Version != "v" {
		t.Errorf("got %+v", s)
	}
	if len(s.Latest) != 2 || s.Latest[0].RequestID != "b9" || len(s.Troubled) != 1 || s.Troubled[0].RequestID != "b9" {
		t.Errorf("latest %+v, troubled %+v", s.Latest, s.Troubled)
	}
	if len(s.Policies) != 1 || s.Policies[0].Calls != 21 { // policies.List has one call
		t.Errorf("policies %+v", s.Policies)
	}
	if want := map[string]float64{"continued": 4, "a": 1, "b": 1}; s.Streams.Broken != 2 || !maps.Equal(s.Streams.Continuations, want) {
		t.Errorf("streams %+v", s.Streams)
	}
	p.list[1] = part("b", 9, "broken") // the same request again, as if the position was lost
	p.away = true
	if s = w.take(t); s.Silent != 1 || *s.Workers != 2 || len(s.Latest) != 2 {
		t.Errorf("with a silent worker: %+v", s)
	}
	p.away = false
	if s = w.take(t); len(s.Latest) != 2 || len(s.Troubled) != 1 {
		t.Errorf("a request is listed twice: %+v", s.Latest)
	}
	positions := p.asked[2]["after"]
	slices.Sort(positions)
	if !slices.Contains(positions, "a.5") || !slices.Contains(positions, "b.9") {
		t.Errorf("the third round requests data after %q", positions)
	}
}

// TestSnapshotLists: without a request, all lists are empty lists and not null, so that the
// page need not distinguish.
func TestSnapshotLists(t *testing.T) {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(watched(t, nil).snapshot(t.Context()), &raw); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"engines", "pairs", "policies", "troubled", "latest"} {
		if !strings.HasPrefix(string(raw[name]), "[") {
			t.Errorf("%s is %s", name, raw[name])
		}
	}
	if string(raw["workers"]) != "null" {
		t.Errorf("workers is %s", raw["workers"])
	}
}

// TestPart: a position counts only for the process that gave it.
func TestPart(t *testing.T) {
	w := watched(t, nil)
	ask := func(query string) (p DashboardPart) {
		answer := httptest.NewRecorder()
		w.view.part(answer, httptest.NewRequest("GET", "/v1/dashboard/part?"+query, nil))
		if err := json.Unmarshal(answer.Body.Bytes(), &p); err != nil || answer.Code != 200 {
			t.Fatalf("%d %s", answer.Code, answer.Body)
		}
		return p
	}
	p := ask("")
	if p.Process == "" || p.Totals.Outcomes == nil || len(p.Policies) != 1 {
		t.Errorf("got %+v", p)
	}
	if got := ask("traffic=true"); got.Totals.Outcomes == nil || got.Recent.Latest == nil || got.Recent.Prompts == nil || got.Policies == nil || len(got.Policies) != 0 {
		t.Errorf("the traffic alone: %+v", got)
	}
	for _, query := range []string{"after=" + p.Process + ".0", "after=other.7", "after=", "after=" + p.Process + ".x"} {
		if got := ask(query); got.Recent.Next != 0 {
			t.Errorf("%s: %+v", query, got.Recent)
		}
	}
}

// TestHistoryOfAllWorkers: while the process has an admin address, it records the traffic of the
// coordinator and its workers, whether anybody watches or not.
func TestHistoryOfAllWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &parts{list: []DashboardPart{part("a", 5, "ok"), part("b", 9, "broken")}}
		o := watched(t, p).view.o
		end := make(chan struct{})
		o.Unwatch = end
		d := newDashboardView(o)
		synctest.Wait()
		p.set(part("a", 25, "ok"), part("b", 19, "broken"))
		time.Sleep(dashboard.Step)
		synctest.Wait()
		close(end)
		synctest.Wait()
		time.Sleep(time.Hour)
		if points := d.history.Points(); len(points) != 1 || points[0].Requests != 15 || points[0].Failed != 5 || points[0].Running != 4 || points[0].Seconds != 2 {
			t.Errorf("got %+v", points)
		}
		if n := len(p.asked); n != 2 {
			t.Errorf("the workers were asked %d times", n)
		}
		if asked := p.asked[1].Encode(); asked != "traffic=true" {
			t.Errorf("the workers were asked for %s", asked)
		}
	})
}

// TestFirstSnapshot: the first snapshot of a viewer has the rates of the time before the viewer came.
func TestFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &parts{list: []DashboardPart{part("a", 0, "ok")}}
		o := watched(t, p).view.o
		end := make(chan struct{})
		o.Unwatch = end
		d := newDashboardView(o)
		for n := range 10 {
			synctest.Wait()
			p.set(part("a", 8*(n+1), "ok")) // 4 per second
			time.Sleep(dashboard.Step)
		}
		var s Snapshot
		if err := json.Unmarshal(d.hub.Begin()(t.Context()), &s); err != nil {
			t.Fatal(err)
		}
		if s.Seconds != 10 || s.Traffic.Requests != 4 || s.Traffic.Outcomes["ok"] != 4 {
			t.Errorf("got %+v", s.Traffic)
		}
		close(end)
		synctest.Wait()
	})
}

// held are workers that answer with the requests of a period.
type held struct {
	workers
	asked string
}

func (h *held) Each(_ context.Context, _, path string, _ []byte) []WorkerAnswer {
	h.asked = path
	return h.workers
}

// TestRequestsOfAPeriod: the coordinator adds the requests of its workers. The time from which requests
// are held is the latest of all processes.
func TestRequestsOfAPeriod(t *testing.T) {
	answer := func(since float64, troubled, other string) WorkerAnswer {
		body, _ := json.Marshal(DashboardRequests{During: journal.During{
			Troubled: []journal.EndedRow{{RequestID: troubled, End: since}}, Others: []journal.EndedRow{{RequestID: other, End: since}}, Total: 2, Since: since,
		}})
		return WorkerAnswer{Status: 200, Body: body}
	}
	h := &held{workers: workers{answer(4e9, "t1", "o1"), answer(5e9, "t2", "o2"), {Err: context.DeadlineExceeded}, {Status: 404}}}
	o := watched(t, h).view.o
	o.Log = slog.New(slog.DiscardHandler)
	d := newDashboardView(o)
	ask := func(query string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		d.requests(w, httptest.NewRequest("GET", "/v1/dashboard/requests?"+query, nil))
		return w
	}
	w := ask("from=10&to=20.5")
	var got DashboardRequests
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	if got.Total != 4 || got.Silent != 2 || got.Since != 5e9 || len(got.Troubled) != 2 || got.Troubled[0].RequestID != "t2" || got.Others[1].RequestID != "o1" {
		t.Errorf("got %+v", got)
	}
	if h.asked != "/v1/dashboard/requests?from=10&to=20.5" {
		t.Errorf("the workers were asked %s", h.asked)
	}
	for query, param := range map[string]string{"": "from", "from=1": "to", "from=x&to=2": "from", "from=1&to=NaN": "to", "from=1&to=Inf": "to", "from=-1&to=2": "from", "from=1&to=1e300": "to", "from=3&to=2": "to"} {
		var refusal struct{ Error struct{ Code, Param string } }
		w := ask(query)
		if err := json.Unmarshal(w.Body.Bytes(), &refusal); err != nil || w.Code != 400 || refusal.Error.Code != "bad_value" || refusal.Error.Param != param {
			t.Errorf("%q: %d %s", query, w.Code, w.Body)
		}
	}
}

// TestCompared: an engine agrees with the index only after a comparison.
func TestCompared(t *testing.T) {
	for _, tt := range []struct {
		verdict         indexcheck.Verdict
		index, distrust string
	}{
		{indexcheck.Verdict{}, "unchecked", ""},
		{indexcheck.Verdict{Requests: 3}, "agrees", ""},
		{indexcheck.Verdict{Requests: 30, Reason: indexcheck.StaleIndex}, "disagrees", "stale_index"},
	} {
		if index, distrust := compared(new(engine.Instance), tt.verdict); index != tt.index || distrust != tt.distrust {
			t.Errorf("%+v: %q, %q", tt.verdict, index, distrust)
		}
	}
}

// TestPageNeedsNoToken: a browser opens the page without the token, and reads nothing else.
func TestPageNeedsNoToken(t *testing.T) {
	h := Guard(Handler(Options{Ready: http.NotFound, Log: slog.New(slog.DiscardHandler)}), new(config.Config), nil, Token{Text: "secret"}, nil)
	for _, tt := range []struct {
		method, path, accept string
		status               int
	}{
		{"GET", "/", "text/html", 200}, {"HEAD", "/", "text/html", 200},
		{"GET", "/", "*/*", 401}, {"POST", "/", "text/html", 401},
		{"GET", "/dashboard/main.js", "*/*", 200}, {"GET", "/dashboard/none.js", "*/*", 404}, {"GET", "/dashboard/../v1/engines", "text/html", 307},
		{"GET", "/v1/dashboard/events", "text/html", 401}, {"GET", "/v1/dashboard/part", "text/html", 401},
		{"GET", "/v1/dashboard/history", "text/html", 401}, {"GET", "/v1/dashboard/requests", "text/html", 401},
		{"GET", "/v1/engines", "text/html", 401}, {"GET", "/metrics", "text/html", 401}, {"GET", "/v1/explain/x", "text/html", 401},
	} {
		r := httptest.NewRequest(tt.method, "http://127.0.0.1"+tt.path, nil)
		r.Header.Set("Accept", tt.accept)
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, r)
		if answer.Code != tt.status {
			t.Errorf("%s %s (%s): %d, want %d", tt.method, tt.path, tt.accept, answer.Code, tt.status)
		}
		if strings.Contains(answer.Header().Get("Content-Type"), "html") && answer.Code == 200 && answer.Header().Get("Vary") != "Accept" {
			t.Errorf("%s: a cache may mix up the page and the list", tt.path)
		}
	}
}
