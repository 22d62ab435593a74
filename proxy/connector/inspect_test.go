package connector

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

const nixlMetrics = "# TYPE x gauge\nvllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",prefix_caching_hash_algo=\"sha256_cbor\"} 1\nvllm:nixl_num_failed_transfers_total{engine=\"0\"} 0\n"

func TestInspect(t *testing.T) {
	for _, tt := range []struct {
		name, connector, body string
		want                  Inspection
	}{
		{"vllm with NIXL", "vllm-nixl", nixlMetrics, Inspection{Transfer: "nixl", Caching: "on", Hash: "sha256_cbor"}},
		{"vllm with Mooncake", "vllm-mooncake", "\nvllm:cache_config_info{enable_prefix_caching=\"False\"} 1\nvllm:mooncake_bytes_transferred_sum 0\n", Inspection{Transfer: "mooncake", Caching: "off"}},
		{"vllm without a connector", "none", "\nvllm:cache_config_info{block_size=\"16\"} 1\n", Inspection{Transfer: "none"}},
		{"metrics of another program", "none", "\nup 1\nvllm:nixl_x 1\n", Inspection{}},
		{"sglang prefill", "sglang", `{"disaggregation_mode":"prefill","disable_radix_cache":false}`, Inspection{Mode: "prefill", Caching: "on"}},
		{"sglang alone", "sglang", `{"disaggregation_mode":"null","disable_radix_cache":true}`, Inspection{Mode: "null", Caching: "off"}},
		{"sglang of wrong types", "sglang", `{"disaggregation_mode":7,"disable_radix_cache":"no"}`, Inspection{}},
		{"sglang garbage", "sglang", "\x1b[2J", Inspection{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Inspect(InspectPath(tt.connector), []byte(tt.body)); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
	for name, want := range map[string]string{"trtllm": "", "vllm-store": "/metrics", "sglang": "/server_info", "of no engine": ""} {
		if got := InspectPath(name); got != want {
			t.Errorf("InspectPath(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestShowsTransfer(t *testing.T) {
	for _, tt := range []struct{ connector, version, want string }{
		{"vllm-nixl", "0.33.0", "nixl"}, {"vllm-nixl-push", "0.13.0", "nixl"}, {"vllm-mooncake", "0.33.0", "mooncake"},
		{"vllm-nixl", "0.12.0", ""}, {"vllm-nixl", "0.1.dev1", ""}, {"vllm-store", "0.33.0", ""}, {"sglang", "0.5.23", ""},
	} {
		if got := ShowsTransfer(tt.connector, tt.version); got != tt.want {
			t.Errorf("%s %s: got %q, want %q", tt.connector, tt.version, got, tt.want)
		}
	}
}

func TestOwner(t *testing.T) {
	for _, tt := range []struct{ owner, connector, is, wants string }{
		{"vllm", "vllm-nixl", "vllm", "vllm"}, {"sglang", "vllm-store", "sglang", "vllm"}, {"tensorrt_llm", "trtllm", "tensorrt_llm", "tensorrt_llm"},
		{"someone", "sglang", "", "sglang"}, {"vllm", "none", "vllm", ""},
	} {
		if is, wants := Owner(&engine.Facts{Owner: tt.owner}, tt.connector); is != tt.is || wants != tt.wants {
			t.Errorf("%+v: got %q, %q", tt, is, wants)
		}
	}
}

// FuzzInspect: every statement is one of the known values or short.
func FuzzInspect(f *testing.F) {
	f.Add([]byte(nixlMetrics))
	f.Add([]byte(`{"disaggregation_mode":"decode","disable_radix_cache":true}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, path := range []string{metricsPath, serverInfoPath} {
			i := Inspect(path, body)
			if len(i.Mode) > 7 || len(i.Transfer) > 8 || len(i.Caching) > 3 || len(i.Hash) > maxCacheType {
				t.Errorf("%+v", i)
			}
		}
	})
}
