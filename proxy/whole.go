package proxy

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
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Workers is the worker processes of a coordinator.
type Workers interface {
	// Each asks the operators' surface of every worker at once, and returns what
	// each said, in the order of List. One that does not answer in time has an Err.
	Each(ctx context.Context, method, path string, body []byte) []WorkerAnswer
	List() []coordinator.WorkerRow
}

// WorkerAnswer is what one worker answered.
type WorkerAnswer struct {
	Name   string // of the worker, its node and slot
	Status int
	Body   []byte
	Err    error // it gave no answer
}

// How long a worker may take to answer a question, and to do what it is told, such
// as to compile a policy.
const (
	workerPatience = time.Second
	workerActs     = 30 * time.Second
)

// serverWorkers are the workers of a coordinator.Server.
type serverWorkers struct{ server *coordinator.Server }

// NewWorkers returns the workers that are connected to s.
func NewWorkers(s *coordinator.Server) Workers { return serverWorkers{s} }

// List implements Workers.
func (w serverWorkers) List() []coordinator.WorkerRow { return w.server.Workers() }

// Each implements Workers.
func (w serverWorkers) Each(ctx context.Context, method, path string, body []byte) []WorkerAnswer {
	patience := workerPatience
	if method != http.MethodGet {
		patience = workerActs
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	rows := w.List()
	answers := make([]WorkerAnswer, len(rows))
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, row := range rows {
		wg.Go(func() {
			a := &answers[i]
			a.Name = fmt.Sprintf("%s/%d", row.Node, row.Slot)
			a.Status, _, a.Body, a.Err = w.server.Ask(ctx, row.Number, method, path, body)
		})
	}
	return answers
}

// whole answers operators for all processes of a fleet: the server's own and,
// where there are any, its workers.
type whole struct {
	s       *Server
	workers Workers // nil: there are none
}

// each asks all workers; silent is how many gave no answer.
func (h whole) each(ctx context.Context, method, path string) (answers []WorkerAnswer, silent int) {
	if h.workers == nil {
		return nil, 0
	}
	answers = h.workers.Each(ctx, method, path, nil)
	heard := answers[:0]
	for _, a := range answers {
		if a.Err != nil {
			silent++
			h.s.log.Warn("a worker did not answer", "worker", a.Name, "path", path, "error", a.Err)
			continue
		}
		heard = append(heard, a)
	}
	return heard, silent
}

// gather is each for lists in JSON.
func gather[T any](ctx context.Context, h whole, path string, own []T) []T {
	answers, _ := h.each(ctx, http.MethodGet, path)
	for _, a := range answers {
		var rows []T
		if a.Status != http.StatusOK || json.Unmarshal(a.Body, &rows) != nil {
			h.s.log.Warn("a worker's answer is of no use", "worker", a.Name, "path", path, "status", a.Status)
			continue
		}
		own = append(own, rows...)
	}
	return own
}

// metrics answers GET /metrics. A worker is asked for what its coordinator reads.
func (h whole) metrics() http.Handler {
	gatherer := h.s.deps.Gatherer
	if h.workers != nil {
		gatherer = telemetry.NewFleet(gatherer, func() []telemetry.Process {
			answers := h.workers.Each(context.Background(), http.MethodGet, fleetMetrics, nil)
			list := make([]telemetry.Process, len(answers))
			for i, a := range answers {
				list[i] = telemetry.Process{Name: a.Name, Text: a.Body, Failed: a.Err != nil || a.Status != http.StatusOK}
			}
			return list
		})
	}
	show := promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, // one bad metric must not hide the others
		ErrorLog:      slog.NewLogLogger(h.s.log.Handler(), slog.LevelError),
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery == fleetQuery {
			r.Header.Set("Accept", telemetry.WireFormat)
		}
		show.ServeHTTP(w, r)
	})
}

// How a coordinator asks for the metrics of a worker.
const (
	fleetQuery   = "for=coordinator"
	fleetMetrics = "/metrics?" + fleetQuery
)

var _ prometheus.Gatherer = (*telemetry.Fleet)(nil)

// exchanges answers GET /v1/exchanges, oldest first.
func (h whole) exchanges(w http.ResponseWriter, r *http.Request) {
	rows := gather(r.Context(), h, "/v1/exchanges", h.s.books.Running.List(time.Now()))
	slices.SortStableFunc(rows, func(a, b journal.RunningRow) int { return cmp.Compare(b.AgeMS, a.AgeMS) })
	downstream.JSON(w, 200, rows)
}

// perfMetrics answers GET /perf_metrics: the rows of each process oldest first,
// one process after the other.
func (h whole) perfMetrics(w http.ResponseWriter, r *http.Request) {
	if h.workers == nil {
		downstream.JSON(w, 200, h.s.books.Ended.PerfRows())
		return
	}
	own := []json.RawMessage{}
	for _, row := range h.s.books.Ended.PerfRows() {
		text, err := json.Marshal(row)
		if err == nil {
			own = append(own, text)
		}
	}
	downstream.JSON(w, 200, gather(r.Context(), h, "/perf_metrics", own))
}

// explain answers GET /v1/explain/{id}: the last exchange of that id.
func (h whole) explain(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if e, ok := h.s.books.Ended.Get(id); ok {
		downstream.JSON(w, 200, e)
		return
	}
	answers, silent := h.each(r.Context(), http.MethodGet, "/v1/explain/"+url.PathEscape(id))
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
		text := "no such exchange among the last ones that ended"
		if silent > 0 {
			text += fmt.Sprintf("; %d workers did not answer", silent)
		}
		downstream.Error(w, &openai.Error{Status: 404, Code: "unknown_request", Param: "request_id", Message: text})
		return
	}
	downstream.JSON(w, 200, json.RawMessage(bytes.TrimSpace(last.body)))
}

// policies answers GET /v1/policies: what each policy did in all processes.
func (h whole) policies(w http.ResponseWriter, r *http.Request) {
	var sums []PolicyRow
	for _, row := range gather(r.Context(), h, "/v1/policies", slices.Clone(h.s.deps.Policies.List())) {
		i := slices.IndexFunc(sums, func(o PolicyRow) bool {
			return o.Name == row.Name && o.Phase == row.Phase && o.VersionSHA256 == row.VersionSHA256 && o.State == row.State
		})
		if i < 0 {
			sums = append(sums, row)
			continue
		}
		sums[i].add(row)
	}
	if sums == nil {
		sums = []PolicyRow{}
	}
	downstream.JSON(w, 200, sums)
}

// add adds what the policy did in another process. Of two p99 it has the larger.
func (p *PolicyRow) add(o PolicyRow) {
	if n := p.Calls + o.Calls; n > 0 {
		p.MeanUS = (p.MeanUS*float64(p.Calls) + o.MeanUS*float64(o.Calls)) / float64(n)
	}
	p.Calls += o.Calls
	p.Failures += o.Failures
	p.P99US = max(p.P99US, o.P99US)
}

// reload answers POST /v1/policies/{name}/reload. A process that has no such policy
// is none that fails: filters are with workers alone. Where one process keeps its
// old version, that is said, and the others have the new one.
func (h whole) reload(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	refuse := func(status int, text string) {
		downstream.Error(w, &openai.Error{Status: status, Code: "not_reloaded", Param: "name", Message: text})
	}
	err := h.s.deps.Policies.Reload(name)
	if err != nil && !errors.Is(err, ErrUnknownPolicy) {
		refuse(409, err.Error())
		return
	}
	answers, silent := h.each(r.Context(), http.MethodPost, "/v1/policies/"+url.PathEscape(name)+"/reload")
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
	h.done(w, map[string]any{"name": name, "state": "active"}, len(answers), silent)
}

// drain answers POST /v1/drain.
func (h whole) drain(w http.ResponseWriter, r *http.Request) {
	h.s.Drain()
	answers, silent := h.each(r.Context(), http.MethodPost, "/v1/drain")
	h.done(w, map[string]any{"status": "draining"}, len(answers), silent)
}

// done answers with how many workers did what was asked for. Where some did not
// say so it is no success.
func (h whole) done(w http.ResponseWriter, body map[string]any, workers, silent int) {
	status := 200
	if h.workers != nil {
		body["workers"], body["silent_workers"] = workers, silent
		if silent > 0 {
			status = 504
		}
	}
	downstream.JSON(w, status, body)
}

// errorText is the message of an answer with an error.
func errorText(body []byte) string {
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		return "it refused"
	}
	return e.Error.Message
}
