package enginesim

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestLoads: one request runs and one waits, and half of the waiting one's
// prompt is cached. Every engine's own load endpoint reports that.
func TestLoads(t *testing.T) {
	tests := []struct {
		connector string
		check     func(t *testing.T, e *Engine)
	}{
		{ConnectorVLLMNixl, func(t *testing.T, e *Engine) {
			metrics := string(get(t, e.URL()+"/metrics").body)
			for _, line := range []string{
				`vllm:num_requests_running{engine="0",model_name="sim"} 1`,
				`vllm:num_requests_waiting{engine="0",model_name="sim"} 1`,
				`vllm:num_requests_waiting_by_reason{engine="0",model_name="sim",reason="capacity"} 1`,
				`vllm:num_requests_waiting_by_reason{engine="0",model_name="sim",reason="deferred"} 0`,
				`vllm:kv_cache_usage_perc{engine="0",model_name="sim"} 0.0625`,
				`vllm:cache_config_info{block_size="8",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="64"} 1`,
			} {
				if !strings.Contains(metrics, "\n"+line+"\n") {
					t.Errorf("no %s in\n%s", line, metrics)
				}
			}
		}},
		{ConnectorSGLang, func(t *testing.T, e *Engine) {
			loads, legacy := get(t, e.URL()+"/v1/loads"), get(t, e.URL()+"/get_load")
			for name, want := range map[string]string{
				"num_running_reqs": "1", "num_waiting_reqs": "1", "num_waiting_uncached_tokens": "16", "num_used_tokens": "32",
				"num_total_tokens": "64", "max_total_num_tokens": "512", "token_usage": "0.0625",
			} {
				if got := loads.field(t, "loads", 0, name); fmt.Sprint(got) != want {
					t.Errorf("%s is %v, want %s", name, got, want)
				}
			}
			for name, want := range map[string]string{"num_reqs": "2", "num_waiting_reqs": "1", "num_tokens": "64", "num_pending_tokens": "32"} {
				if got := legacy.field(t, 0, name); fmt.Sprint(got) != want {
					t.Errorf("get_load: %s is %v, want %s", name, got, want)
				}
			}
			if metrics := string(get(t, e.URL()+"/metrics").body); !strings.Contains(metrics, "\n"+`sglang:num_used_tokens{dp_rank="0",model_name="sim"} 32`+"\n") {
				t.Errorf("metrics %s", metrics)
			}
		}},
		{ConnectorTRTLLM, func(t *testing.T, e *Engine) {
			rows := get(t, e.URL()+"/metrics")
			for _, row := range []struct {
				path []any
				want string
			}{
				{[]any{"numActiveRequests"}, "1"}, {[]any{"numQueuedRequests"}, "1"}, {[]any{"attentionDpRank"}, "0"},
				{[]any{"kvCacheStats", "usedNumBlocks"}, "4"}, {[]any{"kvCacheStats", "maxNumBlocks"}, "64"}, {[]any{"kvCacheStats", "tokensPerBlock"}, "8"},
				{[]any{"inflightBatchingStats", "numScheduledRequests"}, "1"}, {[]any{"inflightBatchingStats", "numQueuedCtxTokens"}, "16"},
			} {
				if got := rows.field(t, append([]any{0}, row.path...)...); got != json.Number(row.want) {
					t.Errorf("%v: got %v, want %s", row.path, got, row.want)
				}
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.connector, func(t *testing.T) {
			e := startEngine(t, Config{Connector: tt.connector, BlockSize: 8, KVBlocks: 64, MaxRunning: 1, TRTLLM: TRTLLMConfig{DisconnectPoll: 1}})
			// The first request's 24 prompt tokens and 8 answer tokens take 4
			// blocks.
			e.SetFault("", 0, "decode")
			for i, prompt := range []string{words(1, 24), words(1, 16) + words(2, 16)} {
				answered, leave := postAside(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":9`))
				defer func() { leave(); <-answered }()
				eventually(t, "the request", func() bool { s := e.State(); return s.RequestsRunning+s.RequestsWaiting == i+1 })
				if i == 0 { // the first prompt must be computed before the second request arrives
					eventually(t, "its blocks", func() bool {
						r := e.Ranks[0]
						r.Mu.Lock()
						defer r.Mu.Unlock()
						return len(r.Cache.ByHash) == 3
					})
				}
			}
			tt.check(t, e)
		})
	}
}
