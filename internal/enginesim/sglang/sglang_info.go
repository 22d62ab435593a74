package sglang

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

func (g *SGLang) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST "+RouteGenerate, g.e.Generating(RouteGenerate))
	mux.HandleFunc("PUT "+RouteGenerate, g.e.Generating(RouteGenerate))
	for _, route := range []string{core.RouteResponses, core.RouteMessages} {
		mux.HandleFunc("POST "+route, g.e.Generating(route))
	}
	mux.HandleFunc("GET "+core.RouteResponses+"/{id}", g.storeDisabled)
	mux.HandleFunc("POST "+core.RouteResponses+"/{id}/cancel", g.storeDisabled)
	mux.HandleFunc("POST /abort_request", g.abort)
	for _, path := range []string{"/health", "/health_generate"} {
		mux.HandleFunc("GET "+path, g.serveHealth)
	}
	for _, path := range []string{"/server_info", "/get_server_info"} {
		mux.HandleFunc("GET "+path, g.serverInfo)
	}
	for _, path := range []string{"/model_info", "/get_model_info"} {
		mux.HandleFunc("GET "+path, g.modelInfo)
	}
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, core.Obj("object", "list", "data", []any{core.Obj(
			"id", g.e.Cfg.Model, "object", "model", "created", 1700000000, "owned_by", "sglang",
			"root", g.e.Cfg.Model, "parent", nil, "max_model_len", g.e.MaxModelLen(),
		)}))
	})
	g.poolingRoutes(mux)
	for _, path := range []string{"/v1/tokenize", "/tokenize"} {
		mux.HandleFunc("POST "+path, g.tokenize)
	}
	for _, path := range []string{"/v1/detokenize", "/detokenize"} {
		mux.HandleFunc("POST "+path, g.detokenize)
	}
	for _, method := range []string{"GET", "POST"} {
		mux.HandleFunc(method+" /flush_cache", g.flushCache)
	}
	mux.HandleFunc("GET /v1/loads", g.loads)
	mux.HandleFunc("GET /get_load", g.legacyLoad)
	mux.HandleFunc("GET /metrics", g.metrics)
}

// serverInfo answers GET /server_info: the server arguments that a router
// reads, as one flat object, with the scheduler's limits.
func (g *SGLang) serverInfo(w http.ResponseWriter, _ *http.Request) {
	cfg := g.e.Cfg
	port := any(core.DefaultBootstrapPort)
	switch {
	case g.Boot != nil:
		port = g.Boot.port()
	case cfg.BootstrapPort != 0:
		port = cfg.BootstrapPort
	}
	host, _, _ := net.SplitHostPort(g.e.Addr())
	states := make([]any, 0, len(g.e.Ranks))
	for range g.e.Ranks {
		states = append(states, core.Obj("max_total_num_tokens", g.e.MaxModelLen(), "load", 0,
			"page_size", cfg.BlockSize, "kv_cache_dtype", g.cfg.KVCacheDtype))
	}
	core.WriteJSON(w, http.StatusOK, core.Obj(
		"model_path", cfg.Model, "served_model_name", cfg.Model, "host", host, "port", g.httpPort(),
		"tp_size", g.cfg.TPSize, "pp_size", g.cfg.PPSize, "enable_dp_attention", false, "dp_size", cfg.Ranks, "page_size", cfg.BlockSize, "kv_cache_dtype", g.cfg.KVCacheDtype,
		"load_balance_method", g.cfg.LoadBalance,
		"disaggregation_mode", g.mode, "disaggregation_bootstrap_port", port,
		"disaggregation_transfer_backend", g.cfg.TransferBackend,
		"max_total_num_tokens", g.e.MaxModelLen(), "max_req_input_len", g.e.MaxModelLen()-6,
		// managers/tokenizer_manager.py startup_time: durations in seconds, which differ from process to process.
		"startup_time", core.Obj("load_weight", 0.0, "kv_cache_allocation", 0.0, "scheduler_e2e", g.startup.Seconds(), "cuda_graph", core.Obj(), "tokenizer_e2e", 0.0),
		"internal_states", states, "version", g.cfg.Version, "kv_events", g.describePublisher(),
	))
}

// describePublisher is ServerArgs.describe_kv_events_publisher: rank 0's
// endpoint as configured, null without a publisher. An ephemeral port is known
// only after start.
func (g *SGLang) describePublisher() any {
	if g.e.Publishers == nil {
		return nil
	}
	host, _, _ := core.SplitEndpoint(g.e.Cfg.KVEvents.Endpoint)
	if host == "" {
		host = "*"
	}
	described := core.Obj("publisher", "zmq", "endpoint_host", host, "endpoint_port_base", portOf(g.e.KVEventsEndpoint()),
		"topic", g.e.Cfg.KVEvents.Topic, "block_size", g.e.Cfg.BlockSize, "dp_size", g.e.Cfg.Ranks)
	if replay := g.e.KVEventsReplay(); replay != "" {
		described = described.With("replay_endpoint_port_base", portOf(replay))
	}
	if at := g.LoadsEndpoint(); at != "" {
		described = described.With("load_endpoint_port_base", portOf(at)).With("load_topic", loadTopic)
	}
	return described
}

// portOf returns the port of an endpoint.
func portOf(endpoint string) int {
	_, port, _ := core.SplitEndpoint(endpoint)
	return port
}

// flushCache answers /flush_cache. It fails while requests run or wait.
func (g *SGLang) flushCache(w http.ResponseWriter, _ *http.Request) {
	status := http.StatusOK
	if !g.e.ResetCache() {
		status = http.StatusBadRequest
	}
	core.PlainText(w, status, "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n")
}

// modelInfo answers GET /model_info.
func (g *SGLang) modelInfo(w http.ResponseWriter, _ *http.Request) {
	model := g.e.Cfg.Model
	core.WriteJSON(w, http.StatusOK, core.Obj(
		"model_path", model, "served_model_name", model, "tokenizer_path", model, "is_generation", true,
		"preferred_sampling_params", nil, "weight_version", "default", "load_format", "auto",
		"reasoning_parser", nil, "tool_call_parser", nil, "has_image_understanding", false,
		"has_audio_understanding", false, "model_type", "sim", "architectures", []string{"SimForCausalLM"},
	))
}

// loads answers GET /v1/loads?include=core,disagg,…&dp_rank=N.
func (g *SGLang) loads(w http.ResponseWriter, r *http.Request) {
	include := strings.Split(r.URL.Query().Get("include"), ",")
	has := func(section string) bool {
		for _, s := range include {
			if s == section || s == "all" || s == "" {
				return true
			}
		}
		return false
	}
	only := -1
	if text := r.URL.Query().Get("dp_rank"); text != "" {
		v, err := strconv.Atoi(text)
		if err != nil || v < 0 || v >= len(g.e.Ranks) {
			refusal := core.BadRequest("dp_rank", "dp_rank is out of range [0, %d)", len(g.e.Ranks))
			core.WriteJSON(w, refusal.Status, g.ErrorBody(refusal))
			return
		}
		only = v
	}
	now := time.Now()
	list := []any{}
	for _, rk := range g.e.Ranks {
		if only < 0 || only == rk.Index {
			list = append(list, g.rankLoads(rk, now, has))
		}
	}
	core.WriteJSON(w, http.StatusOK, core.Obj(
		"timestamp", now.UTC().Format("2006-01-02T15:04:05.000000-07:00"), "version", g.cfg.Version,
		"accelerator", "sim", "num_accelerators", len(g.e.Ranks), "loads", list,
	))
}

func (g *SGLang) rankLoads(rk *core.Rank, now time.Time, has func(string) bool) core.Object {
	l, q := rk.Load(), &g.Queues[rk.Index]
	usage := float64(l.UsedTokens) / float64(l.TotalTokens)
	waiting, uncached := g.waiting(rk, l)
	o := core.Obj(
		"timestamp", float64(now.UnixMilli())/1000, "dp_rank", rk.Index,
		"num_running_reqs", l.Running, "num_waiting_reqs", waiting, "num_waiting_uncached_tokens", uncached,
		"num_used_tokens", l.UsedTokens, "num_total_tokens", l.UsedTokens+l.QueuedTokens, "num_active_tokens", l.UsedTokens,
		"max_total_num_tokens", l.TotalTokens, "max_running_requests", g.e.Cfg.MaxRunning,
		"token_usage", usage, "gen_throughput", 0.0, "cache_hit_rate", g.e.HitRate(), "utilization", usage,
		"total_prefill_uncached_tokens", 0, "total_prefill_busy_us", 0, "decode_moments", nil,
	)
	if has("disagg") {
		speed, millis := q.lastTransfer()
		o = o.With("disaggregation", core.Obj("mode", g.mode,
			"prefill_bootstrap_queue_reqs", q.Bootstrap.Load(), "prefill_inflight_queue_reqs", q.inflight.Load(),
			"decode_prealloc_queue_reqs", q.Prealloc.Load(), "decode_transfer_queue_reqs", q.transfer.Load(),
			"decode_retracted_queue_reqs", 0, "kv_transfer_speed_gb_s", speed, "kv_transfer_latency_ms", millis))
	}
	if has("queues") {
		o = o.With("queues", core.Obj("waiting", l.Waiting, "grammar", 0, "paused", 0, "retracted", 0, "prealloc_ready", q.ready.Load()))
	}
	if has("memory") {
		size := float64(l.TotalTokens*core.BytesPerKV) / gigabyte
		o = o.With("memory", core.Obj("weight_gb", 1.0, "kv_cache_gb", size, "graph_gb", 0.0, "token_capacity", l.TotalTokens))
	}
	return o
}

// gigabyte is the engine's unit of 2^30 bytes.
const gigabyte = 1 << 30

// lastTransfer returns the speed of the last transfer in gigabytes per second
// and its duration in milliseconds (srt/disaggregation/prefill.py); 0 before
// the first one.
func (q *sglangQueues) lastTransfer() (speed, millis float64) {
	took := float64(q.movedIn.Load())
	if took <= 0 {
		return 0, 0
	}
	return float64(q.movedBytes.Load()) / gigabyte / (took / 1e9), took / 1e6
}

// waiting returns the number of a rank's requests in all queues, and the tokens
// that prefill has to compute for them, which is 0 for decode
// (srt/managers/scheduler_components/load_inquirer.py).
func (g *SGLang) waiting(rk *core.Rank, l core.RankLoad) (requests, uncached int) {
	q := &g.Queues[rk.Index]
	switch g.mode {
	case modePrefill:
		return l.Waiting + int(q.Bootstrap.Load()), l.UncachedTokens
	case modeDecode: // requests without blocks are in the prealloc queue
		return l.Waiting - l.Queued + int(q.Prealloc.Load()+q.transfer.Load()), 0
	}
	return l.Waiting, l.UncachedTokens
}

// legacyLoad answers GET /get_load.
func (g *SGLang) legacyLoad(w http.ResponseWriter, _ *http.Request) {
	list := []any{}
	for _, rk := range g.e.Ranks {
		l := rk.Load()
		waiting, _ := g.waiting(rk, l)
		list = append(list, core.Obj("dp_rank", rk.Index, "num_reqs", l.Running+waiting, "num_waiting_reqs", waiting,
			"num_tokens", l.UsedTokens+l.QueuedTokens, "num_pending_tokens", l.QueuedTokens, "ts_tic", float64(time.Now().UnixMilli())/1000))
	}
	core.WriteJSON(w, http.StatusOK, list)
}

// metrics answers GET /metrics as with --enable-metrics.
func (g *SGLang) metrics(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	gauge := func(name string, value func(rk *core.Rank, l core.RankLoad) any) {
		fmt.Fprintf(&b, "# TYPE sglang:%s gauge\n", name)
		for _, rk := range g.e.Ranks {
			fmt.Fprintf(&b, "sglang:%s{dp_rank=\"%d\",model_name=%q} %v\n", name, rk.Index, g.e.Cfg.Model, value(rk, rk.Load()))
		}
	}
	gauge("num_running_reqs", func(_ *core.Rank, l core.RankLoad) any { return l.Running })
	gauge("num_queue_reqs", func(_ *core.Rank, l core.RankLoad) any { return l.Waiting })
	gauge("num_used_tokens", func(_ *core.Rank, l core.RankLoad) any { return l.UsedTokens })
	gauge("cache_hit_rate", func(*core.Rank, core.RankLoad) any { return g.e.HitRate() })
	gauge("token_usage", func(_ *core.Rank, l core.RankLoad) any { return float64(l.UsedTokens) / float64(l.TotalTokens) })
	gauge("num_prefill_bootstrap_queue_reqs", func(rk *core.Rank, _ core.RankLoad) any { return g.Queues[rk.Index].Bootstrap.Load() })
	gauge("num_prefill_inflight_queue_reqs", func(rk *core.Rank, _ core.RankLoad) any { return g.Queues[rk.Index].inflight.Load() })
	gauge("num_decode_prealloc_queue_reqs", func(rk *core.Rank, _ core.RankLoad) any { return g.Queues[rk.Index].Prealloc.Load() })
	gauge("num_decode_transfer_queue_reqs", func(rk *core.Rank, _ core.RankLoad) any { return g.Queues[rk.Index].transfer.Load() })
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.Write([]byte(b.String()))
}

// httpPort is the port of the engine's API.
func (g *SGLang) httpPort() int {
	_, port, _ := net.SplitHostPort(g.e.Addr())
	n, _ := strconv.Atoi(port)
	return n
}

// serveHealth answers GET /health and /health_generate. It generates one token,
// on a PD engine with a fake transfer, and polls for the output. So even a
// healthy answer takes HealthPoll.
func (g *SGLang) serveHealth(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), g.cfg.HealthTimeout)
	defer cancel()
	rid := "HEALTH_CHECK_" + core.NewUUID()
	req := &core.Request{Route: RouteGenerate, N: 1, Limited: true, MaxTokens: 1, Rank: -1, Prompts: [][]core.Token{{0}}, CacheSalt: rid}
	req.Ext = &SGLangRequest{Items: []sglangItem{{rid: rid, host: fakeBootstrapHost, hasRoom: true, prefillRank: -1}}}
	s := g.e.NewSequences(req)[0]
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.e.Stats.Requests.Add(1)
		err = g.Generate(ctx, s, func(core.Token) {})
	}()
	defer func() { cancel(); <-done }()
	for {
		if core.Sleep(ctx, g.cfg.HealthPoll) != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		select {
		case <-done:
			if err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			return
		default:
		}
	}
}
