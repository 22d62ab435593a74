package quickstart

import (
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Mistakes that concern several engines of vLLM.
var (
	eventsMistake = mistake{
		"The endpoint of the KV events has no `*`",
		"vLLM binds `tcp://*:PORT`, but connects to `tcp://127.0.0.1:PORT`. The proxy then gets no events, and `pdproxy_kv_match_ratio` stays 0. The events contain token ids, so keep the port inside your network.",
	}
	scaleOutMistake = mistake{
		"`--enable-scale-out` is missing",
		"`POST /inference/v1/generate` then answers 403, and so do the other `/inference/v1` routes. All other APIs work without the flag.",
	}
)

func sideChannelMistake(variable string) mistake {
	return mistake{
		"`" + variable + "` is not set",
		"Its default is `localhost`. A decode engine on another host then connects to itself, and each request fails or computes its prompt again. Set the address that the other hosts reach, and another port for each engine of one host.",
	}
}

func hostIPMistake(effect string) mistake {
	return mistake{
		"`VLLM_HOST_IP` is not set",
		"vLLM then chooses an address of the host, on hosts with several networks often the wrong one. " + effect,
	}
}

// storeGuide uses LMCache with its own server. Sources: LMCache 0.5.6, lmcache/v1/config.py
// (keys of the file), lmcache/v1/server/__main__.py (arguments of the server) and
// lmcache/integration/vllm/vllm_v1_adapter.py.
func storeGuide() *guide {
	return &guide{
		name: config.ConnectorVLLMStore, connector: config.ConnectorVLLMStore, flow: "prefill_first",
		title:   "vLLM, a KV cache that engines share (LMCache)",
		summary: "Prefill computes the prompt and stores the KV in a cache server. Decode finds the KV there by the tokens of the prompt.",
		sources: []string{"vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py", "lmcache/v1/config.py of LMCache " + lmcacheVer, "lmcache/v1/server/__main__.py of LMCache " + lmcacheVer},
		install: []string{"pip install vllm lmcache"},
		setUp: func(p *Plan, e *Engine) {
			if e.Role != config.RoleEncode {
				e.env("PYTHONHASHSEED", 0)
				e.env("LMCACHE_CONFIG_FILE", "lmcache.yaml")
			}
			p.serve(e, object("kv_connector", "LMCacheConnectorV1", "kv_role", "kv_both"))
		},
		extra: func(p *Plan) {
			server := Engine{Host: p.hosts[0]}
			p.Services = append(p.Services, Service{
				Name: "lmcache-server", Host: p.hosts[0],
				Command: []string{"lmcache_server", bindAddress(p.hosts[0]), fmt.Sprint(lmcachePort)},
			})
			p.Files = append(p.Files, File{"lmcache.yaml", fmt.Sprintf(`# LMCache shares whole chunks: a prompt with fewer tokens is computed twice.
chunk_size: 256
local_cpu: false
max_local_cpu_size: 5.0 # GB of buffers in host memory
remote_url: "lm://%s"
remote_serde: "naive"
`, server.address(lmcachePort))})
		},
		notes: []string{
			"Any other cache that all engines share works in the same way, for example Redis (`remote_url: \"redis://HOST:6379\"`), MooncakeStoreConnector, or vLLM's OffloadingConnector with a folder.",
			"Do not use LMCache's own transfer between engines (`enable_pd`). See [engines.md](" + enginesPage + "#lmcache-from-engine-to-engine).",
		},
		ran: parsed + " LMCache's own loader reads `lmcache.yaml` (tried by hand).",
		mistakes: []mistake{{
			"`PYTHONHASHSEED` differs",
			"The engines then name the same tokens differently. Decode finds nothing in the cache and computes each prompt again. There is no error message.",
		}},
	}
}

// p2pTierGuide uses the tier of type p2p. Sources, in the package vllm:
// v1/kv_offload/tiering/p2p/manager.py (host and port from the environment),
// v1/kv_offload/tiering/spec.py and v1/kv_offload/cpu/spec.py (cpu_bytes_to_use).
func p2pTierGuide() *guide {
	return &guide{
		name: config.ConnectorVLLMP2PTier, connector: config.ConnectorVLLMP2PTier, flow: "prefill_first",
		title:   "vLLM, OffloadingConnector with a P2P tier",
		summary: "Prefill computes the prompt and keeps the KV in host memory. Decode fetches the KV from there over NIXL.",
		sources: []string{"vllm/v1/kv_offload/tiering/", "docs/features/kv_offloading_usage.md of vLLM's repository, commit 0078e9d2"},
		install: []string{"pip install vllm nixl"},
		setUp: func(p *Plan, e *Engine) {
			if e.Role != config.RoleEncode {
				e.env("PYTHONHASHSEED", 0)
				e.env("VLLM_P2P_SIDE_CHANNEL_HOST", e.Host)
				e.env("VLLM_P2P_SIDE_CHANNEL_PORT", e.port(tierChannel))
			}
			p.serve(e, object("kv_connector", "OffloadingConnector", "kv_role", "kv_both",
				"kv_connector_extra_config", object("spec_name", "TieringOffloadingSpec",
					"cpu_bytes_to_use", 8<<30, "secondary_tiers", []any{object("type", "p2p")})))
			if e.Role == config.RolePrefill {
				e.key("side_channel", e.address(e.port(tierChannel)))
			}
		},
		notes: []string{
			"`cpu_bytes_to_use` is the host memory for KV of each engine, here 8 GiB.",
			"`PYTHONHASHSEED` must be the same on all engines: they find KV by the hashes of its tokens, and refuse a peer with another value.",
		},
		mistakes: []mistake{sideChannelMistake("VLLM_P2P_SIDE_CHANNEL_HOST")},
	}
}
