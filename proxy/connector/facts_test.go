package connector

import (
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

func TestReadFacts(t *testing.T) {
	const models = `{"object":"list","data":[{"id":"m","object":"model"},{"id":"m-lora"},{"object":"model"}]}`
	tests := []struct {
		name, connector, path string
		status                int
		body                  string
		before, want          engine.Facts
		wantErr               string
	}{
		{name: "models", connector: "vllm-nixl", path: "/v1/models", status: 200, body: models,
			want: engine.Facts{Models: []string{"m", "m-lora"}}},
		{name: "models again", connector: "none", path: "/v1/models", status: 200, body: `{"data":[{"id":"n"}]}`,
			before: engine.Facts{Models: []string{"m"}}, want: engine.Facts{Models: []string{"n"}}},
		{name: "model cards", connector: "vllm-nixl", path: "/v1/models", status: 200,
			body: `{"data":[{"id":"m","root":"/models/m","parent":null,"max_model_len":4096},{"id":"m-lora","root":"/loras/x","parent":"m","max_model_len":null},{"id":"","root":"x"}]}`,
			want: engine.Facts{Models: []string{"m", "m-lora"}, Cards: []engine.ModelCard{{ID: "m", MaxModelLen: 4096, Root: "/models/m"}, {ID: "m-lora", Root: "/loras/x", Parent: "m"}}}},
		{name: "wrong model cards", connector: "none", path: "/v1/models", status: 200,
			body:   `{"data":[{"id":"m","root":7,"parent":["x"],"max_model_len":"4096"},{"id":"n","max_model_len":-1},{"id":"o","max_model_len":1e99,"root":"` + strings.Repeat("x", 5000) + `"}]}`,
			before: engine.Facts{Cards: []engine.ModelCard{{ID: "m", Root: "old"}}}, want: engine.Facts{Models: []string{"m", "n", "o"}}},
		{name: "models of sglang", connector: "sglang", path: "/v1/models", status: 200, body: models,
			want: engine.Facts{Models: []string{"m", "m-lora"}}},
		{name: "models of trtllm", connector: "trtllm", path: "/v1/models", status: 200, body: models,
			want: engine.Facts{Models: []string{"m", "m-lora"}}},
		{name: "vllm version", connector: "vllm-nixl", path: "/version", status: 200, body: `{"version":"0.26.0"}`,
			want: engine.Facts{Version: "0.26.0"}},
		{name: "vllm KV cache", connector: "vllm-nixl", path: "/metrics", status: 200,
			body: "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{_block_size_resolved=\"True\",mamba_block_size=\"64\",block_size=\"16\",cache_dtype=\"fp8_e4m3\",engine=\"0\"} 1.0\nvllm:cache_config_info{block_size=\"16\",engine=\"1\"} 1.0\n",
			want: engine.Facts{PageSize: 16, KVCacheType: "fp8_e4m3"}},
		{name: "vllm KV cache, the model's type", connector: "vllm-moriio", path: "/metrics", status: 200,
			body: "# x\nvllm:cache_config_info{block_size=\"None\",cache_dtype=\"auto\"} 1\n"},
		{name: "vllm without metrics", connector: "vllm-nixl", path: "/metrics", status: 500, body: "SECRET"},
		{name: "vllm metrics without an answer", connector: "vllm-nixl", path: "/metrics"},
		{name: "vllm models without an answer", connector: "vllm-nixl", path: "/v1/models", wantErr: "status 0"},
		{name: "garbage metrics", connector: "vllm-nixl", path: "/metrics", status: 200, body: "\nvllm:cache_config_info{block_size=\"-1\",cache_dtype=\"" + strings.Repeat("x", 99)},
		{name: "old engine", connector: "vllm-nixl", path: "/version", status: 404, body: `{"detail":"Not Found"}`},
		{name: "wrong key", connector: "vllm-nixl", path: "/v1/models", status: 401, body: `SECRET`, wantErr: "status 401"},
		{name: "starting", connector: "none", path: "/v1/models", status: 503, wantErr: "status 503"},
		{name: "no list", connector: "none", path: "/v1/models", status: 200, body: `{"data":{}}`, wantErr: "no list"},
		{name: "no models", connector: "none", path: "/v1/models", status: 200, body: `{}`, wantErr: "no list"},
		{name: "garbage models", connector: "none", path: "/v1/models", status: 200, body: `SECRET`, wantErr: "invalid JSON"},
		{name: "garbage version", connector: "trtllm", path: "/version", status: 200, body: `1.2.0`, wantErr: "invalid JSON"},
		{name: "sglang prefill", connector: "sglang", path: "/server_info", status: 200,
			body: `{"version":"0.5.6","dp_size":8,"page_size":64,"kv_cache_dtype":"fp8_e4m3","disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"load_balance_method":"follow_bootstrap_room","startup_time":{"tokenizer_e2e":12.345678901},"internal_states":[{"x":1e400}]}`,
			want: engine.Facts{Version: "0.5.6", DPSize: 8, PageSize: 64, KVCacheType: "fp8_e4m3", BootstrapPort: 8998, FollowsRoom: true, Epoch: `{"tokenizer_e2e":12.345678901}`}},
		{name: "sglang topology", connector: "sglang", path: topologyPath, status: 200,
			before: engine.Facts{Version: "0.5.9", DPSize: 4, PageSize: 1, TPSize: 8, BootstrapPort: 8998},
			body:   `{"attn_tp_size":2,"attn_cp_size":1,"dp_size":4,"pp_size":2,"page_size":64,"kv_cache_dtype":"auto","follow_bootstrap_room":true,"enable_dsa_cache_layer_split":false,"prefill_http_port":30000,"target_tp_rank":null,"target_tp_ranks":null}`,
			want:   engine.Facts{Version: "0.5.9", DPSize: 4, PageSize: 64, KVCacheType: "auto", TPSize: 2, CPSize: 1, PPSize: 2, BootstrapPort: 8998, FollowsRoom: true}},
		{name: "sglang topology without sizes", connector: "sglang", path: topologyPath, status: 200,
			before: engine.Facts{PageSize: 16, KVCacheType: "fp8_e4m3", FollowsRoom: true},
			body:   `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":null,"kv_cache_dtype":null,"follow_bootstrap_room":false}`,
			want:   engine.Facts{DPSize: 1, PageSize: 16, KVCacheType: "fp8_e4m3", TPSize: 1, CPSize: 1, PPSize: 1}},
		{name: "sglang ranks still register", connector: "sglang", path: topologyPath, status: 503, body: `Prefill server not fully registered yet`, wantErr: "status 503"},
		{name: "sglang registry out of reach", connector: "sglang", path: topologyPath, status: 0},
		{name: "sglang registry of an older form", connector: "sglang", path: topologyPath, status: 400, body: `Missing inputs for bootstrap server.`},
		{name: "sglang scheduler's own", connector: "sglang", path: "/server_info", status: 200,
			body: `{"tp_size":16,"dp_size":4,"enable_dp_attention":true,"attn_cp_size":2,"pp_size":2,"page_size":1,"kv_cache_dtype":"auto","disaggregation_mode":"decode","disaggregation_transfer_backend":"nixl","internal_states":[{"page_size":64,"kv_cache_dtype":"fp8_e4m3","x":1e400},{}]}`,
			want: engine.Facts{DPSize: 4, TPSize: 2, CPSize: 2, PPSize: 2, PageSize: 64, KVCacheType: "fp8_e4m3", Transfer: "nixl"}},
		{name: "sglang ranks of their own", connector: "sglang", path: "/server_info", status: 200,
			body: `{"tp_size":4,"dp_size":2,"enable_dp_attention":false,"disaggregation_mode":"null","disaggregation_transfer_backend":"mooncake","internal_states":[{"kv_cache_dtype":"auto"}]}`,
			want: engine.Facts{DPSize: 2, TPSize: 4, KVCacheType: "auto"}},
		{name: "sglang prefill, unresolved", connector: "sglang", path: "/server_info", status: 200,
			body: `{"page_size":null,"kv_cache_dtype":"auto","disaggregation_mode":"prefill","load_balance_method":"auto","dp_size":-1,"startup_time":null}`,
			want: engine.Facts{FollowsRoom: true}},
		{name: "sglang decode", connector: "sglang", path: "/server_info", status: 200,
			body: `{"disaggregation_mode":"decode","load_balance_method":"auto","dp_size":4294967296}`},
		{name: "sglang prefill, other balance", connector: "sglang", path: "/server_info", status: 200,
			body: `{"disaggregation_mode":"prefill","load_balance_method":"round_robin","dp_size":2}`, want: engine.Facts{DPSize: 2}},
		{name: "sglang with KV events", connector: "sglang", path: "/server_info", status: 200,
			body: `{"page_size":64,"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":128,"dp_size":2}}`,
			want: engine.Facts{PageSize: 64, KVEvents: engine.KVPublisher{BlockTokens: 128,
				Ranks: []engine.KVEndpoints{{Events: "tcp://*:5557"}, {Events: "tcp://*:5558"}}}}},
		{name: "sglang with replays", connector: "sglang", path: "/server_info", status: 200,
			body: `{"kv_events":{"publisher":"zmq","endpoint_host":"[fd00::1]","endpoint_port_base":65534,"replay_endpoint_port_base":5558,"load_endpoint_port_base":5600,"load_topic":"load","dp_size":3}}`,
			want: engine.Facts{KVEvents: engine.KVPublisher{Ranks: []engine.KVEndpoints{
				{Events: "tcp://[fd00::1]:65534", Replay: "tcp://[fd00::1]:5558", Loads: "tcp://[fd00::1]:5600"},
				{Events: "tcp://[fd00::1]:65535", Replay: "tcp://[fd00::1]:5559", Loads: "tcp://[fd00::1]:5601"}}}}},
		{name: "sglang with another publisher", connector: "sglang", path: "/server_info", status: 200,
			body: `{"kv_events":{"publisher":"file","endpoint_host":"*","endpoint_port_base":5557}}`},
		{name: "vllm with KV events", connector: "vllm-nixl", path: "/kv_event_sources", status: 200,
			body: `{"0":` + source("tcp://*:5557", `"tcp://*:5558"`) + `,"1":` + source("tcp://*:5558", "null") + `}`,
			want: engine.Facts{KVEvents: engine.KVPublisher{Ranks: []engine.KVEndpoints{{Events: "tcp://*:5557", Replay: "tcp://*:5558"}, {Events: "tcp://*:5558"}}}}},
		{name: "vllm, a node of hybrid load balancing", connector: "vllm-moriio", path: "/kv_event_sources", status: 200,
			body: `{"10":` + source("tcp://10.0.0.5:40001", "null") + `,"9":` + source("tcp://[fd00::1]:40000", "null") + `}`,
			want: engine.Facts{KVEvents: engine.KVPublisher{Ranks: []engine.KVEndpoints{{Events: "tcp://[fd00::1]:40000"}, {Events: "tcp://10.0.0.5:40001"}}}}},
		{name: "vllm, one rank without TCP", connector: "none", path: "/kv_event_sources", status: 200,
			body: `{"0":` + source("ipc:///run/kv", "null") + `,"1":` + source("tcp://a:1", "null") + `}`,
			want: engine.Facts{KVEvents: engine.KVPublisher{Ranks: []engine.KVEndpoints{{}, {Events: "tcp://a:1"}}}}},
		{name: "vllm without events", connector: "vllm-nixl", path: "/kv_event_sources", status: 200, before: heldSources, body: `{}`},
		{name: "vllm events off", connector: "vllm-nixl", path: "/kv_event_sources", status: 200,
			body: `{"0":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:5557"}}`},
		{name: "vllm before 0.32", connector: "vllm-nixl", path: "/kv_event_sources", status: 404, before: heldSources, body: `{"detail":"Not Found"}`},
		{name: "vllm sources for others only", connector: "vllm-nixl", path: "/kv_event_sources", status: 401, body: `SECRET`},
		{name: "vllm sources not answered", connector: "vllm-nixl", path: "/kv_event_sources", status: 0, before: heldSources, want: heldSources},
		{name: "vllm sources fail", connector: "vllm-nixl", path: "/kv_event_sources", status: 500, before: heldSources, want: heldSources},
		{name: "vllm garbage sources", connector: "vllm-nixl", path: "/kv_event_sources", status: 200, before: heldSources, body: `<html>`},
		{name: "vllm sources of no rank", connector: "vllm-nixl", path: "/kv_event_sources", status: 200, body: `{"zero":` + source("tcp://*:5557", "null") + `}`},
		{name: "vllm sources of a wrong type", connector: "vllm-nixl", path: "/kv_event_sources", status: 200, body: `{"0":["tcp://*:5557"]}`},
		{name: "vllm impossible sources", connector: "vllm-nixl", path: "/kv_event_sources", status: 200,
			body: `{"0":` + source("tcp://*:0", "null") + `,"1":` + source("tcp://user@host:7", "null") + `,"2":` + source(`tcp://a\u0000b:7`, "null") + `}`},
		{name: "mooncake query", connector: "vllm-mooncake", path: "/query", status: 200,
			body: `{"0":{"engine_id":"a_dp0","worker_addr":{"0":{"0":"tcp://p:1"},"1":{"0":"tcp://p:2"}}},"1":{"engine_id":"a_dp1","worker_addr":{}}}`,
			want: engine.Facts{EngineIDs: []string{"a_dp0", "a_dp1"}, DPSize: 2, TPSize: 2,
				Epoch: `{"0":{"engine_id":"a_dp0","worker_addr":{"0":{"0":"tcp://p:1"},"1":{"0":"tcp://p:2"}}},"1":{"engine_id":"a_dp1","worker_addr":{}}}`}},
		{name: "mooncake before it has registered", connector: "vllm-mooncake", path: "/query", status: 200, body: `{}`, wantErr: "registered"},
		{name: "mooncake without rank 0", connector: "vllm-mooncake", path: "/query", status: 200, body: `{"1":{"engine_id":"a"}}`, wantErr: "registered"},
		{name: "mooncake without an id", connector: "vllm-mooncake", path: "/query", status: 200, body: `{"0":{"engine_id":7}}`, wantErr: "engine_id"},
		{name: "mooncake of another kind", connector: "vllm-mooncake", path: "/query", status: 404, body: `SECRET`, wantErr: "status 404"},
		{name: "mooncake garbage", connector: "vllm-mooncake", path: "/query", status: 200, body: `SECRET`, wantErr: "no JSON object"},
		{name: "mooncake version", connector: "vllm-mooncake", path: "/version", status: 200, body: `{"version":"0.30.0"}`, want: engine.Facts{Version: "0.30.0"}},
		{name: "sglang without KV events", connector: "sglang", path: "/server_info", status: 200,
			body: `{"page_size":64,"kv_events":null}`, want: engine.Facts{PageSize: 64}},
		{name: "sglang garbage", connector: "sglang", path: "/server_info", status: 200, body: `[]`, wantErr: "no JSON object"},
		{name: "trtllm version", connector: "trtllm", path: "/version", status: 200, body: `{"version":"1.2.0"}`,
			want: engine.Facts{Version: "1.2.0", Wire: "g1"}},
		{name: "trtllm info", connector: "trtllm", path: "/server_info", status: 200,
			body:   `{"disaggregated_params":null,"kv_cache_hash_algo":"v1_block_key","tokens_per_block":32,"max_batch_size":64}`,
			before: engine.Facts{Wire: "g3"}, want: engine.Facts{Wire: "g3", PageSize: 32, KVHash: "v1_block_key"}},
		{name: "trtllm info without a version", connector: "trtllm", path: "/server_info", status: 200,
			body: `{"kv_cache_hash_algo":"v1_block_key"}`, want: engine.Facts{Wire: "g2", KVHash: "v1_block_key"}},
		{name: "trtllm info of an old worker", connector: "trtllm", path: "/server_info", status: 200,
			body: `{"disaggregated_params":null}`},
		{name: "trtllm garbage", connector: "trtllm", path: "/server_info", status: 200, body: `x`, wantErr: "no JSON object"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := ByName(tt.connector)
			got := tt.before
			err := c.ReadFacts(&got, tt.path, tt.status, []byte(tt.body))
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) || strings.Contains(err.Error(), "SECRET") {
					t.Fatalf("ReadFacts = %v, want %q", err, tt.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("facts %+v, want %+v", got, tt.want)
			}
		})
	}
}

// source is one rank's member of GET /kv_event_sources. replay is JSON.
func source(endpoint, replay string) string {
	return `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"` + endpoint + `","replay_endpoint":` + replay +
		`,"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":""}`
}

// heldSources are facts of an earlier answer.
var heldSources = engine.Facts{KVEvents: engine.KVPublisher{Ranks: []engine.KVEndpoints{{Events: "tcp://*:5557"}}}}

// TestFactPaths: ReadFacts reads every path of FactPaths.
func TestFactPaths(t *testing.T) {
	answers := map[string]string{
		"/v1/models": `{"data":[]}`, "/version": `{"version":"1"}`, "/server_info": `{"version":"1"}`, topologyPath: `{"dp_size":1}`,
		queryPath: `{"0":{"engine_id":"e"}}`,
	}
	for _, c := range All() {
		for _, role := range []abi.Role{abi.RolePrefill, abi.RoleDecode, abi.RoleBoth} {
			paths := c.FactPaths(role)
			if r, ok := c.(engine.RegistryProtocol); ok && role == abi.RolePrefill {
				paths = append(paths, r.RegistryPath(role))
			}
			if len(paths) == 0 {
				t.Errorf("FactPaths of %s is empty", c.Name())
			}
			for _, path := range paths {
				if err := c.ReadFacts(&engine.Facts{}, path, 200, []byte(answers[path])); err != nil {
					t.Errorf("%s, %s: c.ReadFacts = %v, want nil", c.Name(), path, err)
				}
			}
		}
	}
}

func TestCompatible(t *testing.T) {
	tests := []struct {
		name, connector string
		p, d            engine.Facts
		want            bool
	}{
		{"nothing known", "sglang", engine.Facts{}, engine.Facts{}, true},
		{"page sizes equal", "sglang", engine.Facts{PageSize: 64}, engine.Facts{PageSize: 64}, true},
		{"page sizes differ", "sglang", engine.Facts{PageSize: 64}, engine.Facts{PageSize: 1}, false},
		{"one page size unknown", "sglang", engine.Facts{PageSize: 64}, engine.Facts{}, true},
		{"cache types differ", "sglang", engine.Facts{KVCacheType: "fp8_e4m3"}, engine.Facts{KVCacheType: "fp8_e5m2"}, false},
		{"cache types equal", "sglang", engine.Facts{KVCacheType: "fp8_e4m3"}, engine.Facts{KVCacheType: "fp8_e4m3"}, true},
		{"unresolved and resolved cache types", "sglang", engine.Facts{KVCacheType: "auto"}, engine.Facts{KVCacheType: "fp8_e5m2"}, false},
		{"decode without stages", "sglang", engine.Facts{PPSize: 4}, engine.Facts{PPSize: 1}, true},
		{"as many stages", "sglang", engine.Facts{PPSize: 4}, engine.Facts{PPSize: 4}, true},
		{"other stages", "sglang", engine.Facts{PPSize: 1}, engine.Facts{PPSize: 2}, false},
		{"prefill with context parallelism", "sglang", engine.Facts{CPSize: 4}, engine.Facts{CPSize: 1}, true},
		{"decode with context parallelism", "sglang", engine.Facts{CPSize: 1}, engine.Facts{CPSize: 2}, false},
		{"more ranks on prefill", "sglang", engine.Facts{TPSize: 8}, engine.Facts{TPSize: 2}, true},
		{"more ranks on decode", "sglang", engine.Facts{TPSize: 2}, engine.Facts{TPSize: 8}, true},
		{"ranks that do not map", "sglang", engine.Facts{TPSize: 4}, engine.Facts{TPSize: 6}, false},
		{"other backends", "sglang", engine.Facts{Transfer: "nixl"}, engine.Facts{Transfer: "mooncake"}, false},
		{"mooncake over TCP", "sglang", engine.Facts{Transfer: "mooncake_tcp"}, engine.Facts{Transfer: "mooncake"}, true},
		{"no transfer at all", "sglang", engine.Facts{Transfer: "mooncake"}, engine.Facts{Transfer: "fake"}, true},
		{"one cache type unknown", "sglang", engine.Facts{}, engine.Facts{KVCacheType: "fp8_e5m2"}, true},
		{"releases differ", "vllm-nixl", engine.Facts{Version: "0.13.0"}, engine.Facts{Version: "0.14.0"}, false},
		{"releases that do not compare", "vllm-nixl", engine.Facts{Version: "0.12.0"}, engine.Facts{Version: "0.14.0"}, true},
		{"builds without a release", "vllm-nixl", engine.Facts{Version: "0.1.dev1+g51f"}, engine.Facts{Version: "0.14.0"}, true},
		{"one release unknown", "vllm-nixl", engine.Facts{}, engine.Facts{Version: "0.14.0"}, true},
		{"vllm cache types differ", "vllm-nixl", engine.Facts{KVCacheType: "fp8"}, engine.Facts{KVCacheType: "bfloat16"}, false},
		{"vllm cache type of the model", "vllm-nixl", engine.Facts{KVCacheType: "fp8"}, engine.Facts{}, true},
		{"vllm blocks divide", "vllm-nixl", engine.Facts{PageSize: 16}, engine.Facts{PageSize: 64}, true},
		{"vllm blocks, sizes exchanged", "vllm-nixl", engine.Facts{PageSize: 64}, engine.Facts{PageSize: 16}, false},
		{"vllm blocks that do not divide", "vllm-nixl", engine.Facts{PageSize: 16}, engine.Facts{PageSize: 24}, false},
		{"moriio knows the sizes alone", "vllm-moriio", engine.Facts{Version: "0.19.0", PageSize: 16}, engine.Facts{Version: "0.20.0", PageSize: 1}, true},
		{"the P2P tier's blocks differ", "vllm-p2p-tier", engine.Facts{PageSize: 16}, engine.Facts{PageSize: 32}, false},
		{"the P2P tier's cache types differ", "vllm-p2p-tier", engine.Facts{KVCacheType: "fp8"}, engine.Facts{KVCacheType: "bfloat16"}, false},
		{"the P2P tier alike", "vllm-p2p-tier", engine.Facts{TPSize: 2, PageSize: 16}, engine.Facts{TPSize: 4, PageSize: 16}, true},
		{"mooncake's blocks differ", "vllm-mooncake", engine.Facts{PageSize: 16}, engine.Facts{PageSize: 64}, false},
		{"mooncake's cache types differ", "vllm-mooncake", engine.Facts{KVCacheType: "fp8"}, engine.Facts{KVCacheType: "bfloat16"}, false},
		{"mooncake's sizes divide", "vllm-mooncake", engine.Facts{TPSize: 2, PageSize: 16, Version: "1"}, engine.Facts{TPSize: 8, PageSize: 16, Version: "2"}, true},
		{"mooncake's sizes do not divide", "vllm-mooncake", engine.Facts{TPSize: 2}, engine.Facts{TPSize: 3}, false},
		{"generations one and two", "trtllm", engine.Facts{Wire: "g1"}, engine.Facts{Wire: "g2"}, false},
		{"generations three and one", "trtllm", engine.Facts{Wire: "g3"}, engine.Facts{Wire: "g1"}, false},
		{"generations two and three", "trtllm", engine.Facts{Wire: "g2"}, engine.Facts{Wire: "g3"}, true},
		{"one generation unknown", "trtllm", engine.Facts{Wire: "g1"}, engine.Facts{}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := ByName(tt.connector)
			if err := c.Compatible(&tt.p, &tt.d); (err == nil) != tt.want {
				t.Errorf("Compatible = %v", err)
			}
		})
	}
}

func TestWireOf(t *testing.T) {
	tests := map[string]string{
		"0.21.0": "g1", "1.0.0": "g1", "1.1.0rc5": "g1", "1.2.0": "g1", "1.2.0rc8": "g1",
		"1.3.0rc0": "g2", "1.3.0rc14": "g2", "1.3.0rc24": "g2", "1.3.0rc14.post1": "g2", "1.3.0.dev2026060100": "g2", "1.3.0rcX": "g2",
		"1.3.0rc25": "g3", "1.3.0": "g3", "1.3.1": "g3", "1.4.0rc1": "g3", "2.0.0": "g3",
		"": "", "main": "", "1": "", "x.y": "",
	}
	for version, want := range tests {
		if got := wireOf(version); got != want {
			t.Errorf("wireOf(%q) = %q, want %q", version, got, want)
		}
	}
}

func TestProcessStart(t *testing.T) {
	for _, tt := range []struct{ name, body, want string }{
		{"prometheus_client's form", "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.76382958352e+09\nx 1\n", "1.76382958352e+09"},
		{"the last line", "x 1\nprocess_start_time_seconds 5", "5"},
		{"none", "vllm:x 1\n", ""},
		{"no number", "x 1\nprocess_start_time_seconds soon\n", ""},
		{"not the whole name", "x 1\nmy_process_start_time_seconds 5\n", ""},
		{"too long", "x 1\nprocess_start_time_seconds 1" + strings.Repeat("0", 40) + "\n", ""},
	} {
		if got := processStart([]byte(tt.body)); got != tt.want {
			t.Errorf("%s: processStart([]byte(tt.body)) = %q, want %q", tt.name, got, tt.want)
		}
	}
}
