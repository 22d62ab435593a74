// Package selectapi serves the routes of TensorRT-LLM's disaggregated coordinator, so
// that TensorRT-LLM's own fleet workers can use this process's coordinator: POST /select,
// /finish and /renew, GET /cluster_info, /health and /version, in JSON and MessagePack.
// Each /select places one phase of one request. The worker itself sends the legs. A
// /select reserves the target until /finish or until the reservation expires.
//
// Sources: TensorRT-LLM serve/coordinator_server.py (the routes; the older form is JSON
// with handles, the newer form is MessagePack with req_id), serve/disagg_coordinator.py
// (expiry, duplicates, cluster_info) and serve/router.py (routing keys, and the members
// of answers that workers read).
//
// The decisions behind this package are in docs/design/connectors.md.
package selectapi

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/httpguard"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// Options configures a Handler.
type Options struct {
	Local    *coordinator.Local
	Registry *engine.Registry // of Local
	Index    *kvindex.Index   // of Local's state; nil: block hashes are ignored
	// Leading calls do if this coordinator leads, and returns true. False: the
	// coordinator does not lead, and Leading has not called do. Then /select and /health
	// answer 503. nil: the coordinator always leads.
	Leading func(do func()) bool
	// Fallback is called for each reservation that expired or exceeded the limit; may be
	// nil.
	Fallback func(what, reason string)
	Token    string // bearer token that every request except /health needs; "": none
	// PlainHTTP allows callers of other hosts to use HTTP without TLS.
	PlainHTTP bool
	Address   net.Addr // address of the listener; nil: treated as reachable from other hosts
	Hosts     []string // host names that the Host header of a request without the token may have
	Version   string   // of GET /version
	// Memory bounds, in bytes, the bodies of all open requests together with the lists that are
	// read from them; 0: no bound.
	Memory int64
	Log    *slog.Logger
}

// Limits of bodies, reservations and connections.
const (
	// Expiry is the life of a reservation without /finish or /renew, as in TensorRT-LLM.
	Expiry = 180 * time.Second
	// maxOpen bounds the reservations.
	maxOpen = 1 << 17
	// maxBody bounds a body of /select, in bytes. The block hashes of a prompt of a million
	// tokens fit.
	maxBody = 16 << 20
	// maxShort bounds a body of another route, in bytes.
	maxShort = 64 << 10
	// sweepEvery is the time between two searches for expired reservations.
	sweepEvery = time.Second

	readTimeout = 10 * time.Second
	// writeTimeout bounds a whole request. The connection of a worker that does not read
	// its answer is closed.
	writeTimeout = time.Minute
	// closeTimeout bounds the time of open requests when Serve ends.
	closeTimeout = 2 * time.Second
	// idleTimeout is longer than the time for which the workers' clients keep an idle
	// connection.
	idleTimeout = 2 * time.Minute
)

// Handler serves the routes. It is safe for concurrent use.
type Handler struct {
	o       Options
	log     *slog.Logger
	open    *table
	memory  buffer.Budget // counts the bodies
	known   serversCache
	guarded http.Handler // the routes
}

// healthPath is the route for health probes, which send no token.
const healthPath = "/health"

// New returns a handler. Reservations expire only while Run or Serve runs.
func New(o Options) *Handler {
	h := &Handler{o: o, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), open: newTable()}
	h.memory.SetLimit(o.Memory)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /select", h.selectServer)
	mux.HandleFunc("POST /finish", h.finish)
	mux.HandleFunc("POST /renew", h.renew)
	mux.HandleFunc("GET /cluster_info", h.clusterInfo)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, r *http.Request) {
		answer(w, wanted(r), 200, map[string]string{"version": o.Version})
	})
	mux.HandleFunc("GET "+healthPath, func(w http.ResponseWriter, _ *http.Request) {
		if !h.ready() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	h.guarded = h.private(httpguard.Guard{
		Name: "fleet.listen", Address: o.Address, Hosts: o.Hosts, Token: o.Token, Log: h.log,
		Open:  func(r *http.Request) bool { return r.URL.Path == healthPath },
		Types: []string{typeJSON, typeMsgpack, "application/x-msgpack", "application/octet-stream"}, // aiohttp uses the last type for a body of bytes
		Refuse: func(w http.ResponseWriter, r *http.Request, status int, text string) {
			refuse(w, wanted(r), status, text)
		},
	}.Wrap(mux))
	return h
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.guarded.ServeHTTP(w, r) }

// Open returns the number of reservations.
func (h *Handler) Open() int { return h.open.len() }

// Serve serves the routes on l and lets reservations expire, until ctx ends. Then Serve
// closes l, answers the open requests within 2 s, and releases all reservations.
func (h *Handler) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{Handler: h, ConnContext: noteExposed, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelDebug)}
	connlimit.HTTP(server)
	var wg sync.WaitGroup
	defer wg.Wait()
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	wg.Go(func() { h.Run(running) })
	closed := make(chan struct{})
	serving := context.AfterFunc(ctx, func() {
		defer close(closed)
		limit, cancel := context.WithTimeout(running, closeTimeout)
		defer cancel()
		if server.Shutdown(limit) != nil {
			_ = server.Close() // the remaining connections are not needed
		}
	})
	err := server.Serve(l)
	if !serving() {
		<-closed
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Run releases reservations when they expire. When ctx ends, Run releases all
// reservations.
func (h *Handler) Run(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			release(h.open.close())
			return
		case now := <-tick.C:
			leases := h.open.expire(now)
			if len(leases) == 0 {
				continue
			}
			release(leases)
			for range leases {
				h.fallback("expired")
			}
			h.log.Warn("reservations expired without a /finish", "count", len(leases), "after", Expiry.String())
		}
	}
}

func release(leases []*coordinator.Lease) {
	for _, l := range leases {
		l.Release()
	}
}

func (h *Handler) fallback(reason string) {
	if h.o.Fallback != nil {
		h.o.Fallback("reservation", reason)
	}
}

// exposedKey is the context key for a bool: the request came from another host over a
// connection without TLS.
type exposedKey struct{}

// noteExposed is http.Server.ConnContext.
func noteExposed(ctx context.Context, c net.Conn) context.Context {
	e, ok := c.(interface{ Exposed() bool }) // connections of access.Queue have the method
	return context.WithValue(ctx, exposedKey{}, ok && e.Exposed())
}

// private refuses callers of other hosts without TLS, except on /health.
func (h *Handler) private(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if exposed, _ := r.Context().Value(exposedKey{}).(bool); exposed && !h.o.PlainHTTP && r.URL.Path != healthPath {
			refuse(w, wanted(r), http.StatusForbidden, "plain HTTP is for callers of this host: use https, or set fleet.plain_http")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// read reads the request's body of at most limit bytes. The caller releases m when the fields
// are no longer needed. False: read has already answered with an error, and m is released.
func (h *Handler) read(w http.ResponseWriter, r *http.Request, limit int) (f fields, e encoding, m *held, ok bool) {
	m, err := h.receive(r, limit)
	e = spoken(r, m.bytes())
	if err == nil {
		if f, err = parse(m, e); err == nil {
			return f, e, m, true
		}
	}
	status := http.StatusBadRequest
	switch {
	case errors.Is(err, errMemory):
		status = http.StatusServiceUnavailable
	case errors.Is(err, errTooLarge):
		status = http.StatusRequestEntityTooLarge
	}
	refuse(w, e, status, err.Error())
	m.release()
	return f, e, nil, false
}

// selected is the answer of /select.
type selected struct {
	Server string          `json:"server"`
	Info   info            `json:"info"`
	ReqID  json.RawMessage `json:"req_id,omitempty"`
	Handle string          `json:"handle,omitempty"`
}

// info is the part of the answer that a worker's service reads: server_info for requests
// whose generation is placed first, and the match for conditional disaggregation.
type info struct {
	ServerInfo  serverInfo `json:"server_info"`
	Matches     []int64    `json:"matches"`
	MatchLength int64      `json:"match_length"`
	NumTokens   int64      `json:"num_tokens"`
}

// serverInfo has the known members of the instance's GET /server_info. If
// ctx_info_endpoint is a list, serverInfo has the first element, because workers use that
// one.
type serverInfo struct {
	Params      json.RawMessage `json:"disaggregated_params,omitempty"`
	BlockTokens int             `json:"tokens_per_block,omitempty"`
	Hash        string          `json:"kv_cache_hash_algo,omitempty"`
}

func serverInfoOf(i *engine.Instance) serverInfo {
	f := i.Facts()
	s := serverInfo{BlockTokens: f.PageSize, Hash: f.KVHash}
	if f.Rendezvous != "" {
		s.Params = json.RawMessage("{" + f.Rendezvous + "}")
	}
	return s
}

func (h *Handler) selectServer(w http.ResponseWriter, r *http.Request) {
	f, e, m, ok := h.read(w, r, maxBody)
	if !ok {
		return
	}
	defer m.release()
	q, err := f.selection(e)
	if err != nil {
		refuse(w, e, http.StatusBadRequest, err.Error())
		return
	}
	// If the request repeats an id, the earlier reservation is released first, even if
	// the new one fails.
	if lease := h.open.take(q.id); lease != nil {
		lease.Release()
	}
	var out *selected
	var lease *coordinator.Lease
	if !h.leading(func() { out, lease, err = h.reserve(r.Context(), &q, m) }) {
		refuse(w, e, http.StatusServiceUnavailable, "this coordinator does not lead")
		return
	}
	if err != nil {
		refuse(w, e, http.StatusServiceUnavailable, err.Error())
		return
	}
	if q.id.handle {
		q.id.text = rand.Text()
		out.Handle = q.id.text
	}
	if r.Context().Err() != nil { // the worker has hung up and would not send /finish
		lease.Release()
		return
	}
	earlier, ok := h.open.add(q.id, lease, time.Now())
	if earlier != nil {
		earlier.Release()
	}
	if !ok {
		lease.Release()
		h.fallback("full")
		refuse(w, e, http.StatusServiceUnavailable, "too many reservations are open")
		return
	}
	answer(w, e, 200, out)
}

// reserve places the requested phase.
func (h *Handler) reserve(ctx context.Context, q *selection, m *held) (*selected, *coordinator.Lease, error) {
	v := h.servers()
	if v.several {
		return nil, nil, errors.New("the engines serve several models, and a selection names none")
	}
	side := v.side(q.id.phase)
	among := side.instances
	if q.exclude != "" {
		among = slices.DeleteFunc(slices.Clone(among), func(i *engine.Instance) bool { return v.address[i] == q.exclude })
	}
	if len(among) == 0 {
		return nil, nil, nobody(q)
	}
	key, err := readKey(q.key, side.hash, m)
	if err != nil {
		return nil, nil, err
	}
	a := &coordinator.PlacementRequest{
		Model: v.model, ID: q.live,
		Request: abi.RequestFacts{MaxTokens: -1, N: 1, PromptTokens: key.prompt(side)},
		Within:  coordinator.Within{Prefill: among, Decode: among},
	}
	if err := h.matchBy(a, &key, v, side, m); err != nil {
		return nil, nil, err
	}
	p, err := h.o.Local.Reserve(ctx, a, q.id.phase)
	switch {
	case errors.Is(err, coordinator.ErrNoTarget):
		return nil, nil, nobody(q)
	case err != nil:
		return nil, nil, err
	}
	defer p.Recycle()
	target := p.Prefill
	if target.IsZero() {
		target = p.Decode
	}
	matched := int64(0)
	if row := slices.Index(p.Targets, target); row >= 0 {
		matched = p.Facts.Candidates[row].Matched()
	}
	return &selected{
		Server: v.address[target.Instance], ReqID: json.RawMessage(q.echo),
		Info: info{ServerInfo: serverInfoOf(target.Instance), Matches: []int64{matched}, MatchLength: matched, NumTokens: a.Request.PromptTokens},
	}, p.Lease, nil
}

// nobody returns the error for a phase without a server.
func nobody(q *selection) error {
	text := "no " + roleName(q.id.phase) + " server is available"
	if q.exclude != "" {
		text += " beside " + q.exclude
	}
	return errors.New(text)
}

func (h *Handler) finish(w http.ResponseWriter, r *http.Request) {
	f, e, m, ok := h.read(w, r, maxShort)
	if !ok {
		return
	}
	defer m.release()
	id, success, err := f.finished(e)
	if err != nil {
		refuse(w, e, http.StatusBadRequest, err.Error())
		return
	}
	// An unknown reservation has expired or is already finished. The answer is 200.
	if lease := h.open.take(id); lease != nil {
		switch {
		case !success:
		case id.phase == abi.Prefill:
			lease.PrefillDone()
		default:
			lease.Answered(false)
		}
		lease.Release()
	}
	answer(w, e, 200, struct{}{})
}

func (h *Handler) renew(w http.ResponseWriter, r *http.Request) {
	f, e, m, ok := h.read(w, r, maxShort)
	if !ok {
		return
	}
	defer m.release()
	id, err := f.renewed(e)
	switch {
	case err != nil:
		refuse(w, e, http.StatusBadRequest, err.Error())
	case !h.open.renew(id, time.Now()):
		refuse(w, e, http.StatusServiceUnavailable, "no such reservation")
	default:
		answer(w, e, 200, struct{}{})
	}
}

// leading is Options.Leading.
func (h *Handler) leading(do func()) bool {
	if h.o.Leading != nil {
		return h.o.Leading(do)
	}
	do()
	return true
}

// ready reports whether the coordinator could place both phases of a request.
func (h *Handler) ready() bool {
	v := h.servers()
	return h.leading(func() {}) && !v.several && len(v.context.instances) > 0 && len(v.generation.instances) > 0
}

// clusterInfo answers GET /cluster_info.
func (h *Handler) clusterInfo(w http.ResponseWriter, r *http.Request) {
	v := h.servers()
	out := clusterInfo{IsReady: h.ready(), Servers: serverLists{v.addresses(&v.context), v.addresses(&v.generation)}}
	if h.o.Local.Needs()&abi.NeedBlocks != 0 {
		out.Keys = v.keyConfigs()
	}
	if v.clustered {
		out.Workers = &workerLists{v.workers(&v.context, 0), v.workers(&v.generation, 1)}
		out.Minimal = &minimal{1, 1}
	}
	answer(w, wanted(r), 200, out)
}
