package quickstart

import (
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// vLLM's releases and models of the guides. Every command below passes the argument
// parser of vllmRelease (conformance/real/flags.py). The files named in sources are those
// of the Python packages with these versions.
const (
	vllmRelease   = "0.32.0"
	lmcacheVer    = "0.5.6"
	smallModel    = "Qwen/Qwen3-0.6B"
	visionModel   = "Qwen/Qwen2.5-VL-3B-Instruct"
	encoderFolder = "/tmp/pdproxy-encoder-cache"
	sharedFolder  = "/mnt/pdproxy-encoder-cache"
)

// vllmGuides are the quickstarts of vLLM. Sources, in the package vllm:
// entrypoints/launchers/cli_args.py and engine/arg_utils.py (flags), envs.py
// (environment), config/kv_transfer.py, config/kv_events.py and config/ec_transfer.py
// (members of the JSON values).
func vllmGuides() []*guide {
	guides := []*guide{nixlGuide(), nixlPushGuide(), storeGuide(), p2pTierGuide(), moriioGuide(false), moriioGuide(true), mooncakeGuide()}
	for _, g := range guides {
		g.evidence = evidence{
			role: config.RoleDecode, path: "/metrics", metric: "vllm:external_prefix_cache_hits_total",
			text: "The value is the number of prompt tokens whose KV decode received instead of computing them. It rises by about the length of the prompt.",
		}
		if g.release == "" {
			g.release = "vLLM " + vllmRelease
			g.encoders, g.generate = true, true
			g.sources = append(g.sources, "vllm/entrypoints/launchers/cli_args.py", "vllm/engine/arg_utils.py", "vllm/envs.py",
				"vllm/config/kv_transfer.py", "vllm/config/kv_events.py", "vllm/config/ec_transfer.py")
			if g.ran == "" {
				g.ran = parsed
			}
		}
		g.model, g.example = smallModel, "--max-model-len 8192 --gpu-memory-utilization 0.8"
		if g.ran == "" {
			g.ran = notRun
		}
		g.mistakes = append(g.mistakes, eventsMistake)
		if g.generate {
			g.mistakes = append(g.mistakes, scaleOutMistake)
		}
	}
	return guides
}

// serve writes the command and the environment that all vLLM engines share, and its
// transfer configuration, which is JSON.
func (p *Plan) serve(e *Engine, transfer any) {
	e.args("vllm", "serve", p.Model, "--host", e.bind, "--port", e.Port)
	if p.tp > 1 {
		e.args("--tensor-parallel-size", p.tp)
	}
	if e.Role == config.RoleEncode {
		e.args("--mm-encoder-only", "--enforce-eager", "--no-enable-prefix-caching",
			"--ec-transfer-config", p.encoderConfig("ec_producer"))
		return
	}
	if p.encode && e.Role == config.RolePrefill {
		e.args("--ec-transfer-config", p.encoderConfig("ec_consumer"))
	}
	e.args("--enable-prompt-tokens-details")
	if p.guide.generate {
		e.args("--enable-scale-out")
	}
	e.args("--kv-transfer-config", transfer, "--kv-events-config", object(
		"enable_kv_cache_events", true, "publisher", "zmq",
		"endpoint", fmt.Sprintf("tcp://*:%d", e.events()),
		"replay_endpoint", fmt.Sprintf("tcp://*:%d", e.events()+1), "topic", "kv"))
	e.key("kv_events", "tcp://"+e.address(e.events()))
	e.key("kv_replay", "tcp://"+e.address(e.events()+1))
}

// events is the port of the engine's KV events; the next port is for replays.
func (e *Engine) events() int { return eventsPort + 2*e.first }

// encoderConfig is the value of --ec-transfer-config. Encoder outputs pass through a
// folder. Source: distributed/ec_transfer/ec_connector/example_connector.py.
func (p *Plan) encoderConfig(role string) jsonText {
	return object("ec_connector", "ECExampleConnector", "ec_role", role,
		"ec_connector_extra_config", object("shared_storage_path", p.encoderFolder()))
}

func (p *Plan) encoderFolder() string {
	if len(p.hosts) > 1 {
		return sharedFolder
	}
	return encoderFolder
}

// kvRole is the engine's kv_role in a transfer between prefill and decode.
func (e *Engine) kvRole() string {
	if e.Role == config.RolePrefill {
		return "kv_producer"
	}
	return "kv_consumer"
}

// nixlChannel gives a NIXL engine the address of its side channel.
func (e *Engine) nixlChannel() {
	e.env("VLLM_NIXL_SIDE_CHANNEL_HOST", e.Host)
	e.env("VLLM_NIXL_SIDE_CHANNEL_PORT", e.port(sideChannel))
}

// What ran the commands of a quickstart.
const (
	notRun = "The engines were not run: they need GPUs."
	parsed = "`make test-flags` feeds each command to vLLM's own argument parser. The engines themselves were not run: they need GPUs."
	onCPU  = "`make test-flags` feeds each command to vLLM's own argument parser. `make test-quickstart` runs this page with real vLLM engines on a CPU: the start scripts, the configuration, the smoke test and the count of moved tokens."
)

func nixlGuide() *guide {
	return &guide{
		name: config.ConnectorVLLMNixl, connector: config.ConnectorVLLMNixl, flow: "prefill_first",
		title:   "vLLM, NixlConnector (pull)",
		summary: "Prefill computes the prompt and keeps the KV. Decode reads the KV over NIXL.",
		sources: []string{"vllm/distributed/kv_transfer/kv_connector/v1/nixl/"},
		install: []string{"pip install vllm nixl"},
		setUp: func(p *Plan, e *Engine) {
			if e.Role != config.RoleEncode {
				e.nixlChannel()
			}
			p.serve(e, object("kv_connector", "NixlConnector", "kv_role", e.kvRole()))
		},
		notes: []string{
			"On hosts with several networks, UCX chooses the network cards for the KV. `UCX_NET_DEVICES=mlx5_0:1` in the environment of both engines sets one.",
			"Prefill and decode need the same release of vLLM.",
		},
		mistakes: []mistake{sideChannelMistake("VLLM_NIXL_SIDE_CHANNEL_HOST")},
		ran:      onCPU,
	}
}

func nixlPushGuide() *guide {
	return &guide{
		name: config.ConnectorVLLMNixlPush, connector: config.ConnectorVLLMNixlPush, flow: "concurrent",
		title:   "vLLM, NixlPushConnector",
		summary: "Both engines get the request at the same time. Prefill writes the KV into the memory of decode over NIXL.",
		sources: []string{"vllm/distributed/kv_transfer/kv_connector/v1/nixl/"},
		install: []string{"pip install vllm nixl"},
		setUp: func(p *Plan, e *Engine) {
			if e.Role != config.RoleEncode {
				e.nixlChannel()
			}
			if e.Role != config.RolePrefill {
				p.serve(e, object("kv_connector", "NixlPushConnector", "kv_role", "kv_consumer"))
				return
			}
			p.serve(e, object("kv_connector", "NixlPushConnector", "kv_role", "kv_producer", "engine_id", e.Name))
			e.key("engine_id", e.Name)
			e.key("side_channel", e.address(e.port(sideChannel)))
			p.sized(e)
		},
		notes: []string{
			"`engine_id` of the configuration must equal `engine_id` of prefill's `--kv-transfer-config`. `side_channel` is prefill's `VLLM_NIXL_SIDE_CHANNEL_HOST` and `VLLM_NIXL_SIDE_CHANNEL_PORT`.",
			"`/v1/responses` runs on one engine with this connector.",
		},
		mistakes: []mistake{sideChannelMistake("VLLM_NIXL_SIDE_CHANNEL_HOST")},
		ran:      onCPU,
	}
}

// sized adds the tensor-parallel size, which the proxy cannot ask the engine for.
func (p *Plan) sized(e *Engine) {
	if p.tp > 1 {
		e.key("tp_size", p.tp)
	}
}

func moriioGuide(read bool) *guide {
	g := &guide{
		name: config.ConnectorVLLMMoRIIO, amd: true, flow: "concurrent", title: "vLLM, MoRIIOConnector in WRITE mode (AMD)",
		summary: "Both engines get the request at the same time. Prefill writes the KV of each layer into the memory of decode.",
		sources: []string{"vllm/distributed/kv_transfer/kv_connector/v1/moriio/moriio_common.py", "docs/features/moriio_connector_usage.md of vLLM's repository, commit 0236418c"},
		install: []string{
			"docker pull vllm/vllm-openai-rocm:latest # has vLLM and MoRI for AMD GPUs; run the commands inside of it",
		},
		notes: []string{
			"MoRI-IO needs AMD GPUs. On one host the KV moves over xGMI, between hosts over RDMA.",
			"Instead of `kv_address`, the engines can register at the proxy (`proxy_ip` and `proxy_ping_port`). See [discovery.md](" + discoveryPage + ").",
		},
		mistakes: []mistake{hostIPMistake("The engine then does not listen at the `kv_address` of the configuration, which both engines get from the proxy.")},
	}
	if read {
		g.name, g.flow, g.title = config.ConnectorVLLMMoRIIORead, "prefill_first", "vLLM, MoRIIOConnector in READ mode (AMD)"
		g.summary = "Prefill computes the prompt and keeps the KV. Decode reads the KV from the memory of prefill."
	}
	g.connector = g.name
	g.setUp = func(p *Plan, e *Engine) {
		if e.Env != nil { // else the engine has only its own GPUs
			e.env("HIP_VISIBLE_DEVICES", e.gpus)
		}
		if e.Role == config.RoleEncode {
			p.serve(e, nil)
			return
		}
		e.env("VLLM_HOST_IP", e.Host)
		// The documentation of the engine writes the ports as strings.
		extra := []any{
			"proxy_ip", "", "proxy_ping_port", "0", "http_port", fmt.Sprint(e.Port),
			"handshake_port", fmt.Sprint(e.ranked(handshakePort)), "notify_port", fmt.Sprint(e.ranked(notifyPort)),
		}
		if read {
			extra = append(extra, "read_mode", true)
		}
		if len(p.hosts) == 1 {
			extra = append(extra, "backend", "xgmi")
		}
		p.serve(e, object("kv_connector", "MoRIIOConnector", "kv_role", e.kvRole(), "kv_connector_extra_config", object(extra...)))
		e.key("kv_address", fmt.Sprintf("host:%s,handshake:%d,notify:%d", e.Host, e.ranked(handshakePort), e.ranked(notifyPort)))
		p.sized(e)
	}
	return g
}

func mooncakeGuide() *guide {
	return &guide{
		name: config.ConnectorVLLMMooncake, connector: config.ConnectorVLLMMooncake, flow: "concurrent",
		title:   "vLLM, MooncakeConnector",
		summary: "Both engines get the request at the same time. Prefill writes the KV into the memory of decode after it has computed the prompt.",
		sources: []string{"vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py", "docs/features/mooncake_connector_usage.md of vLLM's repository, commit 00f4240e"},
		install: []string{"pip install vllm mooncake-transfer-engine-cuda13 # with CUDA 12: mooncake-transfer-engine"},
		setUp: func(p *Plan, e *Engine) {
			if e.Role == config.RoleEncode {
				p.serve(e, nil)
				return
			}
			e.env("VLLM_HOST_IP", e.Host)
			transfer := []any{"kv_connector", "MooncakeConnector", "kv_role", e.kvRole()}
			if len(p.hosts) == 1 { // needs no RDMA
				transfer = append(transfer, "kv_connector_extra_config", object("mooncake_protocol", "tcp"))
			}
			if e.Role == config.RolePrefill {
				e.env("VLLM_MOONCAKE_BOOTSTRAP_PORT", e.port(bootstrapPort))
				defer e.key("bootstrap_port", e.port(bootstrapPort))
			}
			p.serve(e, object(transfer...))
		},
		notes: []string{
			"On one host the commands use `\"mooncake_protocol\":\"tcp\"`, which needs no RDMA. With several hosts (`--host`) they use Mooncake's default, RDMA.",
			"Do not set `engine_id`: decode never looks up a fixed id again after a restart of prefill.",
		},
		mistakes: []mistake{hostIPMistake("Mooncake then offers the KV at an address that the other engines may not reach.")},
	}
}
