package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// workers always give the same answers.
type workers []WorkerAnswer

func (w workers) Each(context.Context, string, string, []byte) []WorkerAnswer { return slices.Clone(w) }
func (workers) List() []fleet.WorkerRow                                       { return nil }

// policies has one policy, auto.
type policies struct{}

func (policies) List() []PolicyRow { return []PolicyRow{{Name: "auto", Phase: "plan", Calls: 1}} }

func (policies) Reload(name string) error {
	if name != "auto" {
		return fmt.Errorf("reload %q: %w", name, ErrUnknownPolicy)
	}
	return nil
}

// ask sends a request to a coordinator with these workers.
func ask(w workers, method, path string) *httptest.ResponseRecorder {
	h := Handler(Options{
		Gatherer: prometheus.NewRegistry(), Policies: policies{}, Workers: w, Ready: http.NotFound, Drain: func() {},
		Running: new(journal.Running), Ended: new(journal.Ring),
		Sidecar: func() *sidecar.Sidecar { return nil },
		Log:     slog.New(slog.DiscardHandler),
	})
	r := httptest.NewRecorder()
	h.ServeHTTP(r, httptest.NewRequest(method, path, nil))
	return r
}

// The coordinator lists the running requests of all processes, the oldest first. It
// ignores invalid answers of workers.
func TestRunningOfAllWorkers(t *testing.T) {
	r := ask(workers{
		{Name: "a", Status: 200, Body: []byte(`[{"request_id":"young","age_ms":1},{"request_id":"old","age_ms":30}]`)},
		{Name: "b", Status: 200, Body: []byte(`[{"request_id":"between","age_ms":20.5,"decode":"d0"}]`)}, {Name: "c", Status: 200, Body: []byte(`x`)}, {Name: "d", Status: 503},
	}, http.MethodGet, "/v1/exchanges")
	var rows []journal.RunningRow
	if err := json.Unmarshal(r.Body.Bytes(), &rows); err != nil {
		t.Fatal(err)
	}
	want := []journal.RunningRow{{RequestID: "old", AgeMS: 30}, {RequestID: "between", AgeMS: 20.5, Decode: "d0"}, {RequestID: "young", AgeMS: 1}}
	if !slices.Equal(rows, want) {
		t.Errorf("got %+v, want %+v", rows, want)
	}
}

// The answer names a worker that keeps its old policy. A worker without that policy does
// not matter if another process has it.
func TestReloadOnWorkers(t *testing.T) {
	for _, tt := range []struct {
		name    string
		answers workers
		policy  string
		status  int
		want    string
	}{
		{"one worker keeps the old value", workers{{Name: "a/0", Status: 200}, {Name: "a/1", Status: 409, Body: []byte(`{"error":{"message":"it does not start"}}`)}}, "auto", 409, "worker a/1: it does not start"},
		{"the answer of one worker is useless", workers{{Name: "a/0", Status: 500, Body: []byte(`x`)}}, "auto", 409, "worker a/0: it refused"},
		{"workers have none", workers{{Name: "a/0", Status: 404}}, "auto", 200, `"workers":1`},
		{"only workers have it", workers{{Name: "a/0", Status: 200}}, "filter", 200, `"workers":1`},
		{"no process has it", workers{{Name: "a/0", Status: 404}}, "filter", 404, "no policy"},
		{"the only worker does not answer", workers{{Name: "a/0", Err: errors.New("no answer")}}, "filter", 504, `"silent_workers":1`},
		{"no worker is connected", nil, "filter", 404, "no policy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := ask(tt.answers, http.MethodPost, "/v1/policies/"+tt.policy+"/reload")
			if r.Code != tt.status || !strings.Contains(r.Body.String(), tt.want) {
				t.Errorf("ask = %d, %s", r.Code, r.Body)
			}
		})
	}
}

// Without a sidecar, the sidecar's routes answer 404.
func TestNoSidecar(t *testing.T) {
	for _, tt := range [][2]string{{"GET", "/v1/sidecar"}, {"PUT", "/v1/sidecar/policies"}, {"DELETE", "/v1/sidecar/policies"}} {
		if r := ask(nil, tt[0], tt[1]); r.Code != 404 || !strings.Contains(r.Body.String(), "no_sidecar") {
			t.Errorf("%v: ask(nil, tt[0], tt[1]) = %d, %s", tt, r.Code, r.Body)
		}
	}
}
