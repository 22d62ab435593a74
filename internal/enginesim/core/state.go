package core

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
)

// State holds the resources and counters of an engine: the JSON of GET /sim/state.
type State struct {
	// BlocksTotal counts the KV blocks of all ranks.
	BlocksTotal int `json:"blocks_total"`
	// BlocksUsed are blocks that a sequence or a pinned set references; idle
	// prefix-cached blocks are not.
	BlocksUsed int `json:"blocks_used"`
	// BlocksPinned are blocks held for a transfer that has not happened yet.
	BlocksPinned int `json:"blocks_pinned"`
	// RequestsRunning hold a slot.
	RequestsRunning int `json:"requests_running"`
	// RequestsWaiting wait for blocks, a slot or a transfer.
	RequestsWaiting int `json:"requests_waiting"`
	// RequestsHanging hang by the fault Config.Hang.
	RequestsHanging int `json:"requests_hanging"`
	// Requests counts sequences that reached the engine.
	Requests int64 `json:"requests"`
	// Transfers counts KV transfers that this engine served to peers, pushed to
	// peers or received. Each transfer counts on both sides.
	Transfers int64 `json:"transfers"`
	// Aborted counts sequences whose client left before the end.
	Aborted int64 `json:"aborted"`
	// Errors counts sequences that failed inside the engine.
	Errors int64 `json:"errors"`
	// Rejected counts requests answered 4xx before admission.
	Rejected int64 `json:"rejected"`
	// PromptTokens, CachedTokens and OutputTokens are sums over sequences;
	// cached are the prompt tokens that were not computed here.
	PromptTokens int64 `json:"prompt_tokens"`
	CachedTokens int64 `json:"cached_tokens"`
	OutputTokens int64 `json:"output_tokens"`
	// Tokenized counts the prompts in text that a vLLM engine tokenized, for an answer or for a
	// tokenize request. StrayIDs counts prompts of ids beside messages that do not begin with the
	// ids of these messages.
	Tokenized int64 `json:"tokenized"`
	StrayIDs  int64 `json:"stray_ids"`
	// LeasesExpired counts pinned sets whose lease ended.
	LeasesExpired int64 `json:"leases_expired"`
	// StaleReads counts reads of memory that was no longer held.
	StaleReads int64 `json:"stale_reads"`
	// DuplicateIDs counts requests whose id was in flight already.
	DuplicateIDs int64 `json:"duplicate_ids"`
	// PeerConnections counts the connections to ranks of peers that were
	// opened, ConnectionWaits the transfers that waited for one.
	PeerConnections int64 `json:"peer_connections"`
	ConnectionWaits int64 `json:"connection_waits"`
	// Encoded counts images and sounds that this engine encoded, EncoderHits
	// those whose encoding it found.
	Encoded     int64 `json:"encoded"`
	EncoderHits int64 `json:"encoder_hits"`
	// ConnectionsOpen are HTTP connections.
	ConnectionsOpen int `json:"connections_open"`
	// KVSubscribers are the connections that have subscribed to the KV events of
	// a rank.
	KVSubscribers int `json:"kv_subscribers"`
}

// counters are the part of State that only increases.
type counters struct {
	Requests, Transfers, Aborted, errors, Rejected atomic.Int64
	promptTokens, cachedTokens, OutputTokens       atomic.Int64
	LeasesExpired, StaleReads, DuplicateIDs        atomic.Int64
	peerConnections, connectionWaits               atomic.Int64
	Encoded, EncoderHits                           atomic.Int64
	Tokenized, StrayIDs                            atomic.Int64
	ExternalTokens                                 atomic.Int64 // received by transfer
}

// State returns a snapshot. A killed engine holds nothing.
func (e *Engine) State() State {
	s := State{
		RequestsHanging: int(e.Faults.hung.Load()),
		Requests:        e.Stats.Requests.Load(), Transfers: e.Stats.Transfers.Load(), Aborted: e.Stats.Aborted.Load(),
		Errors: e.Stats.errors.Load(), Rejected: e.Stats.Rejected.Load(),
		PromptTokens: e.Stats.promptTokens.Load(), CachedTokens: e.Stats.cachedTokens.Load(), OutputTokens: e.Stats.OutputTokens.Load(),
		Tokenized: e.Stats.Tokenized.Load(), StrayIDs: e.Stats.StrayIDs.Load(),
		LeasesExpired: e.Stats.LeasesExpired.Load(), StaleReads: e.Stats.StaleReads.Load(), DuplicateIDs: e.Stats.DuplicateIDs.Load(),
		PeerConnections: e.Stats.peerConnections.Load(), ConnectionWaits: e.Stats.connectionWaits.Load(),
		Encoded: e.Stats.Encoded.Load(), EncoderHits: e.Stats.EncoderHits.Load(),
		ConnectionsOpen: e.Conns.count(), KVSubscribers: e.Publishers.subscriberCount(),
	}
	for _, r := range e.Ranks {
		r.Mu.Lock()
		used, pinned := r.Cache.Usage()
		s.BlocksTotal += len(r.Cache.Blocks)
		s.BlocksUsed += used
		s.BlocksPinned += pinned
		s.RequestsRunning += r.running
		s.RequestsWaiting += len(r.queue) + len(r.resume) + r.loading
		r.Mu.Unlock()
	}
	if p, ok := e.Proto.(bufferingProtocol); ok {
		held := p.HeldBlocks()
		s.BlocksPinned += held
		s.BlocksUsed += held
	}
	return s
}

// RankLoad is the current load of one rank.
type RankLoad struct {
	// Running hold a slot, waiting wait for blocks or a slot, loading wait for
	// a transfer, queued wait and have no blocks yet.
	Running, Waiting, Loading, Queued int
	// QueuedTokens are the tokens of queued prompts; UncachedTokens are those
	// of them that are not in the prefix cache.
	QueuedTokens, UncachedTokens int
	UsedTokens, TotalTokens      int // tokens of KV
}

func (r *Rank) Load() RankLoad {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	used := len(r.Cache.Blocks) - r.Cache.Free
	l := RankLoad{
		Running: r.running, Waiting: len(r.queue) + len(r.resume), Loading: r.loading, Queued: len(r.queue),
		UsedTokens: used * r.Cache.Size, TotalTokens: len(r.Cache.Blocks) * r.Cache.Size,
	}
	for _, w := range r.queue {
		l.QueuedTokens += len(w.s.Prompt)
		l.UncachedTokens += len(w.s.Prompt) - len(r.Cache.Match(w.s.CacheKey(), w.s.Prompt))*r.Cache.Size
	}
	return l
}

// HitRate returns the share of all prompt tokens that were in the prefix cache.
func (e *Engine) HitRate() float64 {
	prompt := e.Stats.promptTokens.Load()
	if prompt == 0 {
		return 0
	}
	return float64(e.Stats.cachedTokens.Load()-e.Stats.ExternalTokens.Load()) / float64(prompt)
}

// metrics answers GET /metrics with the gauges and counters that routers read,
// in vLLM's names.
func (e *Engine) metrics(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	gauge := func(name, more string, value func(l RankLoad) float64) {
		for _, r := range e.Ranks {
			fmt.Fprintf(&b, "vllm:%s{engine=\"%d\",model_name=%q%s} %v\n", name, r.Index, e.Cfg.Model, more, value(r.Load()))
		}
	}
	// This gauge comes from prometheus_client's ProcessCollector, which is in
	// the registry that vLLM exposes. Source: vLLM, v1/metrics/prometheus.py
	// get_prometheus_registry.
	fmt.Fprintf(&b, "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %.13e\n", float64(e.born.UnixNano())/1e9)
	head := func(name string) { fmt.Fprintf(&b, "# TYPE vllm:%s gauge\n", name) }
	head("num_requests_running")
	gauge("num_requests_running", "", func(l RankLoad) float64 { return float64(l.Running) })
	head("num_requests_waiting")
	gauge("num_requests_waiting", "", func(l RankLoad) float64 { return float64(l.Waiting + l.Loading) })
	head("num_requests_waiting_by_reason")
	gauge("num_requests_waiting_by_reason", `,reason="capacity"`, func(l RankLoad) float64 { return float64(l.Waiting) })
	gauge("num_requests_waiting_by_reason", `,reason="deferred"`, func(l RankLoad) float64 { return float64(l.Loading) })
	head("kv_cache_usage_perc")
	gauge("kv_cache_usage_perc", "", func(l RankLoad) float64 { return float64(l.UsedTokens) / float64(l.TotalTokens) })
	head("engine_sleep_state")
	for _, state := range sleepStates {
		value := e.Sleeper.gauge(state)
		gauge("engine_sleep_state", fmt.Sprintf(",sleep_state=%q", state), func(RankLoad) float64 { return float64(value) })
	}
	head("cache_config_info")
	for _, r := range e.Ranks {
		fmt.Fprintf(&b, "vllm:cache_config_info{block_size=\"%d\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"%d\",num_gpu_blocks=\"%d\"} 1\n",
			e.Cfg.BlockSize, r.Index, e.Cfg.KVBlocks)
	}
	e.appendInfo(&b)
	total := func(name string, v int64) {
		fmt.Fprintf(&b, "# TYPE vllm:%s counter\nvllm:%s{engine=\"0\",model_name=%q} %d\n", name, name, e.Cfg.Model, v)
	}
	total("prompt_tokens_total", e.Stats.promptTokens.Load())
	total("generation_tokens_total", e.Stats.OutputTokens.Load())
	total("prefix_cache_queries_total", e.Stats.promptTokens.Load())
	total("prefix_cache_hits_total", e.Stats.cachedTokens.Load()-e.Stats.ExternalTokens.Load())
	total("external_prefix_cache_hits_total", e.Stats.ExternalTokens.Load())
	switch e.Cfg.Connector { // the metrics of a connector exist only with --kv-transfer-config
	case ConnectorVLLMNixl, ConnectorVLLMNixlPush: // distributed/kv_transfer/kv_connector/v1/nixl/stats.py
		total("nixl_num_kv_expired_reqs_total", e.Stats.LeasesExpired.Load())
	case ConnectorVLLMMooncake: // kv_connector/v1/mooncake/stats.py
		total("mooncake_num_kv_expired_reqs_total", e.Stats.LeasesExpired.Load())
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.Write([]byte(b.String()))
}
