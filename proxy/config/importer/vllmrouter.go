package importer

import (
	"maps"
	"net"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// VLLMRouter converts the flags of vllm-router (vllm-project/router): those of its Rust
// program (src/main.rs) and of its Python launcher (py_src/vllm_router/router_args.py).
func VLLMRouter(f File) (Result, error) {
	r := &report{}
	if !r.accepts(f, "vllm-router") {
		return Result{}, r.problems
	}
	g := &gateway{
		flags: readFlags(r, f, programsOf("vllm-router"), vllmFlags()),
		doc:   &document{from: "the flags of vllm-router"}, name: "vllm-router", seen: map[string]bool{},
		defaults: gatewayDefaults{host: "127.0.0.1", metrics: "127.0.0.1", concurrent: 32768,
			fields: []string{"session_params.session_id"}},
	}
	// Earlier versions had two flags under the names that they have in SGLang's gateway.
	split := "vllm-pd-disaggregation"
	if g.on("pd-disaggregation") {
		split = "pd-disaggregation"
	}
	g.disaggregated = g.pairsWanted(split)
	ranks, ok := g.integer("intra-node-data-parallel-size", 1, 1<<16)
	if !ok {
		ranks, _ = g.integer("data-parallel-size", 1, 1<<16)
	}
	if g.disaggregated {
		g.vllmPairs(ranks)
	} else {
		g.workers(ranks)
	}
	g.place([]string{"random", "round_robin", "cache_aware", "power_of_two", "consistent_hash", "rendezvous_hash", "sticky_least_loaded", "sticky_round_robin"})
	g.vllmBackend()
	g.sharedWarnings()
	g.common()
	return r.finish(f.Name, g.doc)
}

func vllmFlags() map[string]flagSpec {
	specs := sharedFlags()
	specs["vllm-pd-disaggregation"], specs["pd-disaggregation"] = flagSpec{}, flagSpec{}
	for _, name := range []string{"vllm-discovery-address", "kv-connector", "intra-node-data-parallel-size", "data-parallel-size", "runtime"} {
		specs[name] = flagSpec{arity: takesOne}
	}
	const wasm = "the router's modules are components of another interface; pdproxy's filters are proxy-wasm modules, [[plugin]]"
	const trace = "OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG in the environment of pdproxy"
	maps.Copy(specs, map[string]flagSpec{
		"api-key-validation-urls": {arity: takesMany, lost: true,
			note: "pdproxy calls no URL to check clients' keys: without server.auth.keys_file or [[jwt]] any client may call"},
		"dp-aware":                       {note: "pdproxy always chooses a rank of an engine with several (engine.ranks)"},
		"epd-config":                     {arity: takesOne, lost: true, note: "add the encoders as engines of role encode: without them prefill engines encode images"},
		"profile":                        {note: "pdproxy starts no profiling on engines"},
		"otel-sampling-ratio":            {arity: takesOne, note: trace},
		"otel-excluded-paths":            {arity: takesMany, note: "only exchanges have spans"},
		"enable-program-scheduling":      {note: "place = \"conversation\" keeps the turns of a program together"},
		"program-scheduling-config-json": {arity: takesOne, note: "place = \"conversation\" keeps the turns of a program together"},
		"wasm-middleware":                {arity: takesOne, note: wasm, lost: true},
		"wasm-middleware-sha256":         {arity: takesOne, note: wasm},
		"wasm-middleware-route":          {arity: takesOne, note: wasm},
	})
	return specs
}

// vllmPairs adds the prefill and decode engines, or the address where they register.
func (g *gateway) vllmPairs(ranks int) {
	kind, ok := g.text("kv-connector")
	if !ok {
		kind = "nixl"
	}
	connector := map[string]string{"nixl": config.ConnectorVLLMNixl, "mooncake": config.ConnectorVLLMMooncake, "moriio": config.ConnectorVLLMMoRIIO}[kind]
	address, discovered := g.text("vllm-discovery-address")
	switch {
	case connector == "":
		g.problem(g.file, g.line("kv-connector"), "--kv-connector", "want nixl, mooncake or moriio")
	case kind == "moriio" && !discovered:
		g.problem(g.file, g.line("kv-connector"), "--kv-connector", "moriio needs --vllm-discovery-address")
	}
	if discovered {
		g.discovery(address)
	}
	if !discovered && !g.on("service-discovery") && (!g.on("prefill") || !g.on("decode")) {
		g.problem(g.file, g.line("vllm-pd-disaggregation"), "--vllm-pd-disaggregation", "needs --prefill and --decode, --vllm-discovery-address, or --service-discovery")
	}
	if kind == "nixl" && len(g.uses["prefill"]) > 0 && len(g.all("prefill")) > len(g.uses["prefill"]) {
		g.doc.note(g.line("prefill"), "--prefill", "the bootstrap port after the URL has no effect with NIXL, in both proxies")
	}
	g.pairs(connector, kind == "mooncake", ranks)
}

// discovery reads the ZMQ socket at which engines register.
func (g *gateway) discovery(address string) {
	address = strings.TrimPrefix(address, "tcp://")
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		g.problem(g.file, g.line("vllm-discovery-address"), "--vllm-discovery-address", "want host:port")
		return
	}
	g.doc.set("discovery.moriio", "listen", text("tcp://"+address), "--vllm-discovery-address")
	if !loopback(host) {
		g.doc.set("discovery.moriio", "open", value("true"), "engines on other machines register")
		g.warn(g.file, g.line("vllm-discovery-address"), "--vllm-discovery-address", "registrations are not authenticated: any host that can reach the address can register as an engine and receive prompts")
	}
}

// vllmBackend warns about backends other than vLLM.
func (g *gateway) vllmBackend() {
	for _, flag := range []string{"backend", "runtime"} {
		switch b, ok := g.text(flag); {
		case !ok || b == "vllm":
		case b == "openai":
			g.doc.note(g.line(flag), "--"+flag, "openai: every engine of connector none is called as an OpenAI endpoint")
		case b == "trtllm" || b == "anthropic":
			g.warn(g.file, g.line(flag), "--"+flag, "%s has no effect in the router: both proxies route requests as for vllm", b)
		default:
			g.problem(g.file, g.line(flag), "--"+flag, "want vllm, trtllm, openai or anthropic")
		}
	}
}
