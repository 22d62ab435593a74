package proxy

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/httpguard"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// adminRoutes are the operators' routes. Those that change something have another
// method than GET.
func (s *Server) adminRoutes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+healthzPath, func(w http.ResponseWriter, _ *http.Request) {
		downstream.JSON(w, 200, map[string]string{"status": "ok"})
	})
	mux.HandleFunc("GET "+readyzPath, s.serveHealth)
	whole := whole{s, s.deps.Workers}
	mux.Handle("GET /metrics", whole.metrics())
	mux.HandleFunc("GET /v1/engines", s.adminEngines)
	mux.HandleFunc("POST /v1/engines", s.adminAddEngine)
	mux.HandleFunc("DELETE /v1/engines/{name}", s.adminRemoveEngine)
	mux.HandleFunc("GET /v1/pairs", s.adminPairs)
	mux.HandleFunc("GET /v1/policies", whole.policies)
	mux.HandleFunc("POST /v1/policies/{name}/reload", whole.reload)
	mux.HandleFunc("GET /v1/exchanges", whole.exchanges)
	mux.HandleFunc("GET /v1/explain/{id}", whole.explain)
	mux.HandleFunc("GET /perf_metrics", whole.perfMetrics)
	mux.HandleFunc("GET /v1/sidecar", s.sidecarOf(s.adminSidecar))
	mux.HandleFunc("PUT /v1/sidecar/policies", s.sidecarOf(s.adminOrder))
	mux.HandleFunc("DELETE /v1/sidecar/policies", s.sidecarOf(s.adminOrderReset))
	mux.HandleFunc("POST /v1/drain", whole.drain)
	if s.deps.Workers != nil {
		mux.HandleFunc("GET /v1/workers", func(w http.ResponseWriter, _ *http.Request) {
			downstream.JSON(w, 200, s.deps.Workers.List())
		})
	}
	return mux
}

// The routes of probes, which have no token.
const (
	healthzPath = "/healthz"
	readyzPath  = "/readyz"
)

// AdminToken is the bearer token of the admin address.
type AdminToken struct {
	// Token is never empty at an admin address.
	Token string
	// Made says that the proxy has made the token itself. Requests on loopback that
	// only read do without such a token.
	Made bool
}

// adminHandler is the operators' routes at an address, behind a guard. /healthz and
// /readyz need no token.
func (s *Server) adminHandler(cfg *config.Config, address net.Addr, token AdminToken) http.Handler {
	reading := token.Made && httpguard.Loopback(address)
	return httpguard.Guard{
		Name: "admin.listen", Address: address, Hosts: cfg.Admin.InternalHosts(cfg.Admin.Listen), Token: token.Token,
		Types: []string{"application/json"}, Log: s.log,
		Open: func(r *http.Request) bool {
			get := r.Method == http.MethodGet || r.Method == http.MethodHead
			return get && (reading || r.URL.Path == healthzPath || r.URL.Path == readyzPath)
		},
		Refuse: func(w http.ResponseWriter, _ *http.Request, status int, text string) {
			code := map[int]string{401: "invalid_token", 403: "forbidden", 415: "unsupported_media_type"}[status]
			downstream.Error(w, &openai.Error{Status: status, Code: code, Message: text})
		},
	}.Wrap(s.adminRoutes())
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
	downstream.JSON(w, 200, rows)
}

// maxEngineBody bounds the body of POST /v1/engines.
const maxEngineBody = 64 << 10

func (s *Server) adminAddEngine(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxEngineBody))
	var spec config.Engine
	if err == nil {
		spec, err = config.EngineFromJSON(body)
	}
	if err == nil && !s.cfg.Load().Admin.TrustAddedEngines {
		err = spec.CheckAdded()
	}
	if err != nil {
		refusal := &openai.Error{Status: 400, Code: "bad_engine", Message: err.Error()}
		var problems config.Problems
		if errors.As(err, &problems) {
			refusal.Param = problems[0].Key
		}
		downstream.Error(w, refusal)
		return
	}
	if err := s.deps.Registry.Add(spec); err != nil {
		text := err.Error()
		if spec.APIKeyFile != "" || spec.CA != "" {
			s.log.Error("an added engine cannot be used", "error", err)
			text = "the engine cannot be used; the log of the proxy has the reason" // which tells about local files
		}
		downstream.Error(w, &openai.Error{Status: 400, Code: "bad_engine", Message: text})
		return
	}
	downstream.JSON(w, 201, map[string]string{"name": spec.Name})
}

func (s *Server) adminRemoveEngine(w http.ResponseWriter, r *http.Request) {
	drain := 60 * time.Second
	if v := r.URL.Query().Get("drain"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 {
			downstream.Error(w, &openai.Error{Status: 400, Code: "bad_value", Param: "drain", Message: "drain is a duration such as 60s"})
			return
		}
		drain = d
	}
	if err := s.deps.Registry.Remove(r.PathValue("name"), drain); err != nil {
		status := 400
		if errors.Is(err, engine.ErrUnknown) {
			status = 404
		}
		downstream.Error(w, &openai.Error{Status: status, Code: "unknown_engine", Param: "name", Message: err.Error()})
		return
	}
	downstream.JSON(w, 202, map[string]string{"name": r.PathValue("name"), "state": "draining"})
}

func (s *Server) adminPairs(w http.ResponseWriter, _ *http.Request) {
	downstream.JSON(w, 200, s.deps.Registry.Pairs())
}

// ErrUnknownPolicy is the error of Policies.Reload for a name that nothing has.
var ErrUnknownPolicy = errors.New("no policy or plugin of that name")
