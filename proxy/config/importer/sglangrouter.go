package importer

import (
	"maps"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// SGLangRouter converts the flags of SGLang's model gateway, also known as
// sglang-router, smg and amg: those of its Rust program (sgl-model-gateway/src/main.rs)
// and of its Python launcher (bindings/python/src/sglang_router/router_args.py).
func SGLangRouter(f File) (Result, error) {
	r := &report{}
	if !r.accepts(f, "sglang-router") {
		return Result{}, r.problems
	}
	g := &gateway{
		flags: readFlags(r, f, programsOf("sglang-router"), sglangFlags()),
		doc:   &document{from: "the flags of SGLang's model gateway"}, name: "sglang-router", seen: map[string]bool{},
		defaults: gatewayDefaults{host: "0.0.0.0", metrics: "0.0.0.0", grace: 180,
			headers: []string{"X-SMG-Routing-Key"}},
	}
	g.disaggregated = g.pairsWanted("pd-disaggregation")
	if g.disaggregated {
		g.pairs(config.ConnectorSGLang, true, 0)
	} else {
		g.workers(0)
	}
	g.place([]string{"random", "round_robin", "cache_aware", "power_of_two", "prefix_hash", "consistent_hashing", "manual", "bucket", "least_load", "passthrough"})
	g.tls()
	g.sglangBackend()
	g.sharedWarnings()
	g.sglangTraps()
	g.common()
	return r.finish(f.Name, g.doc)
}

func sglangFlags() map[string]flagSpec {
	specs := sharedFlags()
	specs["pd-disaggregation"] = flagSpec{}
	specs["dp-aware"] = flagSpec{}
	specs["ca-cert-paths"] = flagSpec{arity: takesMany}
	for _, name := range []string{"shutdown-grace-period-secs", "tls-cert-path", "tls-key-path", "runtime"} {
		specs[name] = flagSpec{arity: takesOne}
	}
	const manual = "a conversation keeps its engine as long as the table of conversation.capacity entries has it"
	const prefix = "pdproxy matches whole blocks of the prompt"
	const tokenCache = "the cache of token ids is always on and has 4194304 ids"
	const tokenizer = "[tokens] files names a tokenizer.json by model, for plain prompts; chats are tokenized by the engines"
	const store = "pdproxy stores no conversations and responses"
	const parsers = "engines parse reasoning and tool calls themselves"
	const jwt = "clients show keys (server.auth.keys_file) or certificates (server.tls.client_ca); the admin address has one token"
	const trap = "pdproxy does not authenticate callers this way: see server.auth.keys_file and admin.token_file"
	const encode = "engines that only encode images are not placed"
	const mesh = "proxies share their state through [fleet]"
	maps.Copy(specs, map[string]flagSpec{
		"prefix-token-count": noted(prefix), "prefix-hash-load-factor": noted(prefix),
		"max-idle-secs": noted(manual), "assignment-mode": noted(manual), "redis-key-prefix": noted(manual),
		"bucket-adjust-interval-secs": noted("kv_aware keeps the work of all engines even"),
		"prometheus-duration-buckets": {arity: takesMany, note: "the buckets are fixed"},
		"disable-health-check":        {note: "pdproxy always probes engines, by calls that generate nothing"},
		"client-cert-path":            {arity: takesOne, lost: true, note: "pdproxy shows engines no certificate: engines that want one refuse the proxy"},
		"client-key-path":             noted("pdproxy shows engines no certificate"),
		"model-path":                  noted(tokenizer), "tokenizer-path": noted(tokenizer), "chat-template": noted(tokenizer),
		"tokenizer-cache-enable-l0": {note: tokenCache}, "tokenizer-cache-enable-l1": {note: tokenCache},
		"tokenizer-cache-l0-max-entries": noted(tokenCache), "tokenizer-cache-l1-max-memory": noted(tokenCache),
		"reasoning-parser": noted(parsers), "tool-call-parser": noted(parsers),
		"mcp-config-path": {arity: takesOne, lost: true, note: "pdproxy calls no tools: requests that rely on the tools of these servers get no results from them"},
		"enable-wasm":     {note: "the router's modules are components of another interface; pdproxy's filters are proxy-wasm modules, [[plugin]]"},
		"enable-mesh":     {note: mesh}, "mesh-server-name": noted(mesh), "mesh-host": noted(mesh), "mesh-port": noted(mesh),
		"mesh-advertise-host":   noted(mesh),
		"mesh-peer-urls":        {arity: takesMany, note: mesh},
		"log-json":              {note: "is a flag of pdproxy run: --log-format json"},
		"load-monitor-interval": noted("health.load_interval"),
		"served-model-name":     noted("pdproxy uses the model names that an engine reports; engine.model sets one"),
		"epd-disaggregation":    {note: encode, lost: true}, "encode": {arity: takesURL, note: encode},
		"encode-policy": noted(encode), "encode-selector": {arity: takesMany, note: encode},
		"oracle-wallet-path": noted(store), "oracle-tns-alias": noted(store), "oracle-dsn": noted(store), "oracle-connect-descriptor": noted(store),
		"oracle-user": noted(store), "oracle-username": noted(store), "oracle-password": noted(store), "oracle-pool-min": noted(store),
		"oracle-pool-max": noted(store), "oracle-pool-timeout-secs": noted(store), "postgres-db-url": noted(store),
		"postgres-pool-max": noted(store), "postgres-pool-max-size": noted(store), "redis-url": noted(store), "redis-pool-max": noted(store),
		"redis-retention-days": noted(store),
		"jwt-issuer":           {arity: takesOne, note: trap, lost: true}, "jwt-audience": noted(jwt), "jwt-jwks-uri": noted(jwt),
		"jwt-role-claim": noted(jwt), "jwt-role-mapping": {arity: takesMany, note: jwt},
		"control-plane-api-keys": {arity: takesMany, note: trap, lost: true},
		"disable-audit-logging":  {note: jwt}, "control-plane-audit-enabled": {note: jwt},
	})
	return specs
}

// tls reads the certificate of the public side.
func (g *gateway) tls() {
	cert, hasCert := g.text("tls-cert-path")
	key, hasKey := g.text("tls-key-path")
	if hasCert != hasKey {
		g.problem(g.file, max(g.line("tls-cert-path"), g.line("tls-key-path")), "--tls-cert-path, --tls-key-path", "each needs the other")
		return
	}
	if hasCert {
		g.doc.set("server.tls", "cert", text(cert), "--tls-cert-path")
		g.doc.set("server.tls", "key", text(key), "--tls-key-path")
	}
	if cas := g.all("ca-cert-paths"); len(cas) > 1 {
		g.doc.note(g.line("ca-cert-paths"), "--ca-cert-paths", "engine.ca is one file: put the certificates of all %d into one", len(cas))
	}
}

// sglangBackend checks the kind of the engines.
func (g *gateway) sglangBackend() {
	for _, flag := range []string{"backend", "runtime"} {
		switch b, ok := g.text(flag); {
		case !ok || b == "sglang":
		case b == "openai" || b == "vllm" || b == "trtllm" || b == "anthropic":
			g.doc.note(g.line(flag), "--"+flag, "%s: every engine of connector none is called as an OpenAI endpoint", b)
			if g.disaggregated {
				g.warn(g.file, g.line(flag), "--"+flag, "the result has connector sglang: set another connector for other engines")
			}
		default:
			g.problem(g.file, g.line(flag), "--"+flag, "want sglang, vllm, trtllm, openai or anthropic")
		}
	}
}

// sglangTraps warns about known faults of the gateway.
func (g *gateway) sglangTraps() {
	if !g.on("dp-aware") {
		return
	}
	g.doc.note(g.line("dp-aware"), "--dp-aware", "pdproxy reads each engine's number of ranks (engine.ranks) and always chooses one")
	if g.disaggregated {
		g.warn(g.file, g.line("dp-aware"), "--dp-aware", "with the engines' default load balance method most pairs fail in the router (follow_bootstrap_room conflict); pdproxy's ids contain the rank")
	}
}
