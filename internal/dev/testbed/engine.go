package testbed

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Engine is an engine on a socket whose answers a test writes, if needed byte by byte. A simulated
// engine keeps to its protocol and would never give such answers. Engine is healthy, serves the
// model sim, and records all other requests.
type Engine struct {
	Name, Role string
	Spec       func(*config.Engine) // changes its entry in a configuration; may be nil
	TLS        bool
	Prefix     string // is removed from every path
	Info       string // answer to GET /server_info; "": none
	Release    string // version of GET /version; "": there is no such route
	// Serve answers a leg. Script replaces it while the engine runs.
	Serve func(w http.ResponseWriter, leg Leg)
	Sick  atomic.Bool // the health probe fails

	server *httptest.Server
	mu     sync.Mutex
	legs   []Leg // guarded by mu
}

// Leg is one request that an engine received.
type Leg struct {
	*http.Request
	Text string // of the body
}

// Start opens the socket. Close ends the engine.
func (e *Engine) Start() {
	e.server = httptest.NewUnstartedServer(e)
	if e.TLS {
		e.server.EnableHTTP2 = true
		e.server.StartTLS()
	} else {
		e.server.Start()
	}
}

// Close waits for the end of all requests. It may be called twice.
func (e *Engine) Close() { e.server.Close() }

// URL returns the address with the prefix.
func (e *Engine) URL() string { return e.server.URL + e.Prefix }

// Script sets the function that answers the next legs.
func (e *Engine) Script(serve func(w http.ResponseWriter, leg Leg)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Serve = serve
}

// ServeHTTP implements http.Handler.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, ok := strings.CutPrefix(r.URL.Path, e.Prefix)
	r.URL.Path = path
	switch {
	case !ok:
		http.NotFound(w, r)
	case path == "/health" && e.Sick.Load():
		w.WriteHeader(http.StatusInternalServerError)
	case path == "/health":
	case path == "/v1/models":
		_, _ = io.WriteString(w, `{"data":[{"id":"sim"}]}`) // an error is the proxy's own end
	case path == "/server_info" && e.Info != "":
		_, _ = io.WriteString(w, e.Info)
	case path == "/version" && e.Release != "":
		_, _ = io.WriteString(w, `{"version":"`+e.Release+`"}`)
	case r.Method == http.MethodGet:
		http.NotFound(w, r)
	default:
		body, _ := io.ReadAll(r.Body)
		leg := Leg{r, string(body)}
		e.mu.Lock()
		e.legs = append(e.legs, leg)
		serve := e.Serve
		e.mu.Unlock()
		serve(w, leg)
	}
}

// Seen returns the legs so far for which ok is true; nil selects all.
func (e *Engine) Seen(ok func(Leg) bool) []Leg {
	e.mu.Lock()
	defer e.mu.Unlock()
	var legs []Leg
	for _, l := range e.legs {
		if ok == nil || ok(l) {
			legs = append(legs, l)
		}
	}
	return legs
}

// Forget drops the legs so far.
func (e *Engine) Forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.legs = nil
}
