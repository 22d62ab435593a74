package admin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// fleetView answers for this process and for its workers, if it has any.
type fleetView struct{ o Options }

// askWorkers sends a request to all workers. silent is the number of workers that gave no
// answer.
func (f fleetView) askWorkers(ctx context.Context, method, path string) (answers []WorkerAnswer, silent int) {
	if f.o.Workers == nil {
		return nil, 0
	}
	answers = f.o.Workers.Each(ctx, method, path, nil)
	answered := answers[:0]
	for _, a := range answers {
		if a.Err != nil {
			silent++
			f.o.Log.Warn("a worker did not answer", "worker", a.Name, "path", path, "error", a.Err)
			continue
		}
		answered = append(answered, a)
	}
	return answered, silent
}

// collect adds the JSON lists of all workers to own.
func collect[T any](ctx context.Context, f fleetView, path string, own []T) []T {
	answers, _ := f.askWorkers(ctx, http.MethodGet, path)
	for _, a := range answers {
		var rows []T
		if a.Status != http.StatusOK || json.Unmarshal(a.Body, &rows) != nil {
			f.o.Log.Warn("the answer of a worker cannot be used", "worker", a.Name, "path", path, "status", a.Status)
			continue
		}
		own = append(own, rows...)
	}
	return own
}

// WholeFleet returns a gatherer for the metrics of own, and of the workers as if they were
// one process. workers may be nil.
func WholeFleet(own prometheus.Gatherer, workers Workers) prometheus.Gatherer {
	if workers == nil {
		return own
	}
	return telemetry.NewFleet(own, func() []telemetry.Process {
		answers := workers.Each(context.Background(), http.MethodGet, fleetMetrics, nil)
		list := make([]telemetry.Process, len(answers))
		for i, a := range answers {
			list[i] = telemetry.Process{Name: a.Name, Text: a.Body, Failed: a.Err != nil || a.Status != http.StatusOK}
		}
		return list
	})
}

// fleetMetricsHandler answers GET /metrics with the metrics of g. Workers answer their
// coordinator in the wire format.
func fleetMetricsHandler(g prometheus.Gatherer, log *slog.Logger) http.Handler {
	show := Metrics(g, log)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery == fleetQuery {
			r.Header.Set("Accept", telemetry.WireFormat)
		}
		show.ServeHTTP(w, r)
	})
}

// Method and path of a coordinator's request for the metrics of a worker.
const (
	fleetQuery   = "for=coordinator"
	fleetMetrics = "/metrics?" + fleetQuery
)

var _ prometheus.Gatherer = (*telemetry.Fleet)(nil)

// running answers GET /v1/exchanges, the oldest request first.
func (f fleetView) running(w http.ResponseWriter, r *http.Request) {
	rows := collect(r.Context(), f, "/v1/exchanges", f.o.Running.List(time.Now()))
	slices.SortStableFunc(rows, func(a, b journal.RunningRow) int { return cmp.Compare(b.AgeMS, a.AgeMS) })
	downstream.JSON(w, 200, rows)
}

// perf answers GET /perf_metrics. It lists the rows process by process, and the oldest
// row of each process first.
func (f fleetView) perf(w http.ResponseWriter, r *http.Request) {
	if f.o.Workers == nil {
		downstream.JSON(w, 200, f.o.Ended.PerfRows())
		return
	}
	own := []json.RawMessage{}
	for _, row := range f.o.Ended.PerfRows() {
		text, err := json.Marshal(row)
		if err == nil {
			own = append(own, text)
		}
	}
	downstream.JSON(w, 200, collect(r.Context(), f, "/perf_metrics", own))
}

// explain answers GET /v1/explain/{id} with the last ended request of that id.
func (f fleetView) explain(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if e, ok := f.o.Ended.Get(id); ok {
		downstream.JSON(w, 200, e)
		return
	}
	answers, silent := f.askWorkers(r.Context(), http.MethodGet, "/v1/explain/"+url.PathEscape(id))
	var last struct {
		arrival float64
		body    []byte
	}
	for _, a := range answers {
		var e struct{ Arrival float64 }
		if a.Status == http.StatusOK && json.Unmarshal(a.Body, &e) == nil && (last.body == nil || e.Arrival > last.arrival) {
			last.arrival, last.body = e.Arrival, a.Body
		}
	}
	if last.body == nil {
		text := fmt.Sprintf("no request of this id is among the last %d that ended on this proxy", journal.RingSize)
		if silent > 0 {
			text += fmt.Sprintf("; %d workers did not answer", silent)
		}
		downstream.Error(w, openai.NewFieldError(openai.CodeUnknownRequest, "request_id", text))
		return
	}
	downstream.JSON(w, 200, json.RawMessage(bytes.TrimSpace(last.body)))
}

// policies answers GET /v1/policies with the sums of all processes.
func (f fleetView) policies(w http.ResponseWriter, r *http.Request) {
	rows := collect(r.Context(), f, "/v1/policies", slices.Clone(f.o.Policies.List()))
	downstream.JSON(w, 200, sumPolicies([]PolicyRow{}, rows))
}

// sumPolicies adds the rows of a process to sums.
func sumPolicies(sums, rows []PolicyRow) []PolicyRow {
	for _, row := range rows {
		i := slices.IndexFunc(sums, func(o PolicyRow) bool {
			return o.Name == row.Name && o.Phase == row.Phase && o.VersionSHA256 == row.VersionSHA256 && o.State == row.State
		})
		if i < 0 {
			sums = append(sums, row)
			continue
		}
		sums[i].add(row)
	}
	return sums
}

// reload answers POST /v1/policies/{name}/reload. The reload also succeeds if a process
// does not have the policy, because only workers have filters. If one process keeps its
// old version, the answer names that process. The other processes then have the new
// version.
func (f fleetView) reload(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	refuse := func(status int, text string) {
		downstream.Error(w, &openai.Error{Status: status, Code: openai.CodeNotReloaded, Param: "name", Message: text})
	}
	err := f.o.Policies.Reload(name)
	if err != nil && !errors.Is(err, ErrUnknownPolicy) {
		refuse(409, err.Error())
		return
	}
	answers, silent := f.askWorkers(r.Context(), http.MethodPost, "/v1/policies/"+url.PathEscape(name)+"/reload")
	for _, a := range answers {
		switch a.Status {
		case http.StatusOK:
			err = nil
		case http.StatusNotFound:
		default:
			refuse(409, "worker "+a.Name+": "+errorText(a.Body))
			return
		}
	}
	if err != nil && silent == 0 {
		refuse(404, err.Error())
		return
	}
	f.done(w, map[string]any{"name": name, "state": "active"}, len(answers), silent)
}

// drain answers POST /v1/drain.
func (f fleetView) drain(w http.ResponseWriter, r *http.Request) {
	f.o.Drain()
	answers, silent := f.askWorkers(r.Context(), http.MethodPost, "/v1/drain")
	f.done(w, map[string]any{"status": "draining"}, len(answers), silent)
}

// done answers with the number of workers that have executed the command. If a worker
// gave no answer, the status is 504.
func (f fleetView) done(w http.ResponseWriter, body map[string]any, workers, silent int) {
	status := 200
	if f.o.Workers != nil {
		body["workers"], body["silent_workers"] = workers, silent
		if silent > 0 {
			status = 504
		}
	}
	downstream.JSON(w, status, body)
}

// errorText returns the message of an answer with an error.
func errorText(body []byte) string {
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		return "it refused"
	}
	return e.Error.Message
}
