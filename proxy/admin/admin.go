// Package admin serves the endpoints of operators: health, metrics, engines, policies, the
// requests that run and that have ended, the sidecar's policies, and drain. In a fleet the
// coordinator answers for its workers, too.
//
// The decisions behind this package are in docs/design/edge.md.
package admin

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/admin/dashboard"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/httpguard"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Handler returns the routes of operators. Routes that change something have another
// method than GET. The handler does not check the caller; Guard does.
func Handler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", index)
	mux.HandleFunc("GET /dashboard/{file}", dashboardFile)
	d := newDashboardView(o)
	mux.Handle("GET /v1/dashboard/events", d.hub)
	mux.HandleFunc("GET /v1/dashboard/part", d.part)
	mux.HandleFunc("GET /v1/dashboard/history", func(w http.ResponseWriter, _ *http.Request) {
		downstream.JSON(w, 200, DashboardHistory{Points: d.history.Points()})
	})
	mux.HandleFunc("GET /v1/dashboard/requests", d.requests)
	mux.HandleFunc("GET "+healthzPath, func(w http.ResponseWriter, _ *http.Request) {
		downstream.JSON(w, 200, map[string]string{"status": "ok"})
	})
	mux.HandleFunc("GET "+readyzPath, o.Ready)
	e := engines{o}
	mux.HandleFunc("GET /v1/engines", e.list)
	mux.HandleFunc("POST /v1/engines", e.add)
	mux.HandleFunc("DELETE /v1/engines/{name}", e.remove)
	mux.HandleFunc("POST /v1/engines/{name}/drain", e.drain)
	mux.HandleFunc("DELETE /v1/engines/{name}/drain", e.undrain)
	mux.HandleFunc("GET /v1/pairs", e.pairs)
	f := fleetView{o}
	mux.Handle("GET /metrics", fleetMetricsHandler(o.Gatherer, o.Log))
	mux.HandleFunc("GET /v1/policies", f.policies)
	mux.HandleFunc("POST /v1/policies/{name}/reload", f.reload)
	mux.HandleFunc("GET /v1/exchanges", f.running)
	mux.HandleFunc("GET /v1/explain/{id}", f.explain)
	mux.HandleFunc("GET /perf_metrics", f.perf)
	mux.HandleFunc("POST /v1/drain", f.drain)
	s := sidecarRoutes{o}
	mux.HandleFunc("GET /v1/sidecar", s.with(s.show))
	mux.HandleFunc("PUT /v1/sidecar/policies", s.with(s.setOrder))
	mux.HandleFunc("DELETE /v1/sidecar/policies", s.with(s.resetOrder))
	if o.Workers != nil {
		mux.HandleFunc("GET /v1/workers", func(w http.ResponseWriter, _ *http.Request) {
			downstream.JSON(w, 200, o.Workers.List())
		})
	}
	return routes{mux}
}

// routes answers requests without a route in the form of all other errors.
type routes struct{ *http.ServeMux }

// ServeHTTP implements http.Handler.
func (m routes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	refuse, pattern := m.Handler(r)
	if pattern != "" {
		m.ServeMux.ServeHTTP(w, r)
		return
	}
	answer := discarded{http.Header{}} // the mux answers in plain text
	refuse.ServeHTTP(answer, r)
	if allow := answer.Header().Get("Allow"); allow != "" {
		w.Header().Set("Allow", allow)
		downstream.Error(w, openai.NewError(openai.CodeMethodNotAllowed, "this endpoint takes "+allow))
		return
	}
	noEndpoint(w, r)
}

// discarded keeps the header of an answer, and nothing else.
type discarded struct{ header http.Header }

func (d discarded) Header() http.Header         { return d.header }
func (d discarded) WriteHeader(int)             {}
func (d discarded) Write(b []byte) (int, error) { return len(b), nil }

func noEndpoint(w http.ResponseWriter, r *http.Request) {
	const maxPath = 200 // bytes of a client's path that the answer repeats
	text := fmt.Sprintf("there is no endpoint %s %.*q; GET / lists the endpoints", r.Method, maxPath, r.URL.Path)
	downstream.Error(w, openai.NewError(openai.CodeNotFound, text))
}

// dashboardFile answers with a part of the page.
func dashboardFile(w http.ResponseWriter, r *http.Request) {
	if !dashboard.Part(w, r.PathValue("file")) {
		noEndpoint(w, r)
	}
}

// endpoints are the routes of Handler, with what they do.
var endpoints = []struct {
	Endpoint string `json:"endpoint"`
	Does     string `json:"does"`
}{
	{"GET /dashboard/{file}", "the parts of the page that a browser shows for GET /; need no token"},
	{"GET /v1/dashboard/events", "a snapshot of everything on that page each second, as server-sent events"},
	{"GET /v1/dashboard/part", "what this process alone contributes to a snapshot"},
	{"GET /v1/dashboard/history", "the traffic of the last three hours; older points are further apart"},
	{"GET /v1/dashboard/requests", "the requests that ran at some time between ?from=SECONDS and &to=SECONDS since the Unix epoch, of the last 4096 of each process"},
	{"GET /healthz", "200 while the process runs; needs no token"},
	{"GET /readyz", "200 while a request could be served; needs no token"},
	{"GET /metrics", "metrics for Prometheus"},
	{"GET /perf_metrics", "times of the requests that ended last"},
	{"GET /v1/engines", "engines with their states and loads"},
	{"POST /v1/engines", "adds an engine: a JSON object with the keys of [[engine]]"},
	{"DELETE /v1/engines/{name}", "drains an engine and removes it: ?drain=60s"},
	{"POST /v1/engines/{name}/drain", "drains an engine and keeps it; ?move=true: other engines go on with its streams"},
	{"DELETE /v1/engines/{name}/drain", "sends requests to a drained engine again"},
	{"GET /v1/pairs", "pairs of prefill and decode engines"},
	{"GET /v1/policies", "policies and filters"},
	{"POST /v1/policies/{name}/reload", "loads a policy or filter again"},
	{"GET /v1/exchanges", "requests that run"},
	{"GET /v1/explain/{id}", "why a request went to its engines"},
	{"POST /v1/drain", "makes balancers send no more requests"},
	{"GET /v1/sidecar", "the policies of a sidecar"},
	{"PUT /v1/sidecar/policies", "changes the order of these policies"},
	{"DELETE /v1/sidecar/policies", "returns to the configured order"},
	{"GET /v1/workers", "workers of a coordinator"},
}

// index shows the dashboard to browsers, and lists the endpoints to other clients.
func index(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Vary", "Accept")
	if dashboard.Accepted(r) {
		dashboard.Page(w)
		return
	}
	downstream.JSON(w, 200, map[string]any{"endpoints": endpoints})
}

// The routes of probes, which need no token.
const (
	healthzPath = "/healthz"
	readyzPath  = "/readyz"
)

// page reports whether the request is for the page or a part of it. These are the same in
// every process, and a browser that opens a page cannot send a token.
func page(r *http.Request) bool {
	return r.URL.Path == "/" && dashboard.Accepted(r) || strings.HasPrefix(r.URL.Path, dashboard.Folder)
}

// Token is the bearer token of the admin address.
type Token struct {
	// Text is never empty at an admin address.
	Text string
	// Generated: the proxy has generated the token. Then read-only requests on a loopback
	// address need no token.
	Generated bool
}

// Guard checks the callers of h at the admin address: their token, and that no web page
// makes a browser call it. /healthz, /readyz and the page for browsers need no token.
func Guard(h http.Handler, cfg *config.Config, address net.Addr, token Token, log *slog.Logger) http.Handler {
	reading := token.Generated && httpguard.Loopback(address)
	return httpguard.Guard{
		Name: "admin.listen", Address: address, Hosts: cfg.Admin.InternalHosts(cfg.Admin.Listen), Token: token.Text,
		Types: []string{"application/json"}, Log: log,
		Open: func(r *http.Request) bool {
			get := r.Method == http.MethodGet || r.Method == http.MethodHead
			return get && (reading || r.URL.Path == healthzPath || r.URL.Path == readyzPath || page(r))
		},
		Page: page,
		Refuse: func(w http.ResponseWriter, _ *http.Request, status int, text string) {
			code := map[int]openai.Code{401: openai.CodeInvalidToken, 403: openai.CodeForbidden, 415: openai.CodeUnsupportedMediaType}[status]
			downstream.Error(w, &openai.Error{Status: status, Code: code, Message: text})
		},
	}.Wrap(h)
}
