// Package admin serves the endpoints of operators: health, metrics, engines, policies, the
// requests that run and that have ended, the sidecar's policies, and drain. In a fleet the
// coordinator answers for its workers, too.
package admin

import (
	"log/slog"
	"net"
	"net/http"

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
	mux.HandleFunc("GET "+healthzPath, func(w http.ResponseWriter, _ *http.Request) {
		downstream.JSON(w, 200, map[string]string{"status": "ok"})
	})
	mux.HandleFunc("GET "+readyzPath, o.Ready)
	e := engines{o}
	mux.HandleFunc("GET /v1/engines", e.list)
	mux.HandleFunc("POST /v1/engines", e.add)
	mux.HandleFunc("DELETE /v1/engines/{name}", e.remove)
	mux.HandleFunc("GET /v1/pairs", e.pairs)
	f := fleetView{o}
	mux.Handle("GET /metrics", f.metrics())
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
	return mux
}

// endpoints are the routes of Handler, with what they do.
var endpoints = []struct {
	Endpoint string `json:"endpoint"`
	Does     string `json:"does"`
}{
	{"GET /healthz", "200 while the process runs; needs no token"},
	{"GET /readyz", "200 while a request could be served; needs no token"},
	{"GET /metrics", "metrics for Prometheus"},
	{"GET /perf_metrics", "times of the requests that ended last"},
	{"GET /v1/engines", "engines with their states and loads"},
	{"POST /v1/engines", "adds an engine: a JSON object with the keys of [[engine]]"},
	{"DELETE /v1/engines/{name}", "drains an engine and removes it: ?drain=60s"},
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

// index lists the endpoints.
func index(w http.ResponseWriter, _ *http.Request) {
	downstream.JSON(w, 200, map[string]any{"endpoints": endpoints})
}

// The routes of probes, which need no token.
const (
	healthzPath = "/healthz"
	readyzPath  = "/readyz"
)

// Token is the bearer token of the admin address.
type Token struct {
	// Text is never empty at an admin address.
	Text string
	// Generated: the proxy has generated the token. Then read-only requests on a loopback
	// address need no token.
	Generated bool
}

// Guard checks the callers of h at the admin address: their token, and that no web page
// makes a browser call it. /healthz and /readyz need no token.
func Guard(h http.Handler, cfg *config.Config, address net.Addr, token Token, log *slog.Logger) http.Handler {
	reading := token.Generated && httpguard.Loopback(address)
	return httpguard.Guard{
		Name: "admin.listen", Address: address, Hosts: cfg.Admin.InternalHosts(cfg.Admin.Listen), Token: token.Text,
		Types: []string{"application/json"}, Log: log,
		Open: func(r *http.Request) bool {
			get := r.Method == http.MethodGet || r.Method == http.MethodHead
			return get && (reading || r.URL.Path == healthzPath || r.URL.Path == readyzPath)
		},
		Refuse: func(w http.ResponseWriter, _ *http.Request, status int, text string) {
			code := map[int]openai.Code{401: openai.CodeInvalidToken, 403: openai.CodeForbidden, 415: openai.CodeUnsupportedMediaType}[status]
			downstream.Error(w, &openai.Error{Status: status, Code: code, Message: text})
		},
	}.Wrap(h)
}
