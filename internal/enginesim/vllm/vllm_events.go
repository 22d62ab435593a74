package vllm

import (
	"net/http"
	"strconv"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// eventRoutes adds the route that lists the publishers of KV events. Releases before 0.32 lack it.
func (v *VLLM) eventRoutes(mux *http.ServeMux) {
	if v.minor() < 32 {
		return
	}
	mux.HandleFunc("GET /kv_event_sources", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, v.eventSources())
	})
}

// eventSources is get_kv_event_sources (v1/engine/core_client.py): the configuration of each rank's
// publisher, with the addresses of its sockets (distributed/kv_events.py, ZmqEventPublisher); {}
// without events.
func (v *VLLM) eventSources() core.Object {
	sources := core.Obj()
	for rank := range v.e.Cfg.Ranks {
		events, replay, ok := v.e.KVEventsAnnounced(rank)
		if !ok {
			break
		}
		var replays any
		if replay != "" {
			replays = replay
		}
		sources = sources.With(strconv.Itoa(rank), core.Obj(
			"enable_kv_cache_events", true, "publisher", "zmq", "endpoint", events, "replay_endpoint", replays,
			"buffer_steps", core.EventBuffer, "hwm", 100_000, "max_queue_size", 100_000, "topic", v.e.Cfg.KVEvents.Topic))
	}
	return sources
}
