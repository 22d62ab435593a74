package quickstart

import (
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const trtllmRelease = "1.3.0rc27"

// trtllmGuide is the quickstart of TensorRT-LLM with the context first. Sources, in
// NVIDIA/TensorRT-LLM: tensorrt_llm/commands/serve.py, commit 00209af1 (flags);
// tensorrt_llm/llmapi/llm_args.py, commit 00043967, and its reference for release
// 1.3.0rc27, the pages CacheTransceiverConfig and KvCacheConfig (keys of the YAML files);
// tensorrt_llm/metrics/collector.py, commit 050f80de (metrics).
func trtllmGuide() *guide {
	return &guide{
		name: config.ConnectorTRTLLM, connector: config.ConnectorTRTLLM, flow: "prefill_first",
		title:   "TensorRT-LLM, context first",
		summary: "Prefill (context) computes the prompt. Its answer names the KV, and decode (generation) fetches it.",
		release: "TensorRT-LLM " + trtllmRelease,
		sources: []string{"tensorrt_llm/commands/serve.py, commit 00209af1", "tensorrt_llm/llmapi/llm_args.py, commit 00043967", "the reference of release " + trtllmRelease + " for CacheTransceiverConfig and KvCacheConfig"},
		install: []string{"pip install tensorrt_llm # or NVIDIA's container of the release " + trtllmRelease},
		model:   smallModel,
		example: "--max_batch_size 64",
		ran:     notRun,
		setUp:   trtllmServe,
		extra:   func(p *Plan) { p.trtllmFiles("") },
		evidence: evidence{
			role: config.RoleDecode, path: "/prometheus/metrics", metric: "trtllm_request_success_total",
			text: "The value is the number of requests that decode has answered. TensorRT-LLM has no metric for transfers, but a generation engine cannot answer the second leg of a request without the KV of the first.",
		},
		notes: []string{
			"`max_tokens_in_buffer` must be at least the length of the longest prompt.",
			"Keep `tokens_per_block` of `kv_cache_config` equal on all engines.",
		},
		mistakes: []mistake{
			{"`cache_transceiver_config.backend` is missing", "The engine starts and passes `/health`, but refuses the requests: \"Disaggregated serving is not enabled, please check the configuration\"."},
			{"`disable_overlap_scheduler: true` is missing in `ctx.yaml`", "Context engines do not support the overlap scheduler."},
			{"A second program polls the KV events", "Each event goes to one caller only. Let only one proxy, or one fleet of pdproxy, use `kv_events = \"poll\"`."},
		},
	}
}

// generationFirstGuide is the variant in which generation gets the request first.
func generationFirstGuide() *guide {
	g := trtllmGuide()
	g.name, g.flow = "trtllm-generation-first", "decode_first"
	g.title = "TensorRT-LLM, generation first"
	g.summary = "Both engines get the request at the same time. Decode (generation) waits for the KV, and prefill (context) sends it as soon as it is computed."
	g.extra = func(p *Plan) {
		p.trtllmFiles("  transceiver_runtime: PYTHON # publishes the address that generation needs first\n")
		p.top = []string{"[trtllm]", `schedule_style = "generation_first"`}
	}
	g.notes = append(g.notes, "Generation first needs the Python transceiver. If prefill publishes no address (`/server_info`), the proxy uses the order of `trtllm` for this engine.")
	return g
}

func trtllmServe(p *Plan, e *Engine) {
	file := "gen.yaml"
	if e.Role == config.RolePrefill {
		file = "ctx.yaml"
		e.key("kv_events", "poll")
	}
	e.args("trtllm-serve", p.Model, "--host", e.bind, "--port", e.Port, "--config", file)
	if p.tp > 1 {
		e.args("--tp_size", p.tp)
	}
}

// trtllmFiles adds the files that --config names. transceiver holds further lines of
// cache_transceiver_config.
func (p *Plan) trtllmFiles(transceiver string) {
	shared := fmt.Sprintf(`cache_transceiver_config:
  backend: NIXL
  max_tokens_in_buffer: 8192
%sreturn_perf_metrics: true # serves /prometheus/metrics
`, transceiver)
	p.Files = append(p.Files,
		File{"ctx.yaml", "# for prefill\ndisable_overlap_scheduler: true\n" + shared + `kv_cache_config:
  enable_block_reuse: true
  event_buffer_max_size: 65536 # KV events for the proxy
`},
		File{"gen.yaml", "# for decode\n" + shared})
}
