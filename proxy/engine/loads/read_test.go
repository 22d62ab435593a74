package loads

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// vllmMetrics is an answer of vLLM's V1 engine with two data-parallel ranks. Most
// metric families are left out.
const vllmMetrics = `# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 146351.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B"} 3.0
vllm:num_requests_running{engine="1",model_name="meta-llama/Llama-3.1-8B"} 5.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B"} 2.0
vllm:num_requests_waiting{engine="1",model_name="meta-llama/Llama-3.1-8B"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="meta-llama/Llama-3.1-8B",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="meta-llama/Llama-3.1-8B",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="meta-llama/Llama-3.1-8B"} 0.5
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="meta-llama/Llama-3.1-8B"} 12345.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="meta-llama/Llama-3.1-8B"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="meta-llama/Llama-3.1-8B"} 773.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.82",mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="573",num_gpu_blocks_override="None",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",enable_prefix_caching="True",engine="1",gpu_memory_utilization="0.82",mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="573",num_gpu_blocks_override="None",sliding_window="None"} 1.0
`

// loraMetrics is a part of an answer of vLLM with LoRA adapters. Earlier combinations of
// adapters stay in it.
const loraMetrics = `vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} 1.789828498802105e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,chat",waiting_lora_adapters="law"} 1.789828499702105e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.789828497702105e+09
`

// sleeps returns vLLM's samples of an engine's sleep.
func sleeps(engine, model string, awake, offloaded int) string {
	const name = "vllm:engine_sleep_state"
	return fmt.Sprintf(`# TYPE %s gauge
%[1]s{engine="%s",model_name="%s",sleep_state="awake"} %d.0
%[1]s{engine="%[2]s",model_name="%[3]s",sleep_state="weights_offloaded"} %[5]d.0
%[1]s{engine="%[2]s",model_name="%[3]s",sleep_state="discard_all"} 0.0
`, name, engine, model, awake, offloaded)
}

func rank(n int, r load.Report) Rank { return Rank{Rank: n, Report: r} }

func TestReadMetrics(t *testing.T) {
	tests := []struct {
		name, body string
		want       Answer
	}{
		{"vllm, two ranks", vllmMetrics, Answer{BlockTokens: 16, Ranks: []Rank{
			rank(0, load.Report{Running: 3, Waiting: 2, Tokens: 2292, Capacity: 9168, Queued: -1, Usage: 0.25}),
			rank(1, load.Report{Running: 5, Tokens: 4584, Capacity: 9168, Queued: -1, Usage: 0.5}),
		}}},
		{"vllm, one of two ranks sleeps", vllmMetrics + sleeps("0", "1", 0, 1) + sleeps("1", "1", 1, 0), Answer{BlockTokens: 16, Ranks: []Rank{
			{Rank: 0, Sleep: Asleep, Report: load.Report{Running: 3, Waiting: 2, Tokens: 2292, Capacity: 9168, Queued: -1, Usage: 0.25}},
			{Rank: 1, Sleep: Awake, Report: load.Report{Running: 5, Tokens: 4584, Capacity: 9168, Queued: -1, Usage: 0.5}},
		}}},
		{"vllm, sleep without weights", `vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:num_requests_running{engine="0"} 1
`, Answer{Ranks: []Rank{{Sleep: Discarded, Report: load.Report{Running: 1, Queued: -1}}}}},
		{"vllm, sleep without the state awake", `vllm:num_requests_running{engine="0"} 1
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0
`, Answer{Ranks: []Rank{rank(0, load.Report{Running: 1, Queued: -1})}}},
		{"vllm, V0", `vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:gpu_cache_usage_perc{model_name="m"} 0.125
vllm:cache_config_info{block_size="32",num_gpu_blocks="None"} 1.0
`, Answer{BlockTokens: 32, Ranks: []Rank{rank(Whole, load.Report{Running: 1, Queued: -1, Usage: 0.125})}}},
		{"vllm, several kinds of blocks",
			`vllm:num_requests_running{engine="0"} 1
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{block_size="4",engine="0",kv_cache_size_tokens="1000",num_gpu_blocks="2000"} 1`,
			Answer{BlockTokens: 4, Ranks: []Rank{rank(0, load.Report{Running: 1, Tokens: 500, Capacity: 1000, Queued: -1, Usage: 0.5})}}},
		{"quotes, times, spaces, ends of line of another system",
			"vllm:num_requests_running{model_name=\"a \\\"b\\\\\\\" } 9,engine=\\\"7\\\"\",engine=\"2\"} 4 1712345678\r\nvllm:num_requests_waiting{ engine=\"2\" , }\t1\r\n",
			Answer{Ranks: []Rank{rank(2, load.Report{Running: 4, Waiting: 1, Queued: -1})}}},
		{"a text that is no number", `vllm:num_requests_running{engine="0"} NaN
vllm:num_requests_running{engine="0"} +Inf
vllm:num_requests_running{engine="0"} many
vllm:num_requests_running{engine="0"
vllm:num_requests_running{engine="0} 7
vllm:num_requests_running
vllm:num_requests_running{engine="0"}
vllm:num_requests_waiting{engine="0"} -4
vllm:kv_cache_usage_perc{engine="0"} 17
vllm:num_requests_running{engine="99999999"} 1
`, Answer{Ranks: []Rank{rank(0, load.Report{Queued: -1, Usage: 1})}}},
		{"sglang", `# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_queue_reqs{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.75
sglang:num_used_tokens{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 300.0
`, Answer{Ranks: []Rank{
			rank(0, load.Report{Running: 3, Queued: -1}),
			rank(1, load.Report{Running: 4, Waiting: 2, Tokens: 300, Queued: -1, Usage: 0.75}),
		}}},
		{"adapters: the newest sample counts", loraMetrics, Answer{Ranks: []Rank{
			rank(0, load.Report{Running: 3, Waiting: 1, Queued: -1, Adapters: load.NewAdapters("sql,chat", "law", 2)}),
		}}},
		{"adapters, old names of ranks", `vllm:num_requests_running 1
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e9
`, Answer{Ranks: []Rank{rank(Whole, load.Report{Running: 1, Queued: -1, Adapters: load.NewAdapters("", "", 4)})}}},
		{"adapters of one of several ranks", vllmMetrics + loraMetrics[strings.Index(loraMetrics, "vllm:lora"):], Answer{BlockTokens: 16, Ranks: []Rank{
			rank(0, load.Report{Running: 3, Waiting: 2, Tokens: 2292, Capacity: 9168, Queued: -1, Usage: 0.25}),
			rank(1, load.Report{Running: 5, Tokens: 4584, Capacity: 9168, Queued: -1, Usage: 0.5}),
		}}},
		{"adapters of several API servers", `vllm:num_requests_running{engine="0"} 1
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 1.7e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 3.5e9
`, Answer{Ranks: []Rank{rank(0, load.Report{Running: 1, Queued: -1})}}},
		{"adapters without a limit, or unreadable", `vllm:num_requests_running{engine="0"} 1
vllm:lora_requests_info{max_lora="-3",running_lora_adapters="a",waiting_lora_adapters=""} 1.7e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a} 1.8e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a"} NaN
`, Answer{Ranks: []Rank{rank(0, load.Report{Running: 1, Queued: -1})}}},
		// The time for lists of this length would be days, if each name were compared with each.
		{"adapters in endless lists", `vllm:num_requests_running{engine="0"} 1
vllm:lora_requests_info{max_lora="4",running_lora_adapters="` + strings.Repeat("a,", 1<<20) + `",waiting_lora_adapters="` + strings.Repeat("b,", 1<<20) + `"} 1.7e9
`, Answer{Ranks: []Rank{rank(0, load.Report{Running: 1, Queued: -1})}}},
		{"a list is TensorRT-LLM's", " \n" + trtllmOld, trtllmOldAnswer()},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ReadMetrics([]byte(tt.body))
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %+v, %v\nwant %+v", got, err, tt.want)
			}
		})
	}
	for _, silent := range []string{"", "\n\n", "# nothing\nprocess_cpu_seconds_total 1\n", "<html>404</html>",
		`vllm:cache_config_info{block_size="16"} 1`} {
		if _, err := ReadMetrics([]byte(silent)); !errors.Is(err, errNoLoad) {
			t.Errorf("%q: ReadMetrics([]byte(silent)) = %v, want %v", silent, err, errNoLoad)
		}
	}
}

func TestReadSGLang(t *testing.T) {
	const loads = `{"timestamp":"2026-08-22T12:00:00+00:00","version":"0.5.x","accelerator":"...","num_accelerators":8,
 "loads":[{"timestamp":0.0,"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,
   "num_waiting_uncached_tokens":2048,"num_used_tokens":9000,"num_total_tokens":11048,"num_active_tokens":11048,
   "max_total_num_tokens":400000,"max_running_requests":256,"token_usage":0.02,"gen_throughput":900.0,
   "cache_hit_rate":0.4,"utilization":0.1,"total_prefill_uncached_tokens":0,"total_prefill_busy_us":0,"decode_moments":null,
   "disaggregation":{"mode":"prefill","prefill_bootstrap_queue_reqs":0},"queues":{"waiting":1}},
  {"dp_rank":5,"num_running_reqs":1,"num_used_tokens":10,"max_total_num_tokens":400000,"token_usage":0.5}]}`
	got, err := ReadSGLang([]byte(loads))
	want := Answer{Ranks: []Rank{
		rank(0, load.Report{Running: 3, Waiting: 1, Tokens: 11048, Capacity: 400000, Queued: 2048, Usage: 0.02}),
		rank(5, load.Report{Running: 1, Tokens: 10, Capacity: 400000, Queued: -1, Usage: 0.5}),
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}
	got, err = ReadSGLang([]byte(`{"loads":[7,{"dp_rank":-1},{"dp_rank":"x"},{"dp_rank":5000},{"dp_rank":null,"num_running_reqs":"3","num_waiting_reqs":1e300,"token_usage":-1}]}`))
	want = Answer{Ranks: []Rank{rank(Whole, load.Report{Waiting: 1 << 18, Queued: -1})}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}

	const disagg = `{"loads":[
  {"dp_rank":0,"token_usage":0.75,"disaggregation":{"mode":"decode","decode_prealloc_queue_reqs":3,"decode_retracted_queue_reqs":0},"queues":{"prealloc_ready":0}},
  {"dp_rank":1,"token_usage":0.75,"disaggregation":{"mode":"decode","decode_prealloc_queue_reqs":3},"queues":{"prealloc_ready":2}},
  {"dp_rank":2,"token_usage":0.75,"disaggregation":{"mode":"decode","decode_retracted_queue_reqs":1}},
  {"dp_rank":3,"disaggregation":{"mode":"prefill","kv_transfer_speed_gb_s":20,"kv_transfer_latency_ms":50},"memory":{"kv_cache_gb":40,"token_capacity":400000}},
  {"dp_rank":4,"disaggregation":{"mode":"prefill","kv_transfer_speed_gb_s":20,"kv_transfer_latency_ms":50},"memory":{"kv_cache_gb":0,"token_capacity":400000}},
  {"dp_rank":5,"disaggregation":null,"queues":[],"memory":7}]}`
	got, err = ReadSGLang([]byte(disagg))
	moved := rank(3, load.Report{Queued: -1})
	moved.Moved, moved.MovedIn = 10000, 50*time.Millisecond
	want = Answer{Ranks: []Rank{
		rank(0, load.Report{Queued: -1, Usage: 0.75}), rank(1, load.Report{Queued: -1, Usage: 1}), rank(2, load.Report{Queued: -1, Usage: 1}),
		moved, rank(4, load.Report{Queued: -1}), rank(5, load.Report{Queued: -1}),
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}

	got, err = ReadSGLangLegacy([]byte(`[{"dp_rank":0,"num_reqs":7,"num_waiting_reqs":2,"num_tokens":900,"num_pending_tokens":100,"ts_tic":1.5},
		{"dp_rank":1,"num_reqs":1,"num_waiting_reqs":0,"num_tokens":30}]`))
	want = Answer{Ranks: []Rank{
		rank(0, load.Report{Running: 5, Waiting: 2, Tokens: 900, Queued: 100}),
		rank(1, load.Report{Running: 1, Tokens: 30, Queued: -1}),
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}

	for _, body := range []string{`{}`, `{"loads":[]}`} {
		if _, err := ReadSGLang([]byte(body)); !errors.Is(err, errNoLoad) {
			t.Errorf("%s: ReadSGLang([]byte(body)) = %v, want %v", body, err, errNoLoad)
		}
	}
	for _, body := range []string{``, `SECRET`, `{"loads":{}}`, `[]`} {
		if _, err := ReadSGLang([]byte(body)); err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: ReadSGLang([]byte(body)) = %v", body, err)
		}
	}
}

// trtllmOld is an answer of a worker without attention data parallelism.
const trtllmOld = `[{"cpuMemUsage":3492,"gpuMemUsage":25330607135,"inflightBatchingStats":{"avgNumDecodedTokensPerIter":0.0,"microBatchId":0,
"numContextRequests":1,"numCtxTokens":16000,"numGenRequests":0,"numPausedRequests":0,"numScheduledRequests":1},"iter":0,"iterLatencyMS":0.0,
"kvCacheStats":{"allocNewBlocks":250,"allocTotalBlocks":250,"cacheHitRate":0.0,"freeNumBlocks":1745,"maxNumBlocks":7240,"missedBlocks":0,
"reusedBlocks":0,"tokensPerBlock":64,"usedNumBlocks":5495},"maxNumActiveRequests":16,"numActiveRequests":1,"numCompletedRequests":0,
"numQueuedRequests":7,"staticBatchingStats":null,"timestamp":"04-07-2025 20:33:17.747028"},
{"iter":1,"iterLatencyMS":2104.673455,"numActiveRequests":2,"numQueuedRequests":6,
"inflightBatchingStats":{"numContextRequests":1,"numGenRequests":1,"numScheduledRequests":2},
"kvCacheStats":{"freeNumBlocks":1810,"maxNumBlocks":7240,"tokensPerBlock":64,"usedNumBlocks":5430}}]`

func trtllmOldAnswer() Answer {
	return Answer{BlockTokens: 64, Ranks: []Rank{rank(Whole, load.Report{
		Running: 2, Waiting: 6, Tokens: 5430 * 64, Capacity: 7240 * 64, Queued: -1, Usage: 0.75})}}
}

func TestReadTRTLLM(t *testing.T) {
	// Rank 0 reports the queue of all ranks. Every row contains the active requests
	// and blocks of rank 0.
	const parallel = `[
{"iter":16,"attentionDpRank":0,"numActiveRequests":900,"numQueuedRequests":1,"inflightBatchingStats":{}},
{"iter":17,"attentionDpRank":0,"numActiveRequests":40,"numQueuedRequests":9,"kvCacheStats":{"usedNumBlocks":10,"maxNumBlocks":100,"tokensPerBlock":32},
 "inflightBatchingStats":{"numScheduledRequests":4,"numPausedRequests":1,"numQueuedContextRequests":9,"numQueuedCtxTokens":1001}},
{"iter":17,"attentionDpRank":1,"numActiveRequests":40,"numQueuedRequests":0,"kvCacheStats":{"usedNumBlocks":10,"maxNumBlocks":100,"tokensPerBlock":32},
 "inflightBatchingStats":{"numScheduledRequests":2,"numPausedRequests":0,"numQueuedContextRequests":0,"numQueuedCtxTokens":0}}]`
	tests := []struct {
		name, body string
		want       Answer
	}{
		{"one rank, not named", trtllmOld, trtllmOldAnswer()},
		{"one rank", `[{"attentionDpRank":0,"numActiveRequests":3,"numQueuedRequests":2,"kvCacheStats":null,"inflightBatchingStats":{"numQueuedCtxTokens":512}}]`,
			Answer{Ranks: []Rank{rank(0, load.Report{Running: 3, Waiting: 2, Queued: 512})}}},
		{"attention data parallelism", parallel, Answer{BlockTokens: 32, Ranks: []Rank{
			rank(0, load.Report{Running: 5, Waiting: 5, Tokens: 320, Capacity: 3200, Queued: 501, Usage: 0.1}),
			rank(1, load.Report{Running: 2, Waiting: 4, Tokens: 320, Capacity: 3200, Queued: 500, Usage: 0.1}),
		}}},
		{"nothing since", `[]`, Answer{}},
		{"odd rows", `[3,null,{"attentionDpRank":"x","numActiveRequests":true,"kvCacheStats":[],"inflightBatchingStats":7},{"attentionDpRank":1e9}]`,
			Answer{Ranks: []Rank{rank(0, load.Report{Queued: -1})}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ReadTRTLLM([]byte(tt.body))
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %+v, %v\nwant %+v", got, err, tt.want)
			}
		})
	}
	for _, body := range []string{``, `{}`, `SECRET`, `# HELP trtllm_request_success_total`} {
		if _, err := ReadTRTLLM([]byte(body)); err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: ReadTRTLLM([]byte(body)) = %v", body, err)
		}
	}
}

func TestSumAndShare(t *testing.T) {
	ranks := []Rank{
		rank(0, load.Report{Running: 3, Waiting: 1, Tokens: 10, Capacity: 100, Queued: 7, Usage: 0.5}),
		rank(1, load.Report{Running: 4, Tokens: 20, Capacity: 100, Queued: 8, Usage: 1}),
	}
	if got, want := sum(ranks), (load.Report{Running: 7, Waiting: 1, Tokens: 30, Capacity: 200, Queued: 15, Usage: 0.75}); got != want {
		t.Errorf("sum %+v, want %+v", got, want)
	}
	ranks[0].Queued = -1
	if got := sum(ranks).Queued; got != -1 {
		t.Errorf("got %d queued, with two ranks of which one does not report", got)
	}
	var total load.Report
	for n := range 3 {
		part := rank(Whole, load.Report{Running: 7, Waiting: 2, Tokens: 100, Capacity: 1000, Queued: 5, Usage: 0.5}).share(n, 3)
		total.Running += part.Running
		total.Waiting += part.Waiting
		total.Tokens += part.Tokens
		total.Capacity += part.Capacity
		total.Queued += part.Queued
		if part.Usage != 0.5 || part.Running < 2 || part.Running > 3 {
			t.Errorf("part %d: %+v", n, part)
		}
	}
	if want := (load.Report{Running: 7, Waiting: 2, Tokens: 100, Capacity: 1000, Queued: 5}); total != want {
		t.Errorf("the parts are %+v, want %+v", total, want)
	}
}

// sound checks the rules that hold for every answer, for any input.
func sound(t *testing.T, a Answer) {
	t.Helper()
	seen := make(map[int]bool)
	check := func(r load.Report) {
		u := float64(r.Usage)
		if r.Running < 0 || r.Waiting < 0 || r.Tokens < 0 || r.Capacity < 0 || r.Queued < -1 || !(u >= 0 && u <= 1.001) || math.IsNaN(u) {
			t.Errorf("%+v", r)
		}
	}
	for _, r := range a.Ranks {
		if r.Rank < Whole || r.Rank >= maxRanks || seen[r.Rank] {
			t.Errorf("rank %d", r.Rank)
		}
		seen[r.Rank] = true
		check(r.Report)
		check(r.share(1, 3))
	}
	if len(a.Ranks) > 0 {
		check(sum(a.Ranks))
	}
	if a.BlockTokens < 0 {
		t.Errorf("%d tokens per block", a.BlockTokens)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(vllmMetrics))
	f.Add([]byte(loraMetrics))
	f.Add([]byte(`vllm:num_requests_running{a="\"} 1` + "\nvllm:kv_cache_usage_perc{engine=\"0\"} 1e400\nsglang:token_usage 0x1p-2\n"))
	f.Add([]byte(`{"loads":[{"dp_rank":0,"num_running_reqs":3,"token_usage":0.02}]}`))
	f.Add([]byte(`[{"dp_rank":3,"num_reqs":1e308,"num_waiting_reqs":-1e308}]`))
	f.Add([]byte(trtllmOld))
	f.Add([]byte(`[{"attentionDpRank":4095,"kvCacheStats":{"usedNumBlocks":1e308,"maxNumBlocks":-1,"tokensPerBlock":1e308}}]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, read := range []func([]byte) (Answer, error){ReadMetrics, ReadSGLang, ReadSGLangLegacy, ReadTRTLLM} {
			a, err := read(body)
			if err != nil && len(a.Ranks) > 0 {
				t.Errorf("an answer and an error: %v", err)
			}
			sound(t, a)
		}
	})
}

func BenchmarkReadMetrics(b *testing.B) {
	// The size of an answer of an engine with about a dozen histograms.
	body := []byte(vllmMetrics + strings.Repeat("vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"0.001\",model_name=\"meta-llama/Llama-3.1-8B\"} 0.0\n", 2000))
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := ReadMetrics(body); err != nil {
			b.Fatal(err)
		}
	}
}
