package connector

import (
	"maps"
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// eventSourcesPath lists the publishers of a vLLM engine's KV events, since vLLM 0.32. Engines that
// publish none answer {}.
const eventSourcesPath = "/kv_event_sources"

// readEventSources copies the addresses of the publishers: {"<dp rank>": {"enable_kv_cache_events",
// "publisher", "endpoint", "replay_endpoint", …}}. The API of a node with hybrid load balancing names
// its ranks by their numbers in the whole deployment, and serves requests for them as 0, 1, …
//
// An endpoint is as configured, with the rank's own port, or is the node's address with the port
// that "tcp://*:0" got. An unreadable list counts as none, because the engine serves requests
// without it. If the engine has not answered, f keeps the earlier list. Source: vLLM entrypoints/serve/instrumentator/basic.py kv_event_sources,
// config/kv_events.py, distributed/kv_events.py ZmqEventPublisher.
func readEventSources(f *engine.Facts, status int, body []byte) {
	if status == 0 || status/100 == 5 {
		return
	}
	f.KVEvents.Ranks = nil
	var sources openai.Object
	if status/100 != 2 || sources.Parse(body) != nil || sources.Len() > engine.MaxKVRanks {
		return
	}
	ranks := make(map[int]engine.KVEndpoints, sources.Len())
	for key, value := range sources.Members {
		rank, err := strconv.ParseUint(key, 10, 31)
		var source openai.Object
		if err != nil || source.Parse(value) != nil {
			return
		}
		if on, _ := source.Get("enable_kv_cache_events"); string(on) == "true" && textOf(&source, "publisher") == "zmq" {
			ranks[int(rank)] = engine.KVEndpoints{
				Events: engine.KVEndpoint(textOf(&source, "endpoint")), Replay: engine.KVEndpoint(textOf(&source, "replay_endpoint")),
			}
		}
	}
	list := make([]engine.KVEndpoints, 0, len(ranks))
	for _, rank := range slices.Sorted(maps.Keys(ranks)) {
		list = append(list, ranks[rank])
	}
	if slices.ContainsFunc(list, func(e engine.KVEndpoints) bool { return e.Events != "" }) {
		f.KVEvents.Ranks = list
	}
}
