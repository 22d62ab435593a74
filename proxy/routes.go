package proxy

import (
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/exchange"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/websocket"
)

// handler returns the public endpoints as every protocol serves them. Filters do not see health
// checks: a filter that requires a key, is parked or pauses would make an orchestrator stop a
// healthy proxy.
func (s *Server) handler() http.Handler {
	serve := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, nil) })
	plain := s.bodies.Limit(serve)
	filtered, filters := plain, s.options.Filters
	if s.options.Wrap != nil {
		filtered = s.bodies.Limit(s.options.Wrap(serve))
	}
	sockets := websocket.New(s.cfg.Load, s.bodies, filtered)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer s.endPanic(r)
		next := filtered
		if filters != nil && !filters.Load() || endpoint(r) == healthPath {
			next = plain
		}
		if r.Method == http.MethodGet && opensWebSocket(r) && websocket.Takes(r) && isResponses(r) {
			s.openWebSocket(w, r, sockets)
			return
		}
		if r.Header["Origin"] != nil {
			s.origins.Load().serve(w, r, s.keys.Load() == nil, next)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// guard ends panics of a handler with endPanic.
func (s *Server) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer s.endPanic(r)
		h.ServeHTTP(w, r)
	})
}

// endPanic logs a panic, which the servers of the protocols log in different ways or not at
// all. The panic still ends the client's connection or stream. Handlers defer endPanic.
func (s *Server) endPanic(r *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	if v != http.ErrAbortHandler {
		s.log.Error("panic in a handler", "method", r.Method, "panic", v, "stack", string(debug.Stack()))
	}
	panic(http.ErrAbortHandler)
}

// serve serves the public endpoints, in the same way for HTTP/1.1, HTTP/2 and HTTP/3. The gateway g
// sends the request to its engine; nil: this process does.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, g attempt.Gateway) {
	// The deadline also holds for handlers that read only a part of the body. ReadBody
	// lifts it at the end of the body.
	downstream.LimitBody(r, time.Duration(s.cfg.Load().Server.ReadTimeout))
	path := endpoint(r)
	api, ok := openai.APIFor(path)
	if !ok && s.isEngineRoute(path) {
		api, ok = openai.EngineRoute, true
	}
	switch {
	case ok && r.Method == http.MethodPost: // here, so that an open stream needs little stack
		s.exchanges.Serve(w, r, api, g)
	case g != nil && s.passes(r):
		s.exchanges.Serve(w, r, openai.EngineRoute, g)
	case !s.servePath(w, r, ok):
		w.Header().Set("X-Request-Id", downstream.RequestID(r))
		downstream.Error(w, openai.NewError(openai.CodeNotFound, noEndpoint(r)))
	}
}

// isEngineRoute reports whether a path is a route of engines that the configuration lists.
func (s *Server) isEngineRoute(path string) bool {
	return slices.Contains(s.cfg.Load().Server.EngineRoutes, path)
}

// passes reports whether a gateway sends r, which is no request to an endpoint, to any engine. The
// picker itself answers requests to its own endpoints, also below a prefix.
func (s *Server) passes(r *http.Request) bool {
	path := r.URL.Path
	if !s.cfg.Load().EPP.Passes(path) || opensWebSocket(r) {
		return false
	}
	if r.URL.EscapedPath() != path && (s.hasEndpoint(path) || s.prefixOf(path) != "") { // an engine reads the decoded path
		return false
	}
	_, generates := openai.APIFor(endpoint(r))
	return generates || s.isEngineRoute(endpoint(r)) || !s.hasEndpoint(endpoint(r))
}

// prefixOf returns the part of a path before its longest end that is the path of an endpoint; "" if
// there is none.
func (s *Server) prefixOf(path string) string {
	for i := 0; i < len(path); i++ {
		if path[i] != '/' {
			continue
		}
		rest := path[i:]
		if len(rest) > 1 {
			rest = strings.TrimSuffix(rest, "/")
		}
		if s.hasEndpoint(rest) {
			return path[:i]
		}
	}
	return ""
}

// hasEndpoint reports whether a path without a slash at its end is the path of an endpoint.
func (s *Server) hasEndpoint(path string) bool {
	_, stored := openai.StoredResponseAt(path)
	return isEndpoint(path) || s.isEngineRoute(path) || stored || strings.HasPrefix(path, modelsPath+"/")
}

// endpoint returns the path of r without a slash at its end, which some clients append.
func endpoint(r *http.Request) string {
	if path := r.URL.Path; len(path) > 1 {
		return strings.TrimSuffix(path, "/")
	}
	return r.URL.Path
}

// noEndpoint returns the text for a request to a path without an endpoint. It names the
// endpoint that the client probably means: clients add /v1 or slashes, or leave /v1 out.
func noEndpoint(r *http.Request) string {
	const maxPath = 200 // bytes of a client's path that the answer repeats
	path := r.URL.Path
	text := fmt.Sprintf("there is no endpoint %s %.*q", r.Method, maxPath, path)
	trimmed := strings.TrimRight(path, "/")
	for _, other := range []string{trimmed, "/v1" + trimmed, strings.TrimPrefix(trimmed, "/v1")} {
		if other != path && isEndpoint(other) {
			return text + "; did you mean " + other + "?"
		}
	}
	return text
}

// isEndpoint reports whether path is a public endpoint.
func isEndpoint(path string) bool {
	_, generates := openai.APIFor(path)
	return generates || path == modelsPath || path == healthPath || path == versionPath
}

// servePath serves r if its path is one of the public endpoints. generates reports that the path
// accepts only POST.
func (s *Server) servePath(w http.ResponseWriter, r *http.Request, generates bool) bool {
	downstream.LimitWrites(w, r, time.Duration(s.cfg.Load().Server.WriteTimeout))
	if generates {
		if r.Method == http.MethodGet && opensWebSocket(r) {
			upgradeRequired(w, r)
		} else {
			methodNotAllowed(w, r, "POST")
		}
		return true
	}
	if target, ok := openai.StoredResponseAt(endpoint(r)); ok {
		if !target.Takes(r.Method) {
			methodNotAllowed(w, r, target.Methods())
			return true
		}
		s.exchanges.ServeStored(w, r, target)
		return true
	}
	var serve func(http.ResponseWriter, *http.Request)
	switch path := endpoint(r); {
	case path == modelsPath || strings.HasPrefix(path, modelsPath+"/"):
		serve = s.serveModels
	case path == healthPath:
		serve = s.serveHealth
	case path == versionPath:
		serve = s.serveVersion
	default:
		return false
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		methodNotAllowed(w, r, "GET")
		return true
	}
	w.Header().Set("X-Request-Id", downstream.RequestID(r))
	serve(w, r)
	return true
}

// opensWebSocket reports whether a client asks to turn its connection into a WebSocket (RFC
// 6455, 4.1).
func opensWebSocket(r *http.Request) bool {
	return slices.ContainsFunc(r.Header["Upgrade"], func(v string) bool { return strings.Contains(strings.ToLower(v), "websocket") })
}

// isResponses reports whether r is for the Responses API, the only one with WebSockets.
func isResponses(r *http.Request) bool {
	api, ok := openai.APIFor(endpoint(r))
	return ok && api == openai.Responses
}

// openWebSocket serves a WebSocket of the Responses API. Filters see each of its requests, but not
// the handshake. A browser sends a WebSocket's handshake for any page, so that the page's origin
// must be allowed.
func (s *Server) openWebSocket(w http.ResponseWriter, r *http.Request, sockets *websocket.Bridge) {
	w.Header().Set("X-Request-Id", downstream.RequestID(r))
	if r.Header["Origin"] != nil && s.origins.Load().allow(r) == "" {
		downstream.Error(w, errOrigin)
		return
	}
	known, err := s.keys.Load().Authenticate(r)
	if err != nil {
		downstream.Error(w, exchange.PublicError(err))
		return
	}
	s.sockets.Add()
	defer s.sockets.Done()
	sockets.Serve(w, r, s.clientOf(known))
}

// upgradeRequired answers a client that opens a WebSocket where websocket.Bridge takes none.
// Codex opens one for its responses first. After 426 it sends its requests with POST at once;
// after any other status it tries the WebSocket five times. RFC 9110, 15.5.22, wants a protocol
// in Upgrade.
func upgradeRequired(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	if r.ProtoMajor == 1 { // later versions have no such lines
		h.Set("Upgrade", "HTTP/1.1")
		h.Set("Connection", "Upgrade")
	}
	h.Set("X-Request-Id", downstream.RequestID(r))
	downstream.Error(w, openai.NewError(openai.CodeUpgradeRequired, "the proxy takes this request only with POST"))
}

func methodNotAllowed(w http.ResponseWriter, r *http.Request, allow string) {
	w.Header().Set("Allow", allow)
	w.Header().Set("X-Request-Id", downstream.RequestID(r))
	downstream.Error(w, openai.NewError(openai.CodeMethodNotAllowed, "this endpoint takes "+allow))
}

const (
	modelsPath  = "/v1/models"
	healthPath  = "/health"
	versionPath = "/version"
)

// model is one row of the list of models, in the form of OpenAI.
type model struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"` // when this proxy started, in seconds since the Unix epoch
	OwnedBy string `json:"owned_by"`
	// The statements of the engines; absent if the engines state nothing.
	Root        string `json:"root,omitempty"`
	Parent      string `json:"parent,omitempty"`
	MaxModelLen int64  `json:"max_model_len,omitempty"` // of the engine with the smallest limit, in tokens
}

// serveModels lists the models of all engines that the client may use, or shows the model that the path names. A
// model stays in the list while its engines restart. If requests may wait for engines, it
// also stays when its engines have left.
func (s *Server) serveModels(w http.ResponseWriter, r *http.Request) {
	known, err := s.keys.Load().Authenticate(r)
	if err != nil {
		downstream.Error(w, exchange.PublicError(err))
		return
	}
	names := exchange.Permitted(admission.Tenant(known), s.models())
	rows := []model{}
	for _, id := range names {
		rows = append(rows, s.modelRow(id))
	}
	name, one := strings.CutPrefix(r.URL.Path, modelsPath+"/")
	if !one || name == "" {
		downstream.JSON(w, 200, struct {
			Object string  `json:"object"`
			Data   []model `json:"data"`
		}{"list", rows})
		return
	}
	i := slices.IndexFunc(rows, func(m model) bool { return m.ID == name })
	if i < 0 { // a model may have the name of a folder, with a slash at the end
		i = slices.IndexFunc(rows, func(m model) bool { return m.ID == strings.TrimSuffix(name, "/") })
	}
	if i < 0 {
		downstream.Error(w, exchange.UnknownModel(name, names))
		return
	}
	downstream.JSON(w, 200, rows[i])
}

// modelRow returns the row of a model. For a name of [[model]], Root is the model that serves
// it, unless several do, and MaxModelLen is the smallest limit of its models.
func (s *Server) modelRow(id string) model {
	snapshot := s.options.Registry.Snapshot()
	row := model{ID: id, Object: "model", Created: s.started.Unix(), OwnedBy: "pdproxy"}
	route := s.names.Load().Route(id)
	if route == nil {
		card := snapshot.Card(id)
		row.Root, row.Parent, row.MaxModelLen = card.Root, card.Parent, card.MaxModelLen
		return row
	}
	served := route.Models()
	if len(served) == 1 {
		row.Root = served[0]
	}
	for _, name := range served {
		if n := snapshot.Card(name).MaxModelLen; n > 0 && (row.MaxModelLen == 0 || n < row.MaxModelLen) {
			row.MaxModelLen = n
		}
	}
	return row
}

// mayWait reports whether a request for some model would wait for an engine.
func (s *Server) mayWait() bool {
	return s.cfg.Load().Limits.NoEngineTimeout > 0 && len(s.options.Registry.Snapshot().Known()) > 0
}

// models returns the models for which a request is accepted, sorted: those that engines serve
// and the names of [[model]] for them.
func (s *Server) models() []string {
	snapshot := s.options.Registry.Snapshot()
	served := snapshot.Models()
	if s.cfg.Load().Limits.NoEngineTimeout > 0 {
		served = snapshot.Known()
	}
	return s.names.Load().Merge(served)
}

// serveHealth answers 200 if a request could be served now, every engine known at the start has been
// looked at, and the proxy does not drain. A proxy whose requests may wait for engines is also healthy without an engine: no request would come
// that could wake one.
func (s *Server) serveHealth(w http.ResponseWriter, _ *http.Request) {
	if s.draining.Load() {
		downstream.Error(w, openai.NewError(openai.CodeNoTarget, "the proxy drains: send new requests to another proxy"))
		return
	}
	if !s.Ready() && !(s.options.Registry.Settled() && s.mayWait()) {
		downstream.Error(w, openai.NewError(openai.CodeNoTarget, "no request could be served now"))
		return
	}
	downstream.JSON(w, 200, map[string]string{"status": "ok"})
}

func (s *Server) serveVersion(w http.ResponseWriter, _ *http.Request) {
	downstream.JSON(w, 200, map[string]string{"version": s.options.Version})
}
