package proxy

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// adminHandler is the operators' surface. token is what callers must send as a
// bearer token; "" asks for none (loopback only, as the configuration checks).
// /healthz and /readyz are open, because probes carry no token.
func (s *Server) adminHandler(token string) http.Handler {
	open, guarded := http.NewServeMux(), http.NewServeMux()
	open.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, 200, map[string]string{"status": "ok"})
	})
	open.HandleFunc("GET /readyz", s.serveHealth)
	whole := whole{s, s.deps.Workers}
	guarded.Handle("GET /metrics", whole.metrics())
	guarded.HandleFunc("GET /v1/engines", s.adminEngines)
	guarded.HandleFunc("POST /v1/engines", s.adminAddEngine)
	guarded.HandleFunc("DELETE /v1/engines/{name}", s.adminRemoveEngine)
	guarded.HandleFunc("GET /v1/pairs", s.adminPairs)
	guarded.HandleFunc("GET /v1/policies", whole.policies)
	guarded.HandleFunc("POST /v1/policies/{name}/reload", whole.reload)
	guarded.HandleFunc("GET /v1/exchanges", whole.exchanges)
	guarded.HandleFunc("GET /v1/explain/{id}", whole.explain)
	guarded.HandleFunc("GET /perf_metrics", whole.perfMetrics)
	guarded.HandleFunc("GET /v1/sidecar", s.sidecarOf(s.adminSidecar))
	guarded.HandleFunc("PUT /v1/sidecar/policies", s.sidecarOf(s.adminOrder))
	guarded.HandleFunc("DELETE /v1/sidecar/policies", s.sidecarOf(s.adminOrderReset))
	guarded.HandleFunc("POST /v1/drain", whole.drain)
	if s.deps.Workers != nil {
		guarded.HandleFunc("GET /v1/workers", func(w http.ResponseWriter, _ *http.Request) {
			writeJSON(w, 200, s.deps.Workers.List())
		})
	}
	open.Handle("/", requireToken(token, guarded))
	return open
}

// requireToken lets only callers through that send the token.
func requireToken(token string, h http.Handler) http.Handler {
	if token == "" {
		return h
	}
	want := []byte("Bearer " + token)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			writeError(w, &openai.Error{Status: 401, Code: "invalid_token", Message: "the admin token is needed: Authorization: Bearer TOKEN"})
			return
		}
		h.ServeHTTP(w, r)
	})
}

// EngineRow is one row of GET /v1/engines.
type EngineRow struct {
	Name      string    `json:"name"`
	URL       string    `json:"url"`
	Role      string    `json:"role"`
	Connector string    `json:"connector"`
	State     string    `json:"state"`
	Ranks     []RankRow `json:"ranks"`
	Model     string    `json:"model"`
	Source    string    `json:"source"`
	Facts     FactsRow  `json:"facts"`
}

// FactsRow is what the engine publishes of itself, as far as it is known: by this
// pairs are judged.
type FactsRow struct {
	Version       string       `json:"version,omitempty"`
	Wire          string       `json:"wire,omitempty"`         // trtllm
	BlockTokens   int          `json:"block_tokens,omitempty"` // of a KV block
	KVCacheType   string       `json:"kv_cache_type,omitempty"`
	DPSize        int          `json:"dp_size,omitempty"`
	TPSize        int          `json:"tp_size,omitempty"`
	PPSize        int          `json:"pp_size,omitempty"`
	CPSize        int          `json:"cp_size,omitempty"`
	Transfer      string       `json:"transfer,omitempty"` // sglang: its transfer backend
	BootstrapPort int          `json:"bootstrap_port,omitempty"`
	KVAddress     string       `json:"kv_address,omitempty"`
	EngineIDs     []string     `json:"engine_ids,omitempty"`
	Addresses     []netip.Addr `json:"addresses,omitempty"` // of the host of its URL
}

func factsRow(i *engine.Instance) FactsRow {
	f := i.Facts()
	row := FactsRow{
		Version: f.Version, Wire: f.Wire, BlockTokens: i.BlockTokens(), KVCacheType: f.KVCacheType,
		DPSize: f.DPSize, TPSize: f.TPSize, PPSize: f.PPSize, CPSize: f.CPSize, Transfer: f.Transfer,
		BootstrapPort: f.BootstrapPort, EngineIDs: f.EngineIDs, Addresses: f.Addresses,
	}
	if !f.KVAddress.IsZero() {
		row.KVAddress = f.KVAddress.String()
	}
	return row
}

// RankRow is the load of one rank.
type RankRow struct {
	Rank     int   `json:"rank"`
	Requests int32 `json:"requests"`
	Tokens   int64 `json:"tokens"`
}

func (s *Server) adminEngines(w http.ResponseWriter, _ *http.Request) {
	rows := []EngineRow{}
	for _, i := range s.deps.Registry.Snapshot().Instances {
		row := EngineRow{
			Name: i.Spec.Name, URL: i.Spec.URL, Role: i.Role.String(), Connector: i.Spec.Connector,
			State: i.State().String(), Model: i.Spec.Model, Source: i.Source, Ranks: []RankRow{}, Facts: factsRow(i),
		}
		if row.Model == "" {
			row.Model = strings.Join(i.Facts().Models, ",")
		}
		for r := range i.Load {
			row.Ranks = append(row.Ranks, RankRow{Rank: r, Requests: i.Load[r].Requests(), Tokens: i.Load[r].Tokens()})
		}
		rows = append(rows, row)
	}
	s.deps.Registry.Settle()
	writeJSON(w, 200, rows)
}

// maxEngineBody bounds the body of POST /v1/engines.
const maxEngineBody = 64 << 10

func (s *Server) adminAddEngine(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxEngineBody))
	var spec config.Engine
	if err == nil {
		spec, err = config.EngineFromJSON(body)
	}
	if err == nil {
		err = s.deps.Registry.Add(spec)
	}
	if err != nil {
		writeError(w, &openai.Error{Status: 400, Code: "bad_engine", Message: err.Error()})
		return
	}
	writeJSON(w, 201, map[string]string{"name": spec.Name})
}

func (s *Server) adminRemoveEngine(w http.ResponseWriter, r *http.Request) {
	drain := 60 * time.Second
	if v := r.URL.Query().Get("drain"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 {
			writeError(w, &openai.Error{Status: 400, Code: "bad_value", Param: "drain", Message: "drain is a duration such as 60s"})
			return
		}
		drain = d
	}
	if err := s.deps.Registry.Remove(r.PathValue("name"), drain); err != nil {
		status := 400
		if errors.Is(err, engine.ErrUnknown) {
			status = 404
		}
		writeError(w, &openai.Error{Status: status, Code: "unknown_engine", Param: "name", Message: err.Error()})
		return
	}
	writeJSON(w, 202, map[string]string{"name": r.PathValue("name"), "state": "draining"})
}

func (s *Server) adminPairs(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, 200, s.deps.Registry.Pairs())
}

// ErrUnknownPolicy is the error of Policies.Reload for a name that nothing has.
var ErrUnknownPolicy = errors.New("no policy or plugin of that name")

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		writeError(w, &openai.Error{Status: 500, Code: "internal", Message: "internal error"})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}
