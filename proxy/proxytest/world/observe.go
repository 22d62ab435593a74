package world

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Settled asserts that no exchange has left anything.
func (w *World) Settled() {
	w.T.Helper()
	if n := w.Local.Open(); n != 0 {
		w.T.Errorf("got %d open leases", n)
	}
	if n := w.Running(); n != 0 {
		w.T.Errorf("got %d live exchanges", n)
	}
	if n := w.Memory.Used(); n != 0 {
		w.T.Errorf("got %d bytes of requests and answers", n)
	}
}

// queueIsFree asserts that no request has kept its place in the queue: the next request gets a place
// as the only request in total, and as the only one of its client. Then there is no engine for it.
func (w *World) queueIsFree() {
	w.T.Helper()
	cfg := config.Default()
	cfg.Limits.MaxExchanges, cfg.Limits.PerClient, cfg.Limits.Queue = 1, 1, 0
	w.SetHooks(nil)
	w.Reload(&cfg, nil)
	for _, client := range []string{"pipe", "127.0.0.1:1"} {
		r := httptest.NewRequest("POST", CompletionsPath, strings.NewReader(`{"model":"no engine serves this","prompt":"x"}`))
		r.RemoteAddr = client
		a := httptest.NewRecorder()
		if w.inner.ServeHTTP(a, r); a.Code != http.StatusNotFound && a.Code != http.StatusServiceUnavailable {
			w.T.Errorf("a request did not free its place in the queue: %s", a.Body)
		}
	}
}

// shown reads the JSON that the admin address answers to GET path, without a connection.
func (w *World) shown(path string, v any) (status int) {
	w.T.Helper()
	a := httptest.NewRecorder()
	w.AdminHandler().ServeHTTP(a, httptest.NewRequest("GET", path, nil))
	if err := json.Unmarshal(a.Body.Bytes(), v); err != nil {
		w.T.Fatalf("GET %s: %v", path, err)
	}
	return a.Code
}

// Running returns how many requests run.
func (w *World) Running() int {
	w.T.Helper()
	var rows []journal.RunningRow
	w.shown("/v1/exchanges", &rows)
	return len(rows)
}

// Waiting returns how many requests wait for a place or for an engine.
func (w *World) Waiting() int {
	w.T.Helper()
	var part struct{ Waiting int }
	w.shown("/v1/dashboard/part", &part)
	return part.Waiting
}

// Ended returns a row for each request that has ended, oldest first.
func (w *World) Ended() (rows []journal.PerfRow) {
	w.T.Helper()
	w.shown("/perf_metrics", &rows)
	return rows
}

// Explain returns the explanation of the last ended request of that id.
func (w *World) Explain(id string) (e journal.Explanation, ok bool) {
	w.T.Helper()
	ok = w.shown("/v1/explain/"+url.PathEscape(id), &e) == http.StatusOK
	return e, ok
}

// Explained returns the explanation of the only ended exchange.
func (w *World) Explained() journal.Explanation {
	w.T.Helper()
	rows := w.Ended()
	if len(rows) != 1 {
		w.T.Fatalf("got %d ended exchanges, want 1", len(rows))
	}
	e, _ := w.Explain(rows[0].RequestID)
	return e
}

// Outcome asserts the outcome of the only ended exchange.
func (w *World) Outcome(want telemetry.Outcome) {
	w.T.Helper()
	if e := w.Explained(); e.Outcome != want.String() {
		w.T.Errorf("got outcome %q, want %q", e.Outcome, want)
	}
	if n := w.Metric("pdproxy_exchanges_total", want.String()); n != 1 {
		w.T.Errorf("got %v exchanges counted as %s, want 1", n, want)
	}
}

// Metric sums the series of a counter or gauge, or the counts of a histogram,
// whose label values contain all of those given.
func (w *World) Metric(name string, labels ...string) float64 {
	w.T.Helper()
	families, err := w.Prometheus.Gather()
	if err != nil {
		w.T.Fatal(err)
	}
	var sum float64
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			values := make(map[string]bool)
			for _, l := range m.GetLabel() {
				values[l.GetValue()] = true
			}
			all := true
			for _, l := range labels {
				all = all && values[l]
			}
			if all {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// Cleaned returns how many clean-ups were counted that freed their KV in that way.
func (w *World) Cleaned(how string) float64 { return w.Metric("pdproxy_kv_cleanups_total", how) }
