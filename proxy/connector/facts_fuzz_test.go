package connector

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// factPaths returns all paths that a connector queries for facts.
func factPaths(c Connector) []string {
	var paths []string
	for _, role := range []abi.Role{abi.RolePrefill, abi.RoleDecode, abi.RoleBoth} {
		paths = append(paths, c.FactPaths(role)...)
		if r, ok := c.(engine.RegistryProtocol); ok {
			paths = append(paths, r.RegistryPath(role))
		}
	}
	return paths
}

// FuzzReadFacts reads arbitrary bytes as an engine's facts. The error contains nothing
// of the answer, sizes are never negative, and an engine is compatible with itself.
func FuzzReadFacts(f *testing.F) {
	for _, body := range []string{
		`{"object":"list","data":[{"id":"m","object":"model"},{"id":7}]}`,
		`{"version":"0.26.0"}`, `{"version":"1.2.0rc1"}`,
		"# x\nvllm:cache_config_info{mamba_block_size=\"64\",block_size=\"16\",cache_dtype=\"fp8_e4m3\"} 1\n",
		`{"version":"0.5.6","dp_size":8,"tp_size":16,"enable_dp_attention":true,"page_size":64,"kv_events":{"endpoint_port_base":5557},"internal_states":[{"page_size":1}]}`,
		`{"attn_tp_size":2,"attn_cp_size":1,"dp_size":4,"pp_size":2,"page_size":null,"follow_bootstrap_room":true}`,
		`{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://10.0.0.5:1"}}},"1":{"engine_id":"e1"}}`,
		`{"tokens_per_block":32,"kv_cache_hash_algo":"sha256","disaggregated_params":{"ctx_info_endpoint":["tcp://10.0.0.5:1"],"encoded_opaque_state":"eA=="}}`,
		`{"page_size":1,"kv_events":{"publisher":"zmq","endpoint_host":"::","endpoint_port_base":5557,"replay_endpoint_port_base":5558,"load_endpoint_port_base":5559,"dp_size":2}}`,
		`{"0":` + source("tcp://*:5557", `"tcp://[::1]:5558"`) + `,"1":` + source("tcp://*:5558", "null") + `}`,
	} {
		f.Add([]byte(body), uint16(200))
	}
	f.Add([]byte("SECRET"), uint16(503))
	f.Fuzz(func(t *testing.T, body []byte, status uint16) {
		for _, c := range All() {
			for _, path := range factPaths(c) {
				var facts engine.Facts
				if err := c.ReadFacts(&facts, path, int(status), body); err != nil {
					if !strings.HasPrefix(err.Error(), "read facts: ") || len(err.Error()) > 200 {
						t.Errorf("%s of %s: error %q", path, c.Name(), err)
					}
					continue
				}
				for _, n := range []int{facts.DPSize, facts.TPSize, facts.PPSize, facts.CPSize, facts.PageSize, facts.BootstrapPort} {
					if n < 0 {
						t.Errorf("%s of %s: %+v", path, c.Name(), facts)
					}
				}
				for _, r := range facts.KVEvents.Ranks {
					for _, at := range []string{r.Events, r.Replay} {
						if at != "" && engine.KVEndpoint(at) != at {
							t.Errorf("%s of %s: endpoint %q", path, c.Name(), at)
						}
					}
				}
				if len(facts.KVEvents.Ranks) > engine.MaxKVRanks {
					t.Errorf("%s of %s: %d ranks", path, c.Name(), len(facts.KVEvents.Ranks))
				}
				if err := c.Compatible(&facts, &facts); err != nil && c.Name() != "none" {
					t.Errorf("%s of %s does not fit itself: %v", path, c.Name(), err)
				}
			}
		}
	})
}
