package quickstart

import (
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const sglangRelease = "0.5.23"

// sglangGuide is the quickstart of SGLang. Sources, in the Python package sglang 0.5.23:
// srt/arg_groups/fields/disagg.py, serving.py, model.py, parallel.py and observability.py
// (flags), srt/utils/network.py (SGLANG_HOST_IP), srt/observability/metrics_collector.py
// (metrics), srt/disaggregation/kv_events.py (members of --kv-events-config).
func sglangGuide() *guide {
	return &guide{
		name: config.ConnectorSGLang, connector: config.ConnectorSGLang, flow: "concurrent",
		title:   "SGLang",
		summary: "Both engines get the request at the same time, with a room number of the proxy. Decode finds prefill through prefill's bootstrap server, and prefill sends the KV to decode.",
		release: "SGLang " + sglangRelease,
		sources: []string{"python/sglang/srt/arg_groups/fields/", "python/sglang/srt/disaggregation/kv_events.py"},
		install: []string{"pip install sglang nixl"},
		model:   smallModel,
		example: "--mem-fraction-static 0.8",
		ran:     "SGLang's own argument parser accepts each command (tried by hand). " + notRun,
		setUp: func(p *Plan, e *Engine) {
			e.env("SGLANG_HOST_IP", e.Host)
			e.args("python3", "-m", "sglang.launch_server", "--model-path", p.Model, "--host", e.bind, "--port", e.Port)
			if p.tp > 1 {
				e.args("--tp-size", p.tp)
			}
			e.args("--disaggregation-mode", e.Role, "--disaggregation-transfer-backend", "nixl",
				"--enable-metrics", "--enable-cache-report")
			if e.Role != config.RolePrefill {
				return // decode has no prefix cache, so no events
			}
			e.args("--disaggregation-bootstrap-port", e.port(bootstrapPort), "--kv-events-config", object(
				"publisher", "zmq", "endpoint", fmt.Sprintf("tcp://*:%d", e.events()),
				"replay_endpoint", fmt.Sprintf("tcp://*:%d", e.events()+1), "topic", "kv"))
			e.key("bootstrap_port", e.port(bootstrapPort))
			e.key("kv_events", "tcp://"+e.address(e.events()))
			e.key("kv_replay", "tcp://"+e.address(e.events()+1))
		},
		evidence: evidence{
			role: config.RolePrefill, path: "/metrics", metric: "sglang:kv_transfer_total_mb_count",
			text: "The value is the number of transfers that prefill has made. `sglang:kv_transfer_total_mb_sum` is their size in MB.",
		},
		notes: []string{
			"With InfiniBand you can use `--disaggregation-transfer-backend mooncake` on all engines (`pip install mooncake-transfer-engine`).",
			"Data parallelism: add `--dp-size N --enable-dp-attention` to an engine. The proxy reads the number of ranks from the engine.",
		},
		mistakes: []mistake{
			{"The engines have different transfer backends, page sizes or KV types", "The proxy refuses such pairs and logs the reason. `GET /v1/pairs` of the admin address shows it as `refused`."},
			{"The endpoint of the KV events has no `*`", "SGLang binds `tcp://*:PORT`, but connects to `tcp://127.0.0.1:PORT`. The proxy then gets no events. The events contain token ids, so keep the port inside your network."},
			{"Decode cannot reach the bootstrap server", "The server listens on `--host` of prefill, whose default is `127.0.0.1`. Requests then wait 300 s. The server has no authentication, so keep its port inside your network."},
		},
	}
}
