package enginesim

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// sglangVersion is the version that the simulated engine reports.
const sglangVersion = "0.5.9.sim"

func (g *sglang) routes(mux *http.ServeMux) {
	mux.HandleFunc("POST "+routeGenerate, g.e.generating(routeGenerate))
	mux.HandleFunc("PUT "+routeGenerate, g.e.generating(routeGenerate))
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
		writeJSON(w, http.StatusOK, obj("object", "list", "data", []any{obj(
			"id", g.e.cfg.Model, "object", "model", "created", 1700000000, "owned_by", "sglang",
			"root", g.e.cfg.Model, "parent", nil, "max_model_len", g.e.maxModelLen(),
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
func (g *sglang) serverInfo(w http.ResponseWriter, _ *http.Request) {
	cfg := g.e.cfg
	port := any(defaultBootstrapPort)
	switch {
	case g.boot != nil:
		port = g.boot.port()
	case cfg.BootstrapPort != 0:
		port = cfg.BootstrapPort
	}
	host, _, _ := net.SplitHostPort(g.e.Addr())
	states := make([]any, 0, len(g.e.ranks))
	for range g.e.ranks {
		states = append(states, obj("max_total_num_tokens", g.e.maxModelLen(), "load", 0,
			"page_size", cfg.BlockSize, "kv_cache_dtype", g.cfg.KVCacheDtype))
	}
	writeJSON(w, http.StatusOK, obj(
		"model_path", cfg.Model, "served_model_name", cfg.Model, "host", host, "port", g.httpPort(),
		"tp_size", g.cfg.TPSize, "pp_size", g.cfg.PPSize, "enable_dp_attention", false, "dp_size", cfg.Ranks, "page_size", cfg.BlockSize, "kv_cache_dtype", g.cfg.KVCacheDtype,
		"load_balance_method", g.cfg.LoadBalance,
		"disaggregation_mode", g.mode, "disaggregation_bootstrap_port", port,
		"disaggregation_transfer_backend", g.cfg.TransferBackend,
		"max_total_num_tokens", g.e.maxModelLen(), "max_req_input_len", g.e.maxModelLen()-6,
		"internal_states", states, "version", sglangVersion, "kv_events", g.describePublisher(),
	))
}

// describePublisher is ServerArgs.describe_kv_events_publisher: rank 0's
// endpoint as configured, null without a publisher. An ephemeral port is known
// only after start.
func (g *sglang) describePublisher() any {
	if g.e.publishers == nil {
		return nil
	}
	host, _, _ := splitEndpoint(g.e.cfg.KVEvents.Endpoint)
	if host == "" {
		host = "*"
	}
	return obj("publisher", "zmq", "endpoint_host", host,
		"endpoint_port_base", g.e.publishers.list[0].events.Addr().(*net.TCPAddr).Port,
		"topic", g.e.cfg.KVEvents.Topic, "block_size", g.e.cfg.BlockSize, "dp_size", g.e.cfg.Ranks)
}

// flushCache answers /flush_cache. It fails while requests run or wait.
func (g *sglang) flushCache(w http.ResponseWriter, _ *http.Request) {
	status := http.StatusOK
	if !g.e.resetCache() {
		status = http.StatusBadRequest
	}
	plainText(w, status, "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n")
}

// modelInfo answers GET /model_info.
func (g *sglang) modelInfo(w http.ResponseWriter, _ *http.Request) {
	model := g.e.cfg.Model
	writeJSON(w, http.StatusOK, obj(
		"model_path", model, "served_model_name", model, "tokenizer_path", model, "is_generation", true,
		"preferred_sampling_params", nil, "weight_version", "default", "load_format", "auto",
		"reasoning_parser", nil, "tool_call_parser", nil, "has_image_understanding", false,
		"has_audio_understanding", false, "model_type", "sim", "architectures", []string{"SimForCausalLM"},
	))
}

// loads answers GET /v1/loads?include=core,disagg,…&dp_rank=N.
func (g *sglang) loads(w http.ResponseWriter, r *http.Request) {
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
		if err != nil || v < 0 || v >= len(g.e.ranks) {
			refusal := badRequest("dp_rank", "dp_rank is out of range [0, %d)", len(g.e.ranks))
			writeJSON(w, refusal.Status, g.errorBody(refusal))
			return
		}
		only = v
	}
	now := time.Now()
	list := []any{}
	for _, rk := range g.e.ranks {
		if only < 0 || only == rk.index {
			list = append(list, g.rankLoads(rk, now, has))
		}
	}
	writeJSON(w, http.StatusOK, obj(
		"timestamp", now.UTC().Format("2006-01-02T15:04:05.000000-07:00"), "version", sglangVersion,
		"accelerator", "sim", "num_accelerators", len(g.e.ranks), "loads", list,
	))
}

func (g *sglang) rankLoads(rk *rank, now time.Time, has func(string) bool) object {
	l, q := rk.load(), &g.queues[rk.index]
	usage := float64(l.usedTokens) / float64(l.totalTokens)
	waiting, uncached := g.waiting(rk, l)
	o := obj(
		"timestamp", float64(now.UnixMilli())/1000, "dp_rank", rk.index,
		"num_running_reqs", l.running, "num_waiting_reqs", waiting, "num_waiting_uncached_tokens", uncached,
		"num_used_tokens", l.usedTokens, "num_total_tokens", l.usedTokens+l.queuedTokens, "num_active_tokens", l.usedTokens,
		"max_total_num_tokens", l.totalTokens, "max_running_requests", g.e.cfg.MaxRunning,
		"token_usage", usage, "gen_throughput", 0.0, "cache_hit_rate", g.e.hitRate(), "utilization", usage,
		"total_prefill_uncached_tokens", 0, "total_prefill_busy_us", 0, "decode_moments", nil,
	)
	if has("disagg") {
		speed, millis := q.lastTransfer()
		o = o.with("disaggregation", obj("mode", g.mode,
			"prefill_bootstrap_queue_reqs", q.bootstrap.Load(), "prefill_inflight_queue_reqs", q.inflight.Load(),
			"decode_prealloc_queue_reqs", q.prealloc.Load(), "decode_transfer_queue_reqs", q.transfer.Load(),
			"decode_retracted_queue_reqs", 0, "kv_transfer_speed_gb_s", speed, "kv_transfer_latency_ms", millis))
	}
	if has("queues") {
		o = o.with("queues", obj("waiting", l.waiting, "grammar", 0, "paused", 0, "retracted", 0, "prealloc_ready", q.ready.Load()))
	}
	if has("memory") {
		size := float64(l.totalTokens*bytesPerKV) / gigabyte
		o = o.with("memory", obj("weight_gb", 1.0, "kv_cache_gb", size, "graph_gb", 0.0, "token_capacity", l.totalTokens))
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
func (g *sglang) waiting(rk *rank, l rankLoad) (requests, uncached int) {
	q := &g.queues[rk.index]
	switch g.mode {
	case modePrefill:
		return l.waiting + int(q.bootstrap.Load()), l.uncachedTokens
	case modeDecode: // requests without blocks are in the prealloc queue
		return l.waiting - l.queued + int(q.prealloc.Load()+q.transfer.Load()), 0
	}
	return l.waiting, l.uncachedTokens
}

// legacyLoad answers GET /get_load.
func (g *sglang) legacyLoad(w http.ResponseWriter, _ *http.Request) {
	list := []any{}
	for _, rk := range g.e.ranks {
		l := rk.load()
		waiting, _ := g.waiting(rk, l)
		list = append(list, obj("dp_rank", rk.index, "num_reqs", l.running+waiting, "num_waiting_reqs", waiting,
			"num_tokens", l.usedTokens+l.queuedTokens, "num_pending_tokens", l.queuedTokens, "ts_tic", float64(time.Now().UnixMilli())/1000))
	}
	writeJSON(w, http.StatusOK, list)
}

// metrics answers GET /metrics as with --enable-metrics.
func (g *sglang) metrics(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	gauge := func(name string, value func(rk *rank, l rankLoad) any) {
		fmt.Fprintf(&b, "# TYPE sglang:%s gauge\n", name)
		for _, rk := range g.e.ranks {
			fmt.Fprintf(&b, "sglang:%s{dp_rank=\"%d\",model_name=%q} %v\n", name, rk.index, g.e.cfg.Model, value(rk, rk.load()))
		}
	}
	gauge("num_running_reqs", func(_ *rank, l rankLoad) any { return l.running })
	gauge("num_queue_reqs", func(_ *rank, l rankLoad) any { return l.waiting })
	gauge("num_used_tokens", func(_ *rank, l rankLoad) any { return l.usedTokens })
	gauge("cache_hit_rate", func(*rank, rankLoad) any { return g.e.hitRate() })
	gauge("token_usage", func(_ *rank, l rankLoad) any { return float64(l.usedTokens) / float64(l.totalTokens) })
	gauge("num_prefill_bootstrap_queue_reqs", func(rk *rank, _ rankLoad) any { return g.queues[rk.index].bootstrap.Load() })
	gauge("num_prefill_inflight_queue_reqs", func(rk *rank, _ rankLoad) any { return g.queues[rk.index].inflight.Load() })
	gauge("num_decode_prealloc_queue_reqs", func(rk *rank, _ rankLoad) any { return g.queues[rk.index].prealloc.Load() })
	gauge("num_decode_transfer_queue_reqs", func(rk *rank, _ rankLoad) any { return g.queues[rk.index].transfer.Load() })
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.Write([]byte(b.String()))
}

// httpPort is the port of the engine's API.
func (g *sglang) httpPort() int {
	_, port, _ := net.SplitHostPort(g.e.Addr())
	n, _ := strconv.Atoi(port)
	return n
}

// serveHealth answers GET /health and /health_generate. It generates one token,
// on a PD engine with a fake transfer, and polls for the output. So even a
// healthy answer takes HealthPoll.
func (g *sglang) serveHealth(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), g.cfg.HealthTimeout)
	defer cancel()
	rid := "HEALTH_CHECK_" + newUUID()
	req := &request{Route: routeGenerate, N: 1, Limited: true, MaxTokens: 1, Rank: -1, Prompts: [][]token{{0}}, CacheSalt: rid}
	req.Ext = &sglangRequest{items: []sglangItem{{rid: rid, host: fakeBootstrapHost, hasRoom: true, prefillRank: -1}}}
	s := g.e.newSequences(req)[0]
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.e.stats.requests.Add(1)
		err = g.generate(ctx, s, func(token) {})
	}()
	defer func() { cancel(); <-done }()
	for {
		if sleep(ctx, g.cfg.HealthPoll) != nil {
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
