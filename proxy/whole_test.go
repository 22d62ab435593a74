package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// nobody is the Numbers of a worker that has none of the coordinator's instances.
type nobody struct{}

func (nobody) Number(*engine.Instance) (uint32, bool) { return 0, false }
func (nobody) Instance(uint32) *engine.Instance       { return nil }

// mute is a list of workers; one worker never answers.
type mute struct{ admin.Workers }

func (m mute) Each(ctx context.Context, method, path string, body []byte) []admin.WorkerAnswer {
	return append(m.Workers.Each(ctx, method, path, body), admin.WorkerAnswer{Name: "h/9", Err: errors.New("no answer")})
}

// wholeFleet is a coordinator with connected workers. Each worker has its own engine and
// has served one request, whose name contains the worker's slot.
func wholeFleet(t *testing.T, workers int, change func(admin.Workers) admin.Workers) (front *world, behind []*world) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var server *fleet.Server
	front = newWorld(t, setup{options: func(d *Options) {
		server = fleet.NewServer(fleet.ServerOptions{Local: d.Coordinator.(*coordinator.Local), Log: d.Log, Epoch: 1})
		d.Workers = admin.NewWorkers(server)
		if change != nil {
			d.Workers = change(d.Workers)
		}
	}})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() {
		if err := server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	for slot := range workers {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, `{}`) }}}})
		c := fleet.NewClient(fleet.ClientOptions{
			Dial:     func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", path) },
			Fallback: w.local, Mirror: nobody{}, Admin: w.AdminHandler(), Slot: slot, Node: "h", Log: slog.New(slog.DiscardHandler),
		})
		running.Go(func() { c.Run(ctx) })
		for !c.Connected() {
			time.Sleep(time.Millisecond)
		}
		if a := w.post("/v1/completions", `{"prompt":"x"}`, "X-Request-Id", fmt.Sprint("request-", slot)); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		w.settled()
		behind = append(behind, w)
	}
	return front, behind
}

// into sends a request to the coordinator and decodes the answer.
func (w *world) into(v any, path string) {
	w.t.Helper()
	a := w.operate("GET", path, "")
	if a.status != 200 {
		w.t.Fatalf("%s: %d %s", path, a.status, a.body)
	}
	if err := json.Unmarshal([]byte(a.body), v); err != nil {
		w.t.Fatalf("%s: %v in %s", path, err, a.body)
	}
}

// shows asserts that GET /metrics contains lines.
func (w *world) shows(lines ...string) {
	w.t.Helper()
	a := w.operate("GET", "/metrics", "")
	for _, line := range lines {
		if a.status != 200 || !strings.Contains(a.body, "\n"+line+"\n") {
			w.t.Errorf("%d, no line %s", a.status, line)
		}
	}
}

// TestWhole: the coordinator's admin address shows the data of its workers, and passes
// changes to them.
func TestWhole(t *testing.T) {
	front, behind := wholeFleet(t, 3, nil)
	for slot := range behind {
		var e journal.Explanation
		if front.into(&e, fmt.Sprint("/v1/explain/request-", slot)); e.RequestID != fmt.Sprint("request-", slot) || len(e.Legs) != 1 || e.Arrival == 0 {
			t.Errorf("explained as %+v", e)
		}
	}
	if a := front.operate("GET", "/v1/explain/another%2Fone", ""); a.status != 404 {
		t.Errorf("%d %s", a.status, a.body)
	}
	behind[2].post("/v1/completions", `{"prompt":"x"}`, "X-Request-Id", "request-0")
	behind[2].settled()
	var last journal.Explanation
	var all []journal.PerfRow
	front.into(&last, "/v1/explain/request-0")
	front.into(&all, "/perf_metrics")
	slices.SortFunc(all, func(a, b journal.PerfRow) int { return int((a.Arrival - b.Arrival) * 1e6) })
	if len(all) != 4 || all[3].RequestID != "request-0" || last.Arrival != all[3].Arrival {
		t.Errorf("time of request-0: got %v; all: %+v", last.Arrival, all)
	}
	front.shows(`pdproxy_exchanges_total{flow="aggregated",model="m",outcome="ok"} 4`, "pdproxy_fleet_workers 3", "pdproxy_fleet_silent_workers 0")
	var rows []admin.PolicyRow
	if front.into(&rows, "/v1/policies"); len(rows) != 1 || rows[0].Calls != 12 || rows[0].MeanUS != 0.5 || rows[0].P99US != 2 {
		t.Errorf("%+v", rows)
	}
	var workers []fleet.WorkerRow
	if front.into(&workers, "/v1/workers"); len(workers) != 3 || workers[2].Slot != 2 || workers[2].Node != "h" {
		t.Errorf("%+v", workers)
	}
	if a := front.operate("POST", "/v1/policies/auto/reload", ""); a.status != 200 || !strings.Contains(a.body, `"workers":3`) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := front.operate("POST", "/v1/policies/other/reload", ""); a.status == 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := front.operate("POST", "/v1/drain", ""); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	for n, w := range behind {
		if len(w.policies.reloaded) != 1 || w.get("/health").status != 503 {
			t.Errorf("worker %d: reloaded %v, answer to drain %d", n, w.policies.reloaded, w.get("/health").status)
		}
	}
}

// TestWholeSilent: a worker that does not answer delays no answer, and the answer names
// it. A change that did not reach all workers is an error.
func TestWholeSilent(t *testing.T) {
	front, _ := wholeFleet(t, 1, func(w admin.Workers) admin.Workers { return mute{w} })
	var e journal.Explanation
	front.into(&e, "/v1/explain/request-0")
	front.shows(`pdproxy_exchanges_total{flow="aggregated",model="m",outcome="ok"} 1`, "pdproxy_fleet_workers 2", "pdproxy_fleet_silent_workers 1")
	if a := front.operate("GET", "/v1/explain/none", ""); a.status != 404 || !strings.Contains(a.body, "1 workers did not answer") {
		t.Errorf("%d %s", a.status, a.body)
	}
	for _, path := range []string{"/v1/policies/auto/reload", "/v1/drain"} {
		if a := front.operate(http.MethodPost, path, ""); a.status != 504 || !strings.Contains(a.body, `"silent_workers":1`) {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
}
