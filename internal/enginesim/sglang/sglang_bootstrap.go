package sglang

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// bootstrapRegistry is the bootstrap server of a prefill engine: plain HTTP,
// without authentication, in memory (CommonKVBootstrapServer in
// disaggregation/common/conn.py). It is safe for concurrent use.
type bootstrapRegistry struct {
	g        *SGLang
	server   *http.Server
	listener net.Listener

	Mu    sync.Mutex
	ranks map[int]rankAddress
	Rooms map[int64]roomRank
}

// rankAddress is the address where a prefill rank receives decode's messages.
type rankAddress struct {
	IP   string `json:"rank_ip"`
	Port int    `json:"rank_port"`
}

// roomRank is the prefill rank of a room, for rooms that do not determine it.
type roomRank struct {
	rank  int
	since time.Time
}

// prefillTopology is the registry's answer to the sentinel query. Decode fills
// in the null fields itself.
type prefillTopology struct {
	AttnTPSize           int    `json:"attn_tp_size"`
	AttnCPSize           int    `json:"attn_cp_size"`
	DPSize               int    `json:"dp_size"`
	PPSize               int    `json:"pp_size"`
	PageSize             int    `json:"page_size"`
	KVCacheDtype         string `json:"kv_cache_dtype"`
	FollowBootstrapRoom  bool   `json:"follow_bootstrap_room"`
	DSACacheLayerSplit   bool   `json:"enable_dsa_cache_layer_split"`
	PrefillHTTPPort      int    `json:"prefill_http_port"`
	TargetTPRank         *int   `json:"target_tp_rank"`
	TargetTPRanks        *[]int `json:"target_tp_ranks"`
	TargetCPRanks        *[]int `json:"target_cp_ranks"`
	TargetPPRanks        *[]int `json:"target_pp_ranks"`
	RequiredDstInfo      *int   `json:"required_dst_info_num"`
	RequiredPrefillReply *int   `json:"required_prefill_response_num"`
}

func newBootstrapRegistry(g *SGLang) *bootstrapRegistry {
	b := &bootstrapRegistry{g: g, ranks: make(map[int]rankAddress), Rooms: make(map[int64]roomRank)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { core.PlainText(w, http.StatusOK, "OK") })
	mux.HandleFunc("GET /route", b.route)
	mux.HandleFunc("PUT /route", b.putRoute)
	mux.HandleFunc("POST /register_dp_rank", b.registerRank)
	mux.HandleFunc("POST /query_dp_ranks", b.queryRanks)
	b.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			g.e.Faults.Await()
			mux.ServeHTTP(w, r)
		}),
		ConnState: g.e.Conns.State, ReadHeaderTimeout: time.Minute,
		BaseContext: func(net.Listener) context.Context { return g.e.Ctx },
	}
	return b
}

// Start listens on the bootstrap port and registers the engine's own ranks, as
// each rank does by PUT /route.
func (b *bootstrapRegistry) Start() error {
	host, _, err := net.SplitHostPort(b.g.e.Cfg.Listen)
	if err != nil {
		return err
	}
	b.listener, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(b.g.e.Cfg.BootstrapPort)))
	if err != nil {
		return fmt.Errorf("listen bootstrap: %w", err)
	}
	for _, r := range b.g.e.Ranks {
		ip, port := r.Side.HostPort()
		b.ranks[r.Index] = rankAddress{ip, port}
	}
	context.AfterFunc(b.g.e.Ctx, func() { b.listener.Close() })
	b.g.e.Spawn(func(context.Context) { b.server.Serve(b.listener) })
	return nil
}

// port returns the port on which it listens; before start the configured one.
func (b *bootstrapRegistry) port() int {
	if b.listener == nil {
		return b.g.e.Cfg.BootstrapPort
	}
	return b.listener.Addr().(*net.TCPAddr).Port
}

// route answers GET /route: with -1 for all four values the topology, else the
// address of one rank.
func (b *bootstrapRegistry) route(w http.ResponseWriter, r *http.Request) {
	var ranks [4]int
	sentinel := true
	for i, name := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		text := r.URL.Query().Get(name)
		if text == "" {
			core.PlainText(w, http.StatusBadRequest, "Missing inputs for bootstrap server.")
			return
		}
		v, err := strconv.Atoi(text)
		if err != nil {
			core.PlainText(w, http.StatusInternalServerError, "500 Internal Server Error")
			return
		}
		ranks[i] = v
		sentinel = sentinel && v == -1
	}
	b.Mu.Lock()
	registered := len(b.ranks)
	rank, known := b.ranks[ranks[0]]
	b.Mu.Unlock()
	cfg := b.g.e.Cfg
	switch {
	case registered < cfg.Ranks:
		core.PlainText(w, http.StatusServiceUnavailable, fmt.Sprintf("Prefill server not fully registered yet (%d workers registered).", registered))
	case sentinel:
		core.WriteJSON(w, http.StatusOK, prefillTopology{
			AttnTPSize: cfg.SGLang.TPSize, AttnCPSize: 1, DPSize: cfg.Ranks, PPSize: cfg.SGLang.PPSize, PageSize: cfg.BlockSize,
			KVCacheDtype: cfg.SGLang.KVCacheDtype, FollowBootstrapRoom: cfg.SGLang.LoadBalance == core.BalanceFollowRoom,
			PrefillHTTPPort: b.g.httpPort(),
		})
	case !known || ranks[1] != 0 || ranks[2] != 0 || ranks[3] != 0:
		core.PlainText(w, http.StatusNotFound, fmt.Sprintf("Bootstrap info not found for dp_rank=%d cp_rank=%d tp_rank=%d pp_rank=%d",
			ranks[0], ranks[1], ranks[2], ranks[3]))
	default:
		core.WriteJSON(w, http.StatusOK, rank)
	}
}

// putRoute answers PUT /route. Any host that can reach it can replace a rank's
// address.
func (b *bootstrapRegistry) putRoute(w http.ResponseWriter, r *http.Request) {
	var m struct {
		SystemDPSize int    `json:"system_dp_size"`
		SystemDPRank int    `json:"system_dp_rank"`
		AttnDPRank   int    `json:"attn_dp_rank"`
		RankIP       string `json:"rank_ip"`
		RankPort     int    `json:"rank_port"`
	}
	if !b.decode(w, r, &m) {
		return
	}
	rank := m.SystemDPRank
	if m.SystemDPSize == 1 {
		rank = m.AttnDPRank
	}
	b.Mu.Lock()
	b.ranks[rank] = rankAddress{m.RankIP, m.RankPort}
	b.Mu.Unlock()
	core.PlainText(w, http.StatusOK, "OK")
}

func (b *bootstrapRegistry) registerRank(w http.ResponseWriter, r *http.Request) {
	var m struct {
		Room int64 `json:"bootstrap_room"`
		Rank int   `json:"dp_rank"`
	}
	if b.decode(w, r, &m) {
		b.Register(m.Room, m.Rank)
		core.PlainText(w, http.StatusOK, "OK")
	}
}

// Register stores a room's rank and removes expired rooms.
func (b *bootstrapRegistry) Register(room int64, rank int) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	now := time.Now()
	for old, entry := range b.Rooms {
		if now.Sub(entry.since) > b.g.cfg.RoomExpiry {
			delete(b.Rooms, old)
		}
	}
	b.Rooms[room] = roomRank{rank, now}
}

// queryRanks answers POST /query_dp_ranks; unknown rooms are absent.
func (b *bootstrapRegistry) queryRanks(w http.ResponseWriter, r *http.Request) {
	var m struct {
		Rooms []int64 `json:"bootstrap_rooms"`
	}
	if !b.decode(w, r, &m) {
		return
	}
	found := make(map[string]int)
	b.Mu.Lock()
	for _, room := range m.Rooms {
		if entry, ok := b.Rooms[room]; ok && time.Since(entry.since) <= b.g.cfg.RoomExpiry {
			found[strconv.FormatInt(room, 10)] = entry.rank
		}
	}
	b.Mu.Unlock()
	core.WriteJSON(w, http.StatusOK, found)
}

// decode reads a JSON body. An invalid body gets aiohttp's answer to an
// uncaught exception.
func (b *bootstrapRegistry) decode(w http.ResponseWriter, r *http.Request, v any) bool {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(v); err != nil {
		core.PlainText(w, http.StatusInternalServerError, "500 Internal Server Error")
		return false
	}
	return true
}

func (g *SGLang) BootstrapPort() int {
	if g.Boot == nil {
		return 0
	}
	return g.Boot.port()
}
