package proxy_test

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

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// nobody is the Numbers of a worker that has none of the coordinator's instances.
type nobody struct{}

func (nobody) Number(*engine.Instance) (uint32, bool) { return 0, false }

func (nobody) Instance(uint32) *engine.Instance { return nil }

// mute is a list of workers; one worker never answers.
type mute struct{ admin.Workers }

func (m mute) Each(ctx context.Context, method, path string, body []byte) []admin.WorkerAnswer {
	return append(m.Workers.Each(ctx, method, path, body), admin.WorkerAnswer{Name: "h/9", Err: errors.New("no answer")})
}

// wholeFleet is a coordinator with connected workers. Each worker has its own engine and
// has served one request, whose name contains the worker's slot.
func wholeFleet(t *testing.T, workers int, change func(admin.Workers) admin.Workers) (front *world.World, behind []*world.World) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var server *fleet.Server
	front = newWorld(t, world.Setup{Options: func(d *proxy.Options) {
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
		w := newWorld(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{}`) }}}})
		c := fleet.NewClient(fleet.ClientOptions{
			Dial:     func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", path) },
			Fallback: w.Local, Mirror: nobody{}, Admin: w.AdminHandler(), Slot: slot, Node: "h", Log: slog.New(slog.DiscardHandler),
		})
		running.Go(func() { c.Run(ctx) })
		for !c.Connected() {
			time.Sleep(time.Millisecond)
		}
		if a := w.Post("/v1/completions", `{"prompt":"x"}`, "X-Request-Id", fmt.Sprint("request-", slot)); a.Status != 200 {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
		w.Settled()
		behind = append(behind, w)
	}
	return front, behind
}

// into sends a request to the coordinator and decodes the answer.
func into(w *world.World, v any, path string) {
	w.T.Helper()
	a := w.Operate("GET", path, "")
	if a.Status != 200 {
		w.T.Fatalf("%s: %d %s", path, a.Status, a.Body)
	}
	if err := json.Unmarshal([]byte(a.Body), v); err != nil {
		w.T.Fatalf("%s: %v in %s", path, err, a.Body)
	}
}

// shows asserts that GET /metrics contains lines.
func shows(w *world.World, lines ...string) {
	w.T.Helper()
	a := w.Operate("GET", "/metrics", "")
	for _, line := range lines {
		if a.Status != 200 || !strings.Contains(a.Body, "\n"+line+"\n") {
			w.T.Errorf("%d, no line %s", a.Status, line)
		}
	}
}

// TestWhole: the coordinator's admin address shows the data of its workers, and passes
// changes to them.
func TestWhole(t *testing.T) {
	front, behind := wholeFleet(t, 3, nil)
	for slot := range behind {
		var e journal.Explanation
		if into(front, &e, fmt.Sprint("/v1/explain/request-", slot)); e.RequestID != fmt.Sprint("request-", slot) || len(e.Legs) != 1 || e.Arrival == 0 {
			t.Errorf("explained as %+v", e)
		}
	}
	if a := front.Operate("GET", "/v1/explain/another%2Fone", ""); a.Status != 404 {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	behind[2].Post("/v1/completions", `{"prompt":"x"}`, "X-Request-Id", "request-0")
	behind[2].Settled()
	var last journal.Explanation
	var all []journal.PerfRow
	into(front, &last, "/v1/explain/request-0")
	into(front, &all, "/perf_metrics")
	slices.SortFunc(all, func(a, b journal.PerfRow) int { return int((a.Arrival - b.Arrival) * 1e6) })
	if len(all) != 4 || all[3].RequestID != "request-0" || last.Arrival != all[3].Arrival {
		t.Errorf("time of request-0: got %v; all: %+v", last.Arrival, all)
	}
	shows(front, `pdproxy_exchanges_total{flow="aggregated",model="m",outcome="ok"} 4`, "pdproxy_fleet_workers 3", "pdproxy_fleet_silent_workers 0")
	var rows []admin.PolicyRow
	if into(front, &rows, "/v1/policies"); len(rows) != 1 || rows[0].Calls != 12 || rows[0].MeanUS != 0.5 || rows[0].P99US != 2 {
		t.Errorf("%+v", rows)
	}
	var workers []fleet.WorkerRow
	if into(front, &workers, "/v1/workers"); len(workers) != 3 || workers[2].Slot != 2 || workers[2].Node != "h" {
		t.Errorf("%+v", workers)
	}
	if a := front.Operate("POST", "/v1/policies/auto/reload", ""); a.Status != 200 || !strings.Contains(a.Body, `"workers":3`) {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	if a := front.Operate("POST", "/v1/policies/other/reload", ""); a.Status == 200 {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	if a := front.Operate("POST", "/v1/drain", ""); a.Status != 200 {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	for n, w := range behind {
		if len(w.Policies.Reloaded) != 1 || w.Get("/health").Status != 503 {
			t.Errorf("worker %d: reloaded %v, answer to drain %d", n, w.Policies.Reloaded, w.Get("/health").Status)
		}
	}
}

// TestWholeSilent: a worker that does not answer delays no answer, and the answer names
// it. A change that did not reach all workers is an error.
func TestWholeSilent(t *testing.T) {
	front, _ := wholeFleet(t, 1, func(w admin.Workers) admin.Workers { return mute{w} })
	var e journal.Explanation
	into(front, &e, "/v1/explain/request-0")
	shows(front, `pdproxy_exchanges_total{flow="aggregated",model="m",outcome="ok"} 1`, "pdproxy_fleet_workers 2", "pdproxy_fleet_silent_workers 1")
	if a := front.Operate("GET", "/v1/explain/none", ""); a.Status != 404 || !strings.Contains(a.Body, "1 workers did not answer") {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	for _, path := range []string{"/v1/policies/auto/reload", "/v1/drain"} {
		if a := front.Operate(http.MethodPost, path, ""); a.Status != 504 || !strings.Contains(a.Body, `"silent_workers":1`) {
			t.Errorf("%s: %d %s", path, a.Status, a.Body)
		}
	}
}
