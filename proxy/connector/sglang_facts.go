package connector

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// topologyPath is the path and query with which decode requests the data of the whole
// engine from prefill's bootstrap registry. Decode does this before it requests the data
// of a rank. Source, in SGLang: srt/disaggregation/common/conn.py
// try_ensure_parallel_info.
const topologyPath = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

// HealthPath is never the API's /health, which generates a token and takes a second.
// Prefill's registry runs in the engine's own process; other engines list their models.
func (sglang) HealthPath(role abi.Role) (path string, bootstrap bool) {
	if role == abi.RolePrefill {
		return healthPath, true
	}
	return modelsPath, false
}

func (sglang) FactPaths(abi.Role) []string { return []string{serverInfoPath, modelsPath} }

func (sglang) Tokenizes() tokens.Dialect { return tokens.SGLang }

// The load routes. Source, in SGLang: srt/entrypoints/v1_loads.py and http_server.py.
const (
	loadsPath      = "/v1/loads?include=core,disagg,queues,memory"
	coreLoadsPath  = "/v1/loads?include=core" // for an engine that lacks one of the sections
	legacyLoadPath = "/get_load"
)

func (sglang) Loads() []engine.LoadRoute {
	return []engine.LoadRoute{
		{Path: loadsPath, Form: engine.LoadSGLang},
		{Path: coreLoadsPath, Form: engine.LoadSGLang},
		{Path: legacyLoadPath, Form: engine.LoadSGLangLegacy},
		metricsRoute,
	}
}

// RegistryPath is queried on prefill: an engine is not ready before all of its ranks
// have registered.
func (sglang) RegistryPath(role abi.Role) string {
	if role == abi.RolePrefill {
		return topologyPath
	}
	return ""
}

// RegistryProbed: the health probe already queries the registry, and the epoch comes
// from the API.
func (sglang) RegistryProbed() bool { return false }

func (sglang) ReadFacts(f *engine.Facts, path string, status int, body []byte) error {
	// An older registry needs another query, and some registries are not reachable for
	// the proxy. The health probe checks a registry that is reachable.
	if path == topologyPath && (status == 0 || status == http.StatusBadRequest) {
		return nil
	}
	ok, err := served(path, status)
	switch {
	case !ok:
		return err
	case path == modelsPath:
		return readModels(f, body)
	}
	var o openai.Object
	if err := o.Parse(body); err != nil {
		return fmt.Errorf("read facts: %s: no JSON object", path)
	}
	if path == topologyPath {
		readTopology(f, &o)
		return nil
	}
	readServerInfo(f, &o)
	readScheduler(f, body)
	return nil
}

// readServerInfo copies the engine's arguments into f. Source:
// srt/entrypoints/http_server.py server_info.
func readServerInfo(f *engine.Facts, info *openai.Object) {
	f.Version = textOf(info, "version")
	f.DPSize = count(info, "dp_size")
	f.PPSize = count(info, "pp_size")
	f.CPSize = count(info, "attn_cp_size")
	f.TPSize = attentionTP(info)
	f.PageSize = count(info, "page_size")
	f.BootstrapPort = count(info, "disaggregation_bootstrap_port")
	if f.KVCacheType = textOf(info, "kv_cache_dtype"); f.KVCacheType == "auto" {
		f.KVCacheType = "" // the scheduler may have replaced it
	}
	mode := textOf(info, "disaggregation_mode")
	if mode == "prefill" || mode == "decode" {
		f.Transfer = textOf(info, "disaggregation_transfer_backend")
	}
	if times, _ := info.Get("startup_time"); isObject(times) { // the start-up duration of this process, in nanoseconds
		f.Epoch = string(times)
	}
	if events, _ := info.Get("kv_events"); isObject(events) {
		readPublisher(&f.KVEvents, events)
	}
	// An engine reports the method that "auto" resolved to; older engines report
	// "auto".
	balance := textOf(info, "load_balance_method")
	f.FollowsRoom = balance == "follow_bootstrap_room" || balance == "auto" && mode == "prefill"
}

// attentionTP returns the number of ranks over which a sequence's KV is spread: the
// tensor-parallel size, divided by attention's data- and context-parallel sizes.
func attentionTP(info *openai.Object) int {
	tp := count(info, "tp_size")
	if apart, _ := info.Get("enable_dp_attention"); string(apart) == "true" {
		tp /= max(1, count(info, "dp_size"))
	}
	return tp / max(1, count(info, "attn_cp_size"))
}

// readScheduler copies the values that the scheduler derived from its arguments. Decode
// compares these. Source: srt/managers/scheduler.py get_internal_state.
func readScheduler(f *engine.Facts, body []byte) {
	state, ok, err := openai.Lookup(body, "internal_states", "0")
	var o openai.Object
	if err != nil || !ok || o.Parse(state) != nil {
		return
	}
	if n := count(&o, "page_size"); n > 0 {
		f.PageSize = n
	}
	if t := textOf(&o, "kv_cache_dtype"); t != "" {
		f.KVCacheType = t
	}
}

// readTopology copies the values that decode will receive about a prefill engine. The
// registry has them when all of its ranks have registered. Source:
// srt/disaggregation/common/conn.py PrefillServerInfo.
func readTopology(f *engine.Facts, o *openai.Object) {
	f.DPSize = count(o, "dp_size")
	f.TPSize, f.CPSize, f.PPSize = count(o, "attn_tp_size"), count(o, "attn_cp_size"), count(o, "pp_size")
	if n := count(o, "page_size"); n > 0 {
		f.PageSize = n
	}
	if t := textOf(o, "kv_cache_dtype"); t != "" {
		f.KVCacheType = t
	}
	follows, _ := o.Get("follow_bootstrap_room")
	f.FollowsRoom = string(follows) == "true"
}

// readPublisher copies the engine's announcement of KV events and loads. Each rank has the next higher ports.
// Source: srt/runtime_context.py describe_kv_events_publisher.
func readPublisher(p *engine.KVPublisher, announced []byte) {
	*p = engine.KVPublisher{}
	var o openai.Object
	if o.Parse(announced) != nil || textOf(&o, "publisher") != "zmq" {
		return
	}
	host := strings.Trim(textOf(&o, "endpoint_host"), "[]")
	endpoint := func(base string, rank int) string {
		port := count(&o, base)
		if port == 0 {
			return ""
		}
		return engine.KVEndpoint("tcp://" + net.JoinHostPort(host, strconv.Itoa(port+rank)))
	}
	p.BlockTokens = count(&o, "block_size")
	for rank := range min(max(1, count(&o, "dp_size")), engine.MaxKVRanks) {
		e := engine.KVEndpoints{Events: endpoint("endpoint_port_base", rank), Replay: endpoint("replay_endpoint_port_base", rank), Loads: endpoint("load_endpoint_port_base", rank)}
		if e.Events == "" {
			break
		}
		p.Ranks = append(p.Ranks, e)
	}
}

// KeepsPorts: decode drops the ports of a prefill process only after two failed heartbeats in a row
// (10 s). Newer releases also drop them when their wait for the KV has timed out, but only after 300 s,
// and an abort by the proxy drops nothing. libzmq loses a message to the port of an ended process
// without an error. Source: srt/disaggregation/common/conn.py _setup_bootstrap_infos,
// _start_heartbeat_checker_thread, _check_waiting_timeout and abort.
func (sglang) KeepsPorts() {}

// BothPairs: an engine of role both was started without disaggregation. It has no
// bootstrap server, and would answer a decode leg by computing the whole prompt.
func (sglang) BothPairs() bool { return false }

// Compatible rejects pairs that decode would reject at the first request, in most cases
// with a crash of its scheduler. Unknown values exclude nothing. Source:
// srt/disaggregation/common/conn.py try_ensure_parallel_info and _resolve_rank_mapping.
func (sglang) Compatible(p, d *engine.Facts) error {
	differ := func(a, b int) bool { return a != 0 && b != 0 && a != b }
	switch {
	case differ(p.PageSize, d.PageSize):
		return fmt.Errorf("page sizes differ: prefill %d, decode %d", p.PageSize, d.PageSize)
	case p.KVCacheType != "" && d.KVCacheType != "" && p.KVCacheType != d.KVCacheType:
		return fmt.Errorf("KV cache types differ: prefill %s, decode %s", p.KVCacheType, d.KVCacheType)
	case !sameTransfer(p.Transfer, d.Transfer):
		return fmt.Errorf("transfer backends differ: prefill %s, decode %s", p.Transfer, d.Transfer)
	case differ(p.PPSize, d.PPSize) && d.PPSize != 1:
		return fmt.Errorf("decode's pipeline parallelism of %d is neither prefill's %d nor 1", d.PPSize, p.PPSize)
	case d.CPSize > 1:
		return fmt.Errorf("decode has context parallelism of %d, which no prefill can serve", d.CPSize)
	case differ(p.TPSize, d.TPSize) && max(p.TPSize, d.TPSize)%min(p.TPSize, d.TPSize) != 0:
		return fmt.Errorf("ranks do not map: attention is spread over %d of prefill and %d of decode", p.TPSize, d.TPSize)
	}
	return nil
}

// sameTransfer reports whether two backends can transfer KV to each other. A decode
// engine with the backend fake receives none.
func sameTransfer(prefill, decode string) bool {
	const tcp = "mooncake_tcp" // mooncake over TCP
	if prefill == tcp {
		prefill = "mooncake"
	}
	if decode == tcp {
		decode = "mooncake"
	}
	return prefill == "" || decode == "" || prefill == decode || decode == "fake"
}
