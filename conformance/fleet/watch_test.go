package fleet

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// call sends a request, and returns its status and content.
func (f *fleet) call(method, url, body string, header ...string) (status int, text string) {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	if strings.HasPrefix(url, f.coordinator.AdminURL()+"/") {
		testbed.Authorize(f.t, r)
	} else if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// TestWatched: the coordinator shows the past and present work of all workers,
// serves TensorRT-LLM's own fleet workers at the same address, and reaches all
// processes.
func TestWatched(t *testing.T) {
	f := bare(t, enginesim.ConnectorTRTLLM, 2)
	f.cfg.Fleet.Listen = "127.0.0.1:0"
	f.coordinator = f.node(pdnode.RoleCoordinator, 0)
	for slot := range 2 {
		f.workers = append(f.workers, f.node(pdnode.RoleWorker, slot))
	}
	for _, w := range f.workers {
		testbed.Eventually(t, "the worker is ready", func() bool { return f.status(w.URL()+"/health") == 200 })
	}
	admin := f.coordinator.admin
	for n, w := range f.workers {
		for i := range 3 {
			id := fmt.Sprintf("request-%d-%d", n, i)
			body := fmt.Sprintf(`{"model":"sim","prompt":"prompt %s","max_tokens":4}`, id)
			if status, text := f.call("POST", w.URL()+"/v1/completions", body, "X-Request-Id", id); status != 200 {
				t.Fatalf("f.call = %d, %s", status, text)
			}
			testbed.Eventually(t, "the coordinator's explanation has the candidates", func() bool {
				var e struct {
					Flow       string
					Candidates []struct{ Engine string }
					Legs       []struct{ Phase, Engine string }
				}
				return admin.Get("/v1/explain/"+id, &e) == nil && e.Flow == "prefill_first" && len(e.Candidates) == 4 && len(e.Legs) == 2 && e.Candidates[0].Engine != ""
			})
		}
	}
	if all, one := f.metric(f.coordinator, "pdproxy_exchanges_total"), f.metric(f.workers[1], "pdproxy_exchanges_total"); all != 6 || one != 3 {
		t.Errorf("%v exchanges in all, %v of one worker", all, one)
	}
	if n := f.metric(f.coordinator, "pdproxy_fleet_workers"); n != 2 {
		t.Errorf("got %v workers", n)
	}
	var rows []struct {
		RequestID string `json:"request_id"`
		Slot      int
	}
	if err := admin.Get("/perf_metrics", &rows); err != nil || len(rows) != 6 {
		t.Errorf(`admin.Get("/perf_metrics", &rows) = %v, %+v`, err, rows)
	}
	if err := admin.Get("/v1/workers", &rows); err != nil || len(rows) != 2 || rows[0].Slot+rows[1].Slot != 1 {
		t.Errorf(`admin.Get("/v1/workers", &rows) = %v, %+v`, err, rows)
	}

	f.held(true)
	s := f.open(f.workers[1].URL(), "a long one", 500)
	if err := admin.Get("/v1/exchanges", &rows); err != nil || len(rows) != 1 {
		t.Errorf(`admin.Get("/v1/exchanges", &rows) = %v, %+v`, err, rows)
	}
	routes := "http://" + f.coordinator.FleetAddr().String()
	if status, text := f.call("POST", routes+"/select", `{"role":"gen","routing_key":"c","req_id":9007199254740993}`); status != 200 || !strings.Contains(text, `"req_id":9007199254740993`) {
		t.Errorf("f.call = %d, %s", status, text)
	}
	if n := f.metric(f.coordinator, "pdproxy_leases_open"); n != 2 {
		t.Errorf("%v leases for a stream and a reservation", n)
	}
	if status, text := f.call("POST", routes+"/finish", `{"role":"gen","req_id":9007199254740993}`); status != 200 {
		t.Errorf("f.call = %d, %s", status, text)
	}
	f.held(false)
	f.whole(s, "a long one", 500)

	if status, text := f.call("POST", admin.URL+"/v1/policies/least_load/reload", ""); status != 200 || !strings.Contains(text, `"workers":2`) {
		t.Errorf("f.call = %d, %s", status, text)
	}
	if status, _ := f.call("POST", admin.URL+"/v1/policies/nobody/reload", ""); status != 404 {
		t.Errorf("f.call = %d, want 404", status)
	}
	f.settled()
	if status, text := f.call("POST", admin.URL+"/v1/drain", ""); status != 200 || f.status(f.workers[0].URL()+"/health") != 503 || f.status(f.workers[1].URL()+"/health") != 503 {
		t.Errorf(`f.call("POST", admin.URL+"/v1/drain", "") = %d, %s`, status, text)
	}
}
