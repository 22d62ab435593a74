package importer

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// ProductionStack converts the flags of the router of vLLM's production stack, or the values
// of its Helm chart. Names and defaults are those of src/vllm_router/parsers/parser.py and of
// helm/values.yaml of release 0.1.13; the content tells which one it is.
func ProductionStack(f File) (Result, error) {
	r := &report{}
	if !r.accepts(f, "production-stack") {
		return Result{}, r.problems
	}
	g := &gateway{doc: &document{from: "the flags of the production stack's router"}, name: "the router", seen: map[string]bool{}}
	values, isValues := chartValues(r, f, "routerSpec", "servingEngineSpec")
	switch {
	case len(r.problems) > 0:
		return r.finish(f.Name, g.doc)
	case isValues:
		g.doc.from = "the Helm values of the production stack"
		g.flags = &flags{report: r, file: f.Name, specs: stackFlags(), uses: map[string][]use{}, names: map[string]string{}}
		v := &stackValues{yamlFile: values.yamlFile, gateway: g}
		v.read(values)
	default:
		g.flags = readFlags(r, f, programsOf("production-stack"), stackFlags())
		if len(g.order) > 0 {
			g.stack(g.stackLabels)
		}
	}
	return r.finish(f.Name, g.doc)
}

// stack reads the flags. pods adds the patterns of the engines in Kubernetes.
func (g *gateway) stack(pods func(stackLogic)) {
	host, port := g.address("host", "0.0.0.0", "port", 8001)
	g.doc.set("server", "listen", text(net.JoinHostPort(host, port)), g.key("host")+", "+g.key("port"))
	logic := g.stackPlace()
	g.stackEngines(logic)
	if n, ok := g.integer("max-instance-failover-reroute-attempts", 0, 999); ok {
		g.doc.set("retry", "attempts", number(n+1), g.key("max-instance-failover-reroute-attempts")+" and the first try")
	}
	kind, ok := g.text("service-discovery")
	switch {
	case !ok || kind == "static" || kind == "external-only":
	case strings.HasPrefix(kind, "k8s"):
		pods(logic)
		g.warn(g.file, g.line("service-discovery"), g.key("service-discovery"), samplePods)
	default:
		g.problem(g.file, g.line("service-discovery"), g.key("service-discovery"), "want static, k8s or external-only")
	}
	g.dropped(g.doc)
	if g.doc.engines() == 0 && !strings.HasPrefix(kind, "k8s") && len(g.problems) == 0 {
		g.warn(g.file, 0, "", "the input names no engine")
	}
}

func stackFlags() map[string]flagSpec {
	specs := oneValue("host", "port", "service-discovery", "static-backends", "static-models", "static-model-labels", "static-aliases",
		"prefill-model-labels", "decode-model-labels", "routing-logic", "session-key", "k8s-port", "k8s-namespace", "k8s-label-selector",
		"max-instance-failover-reroute-attempts")
	const stats = "metrics are on the admin address; the proxy logs no statistics"
	const sentry = "errors are in the log and in pdproxy_fallbacks_total"
	const files = "the proxy stores no files and batches: requests to /v1/files and /v1/batches get 404"
	const lmcache = "kv_aware follows the engines' KV events; there is no LMCache controller"
	const probes = "the proxy probes each engine with the cheap path of its connector: [health]"
	const trace = "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment of pdproxy"
	const file = "the file is not read, and its content replaces flags: import the flags that it holds"
	const semantic = "there is no semantic cache: an engine computes each answer"
	const watch = "a watch is renewed without a gap"
	maps.Copy(specs, map[string]flagSpec{
		"static-model-types":                          noted(probes),
		"static-backend-health-checks":                {note: probes},
		"static-backend-health-check-interval":        noted(probes),
		"static-backend-health-check-timeout-seconds": noted(probes),
		"backend-health-check-timeout-seconds":        noted(probes),
		"k8s-service-discovery-type":                  noted("the endpoints of a Service are engines; the proxy calls each pod by its address"),
		"k8s-watcher-timeout-seconds":                 noted(watch),
		"k8s-service-discovery-timeout":               noted(watch),
		"lmcache-controller-port":                     noted(lmcache),
		"lmcache-controller-reply-port":               noted(lmcache),
		"lmcache-controller-heartbeat-port":           noted(lmcache),
		"lmcache-health-check-interval":               noted(lmcache),
		"lmcache-worker-timeout":                      noted(lmcache),
		"kv-aware-threshold":                          noted("kv_aware compares seconds of work, not matched tokens with a threshold"),
		"prefix-min-match-length":                     {arity: takesOne, off: []string{"0"}, note: "kv_aware compares seconds of work, and counts a short match for as much as it saves"},
		"root-path":                                   lostFlag("the proxy serves its routes at / only: clients that send this path before /v1 get 404", "/"),
		"callbacks":                                   lostFlag("the proxy runs no Python callbacks: a filter plugin can see and change requests and answers"),
		"request-rewriter":                            lostFlag("the proxy does not rewrite requests: a filter plugin can change them", "noop"),
		"enable-batch-api":                            {note: files, lost: true},
		"file-storage-class":                          noted(files),
		"file-storage-path":                           noted(files),
		"batch-processor":                             noted(files),
		"engine-stats-interval":                       noted("loads are read with each probe: health.interval"),
		"request-stats-window":                        noted(stats),
		"log-stats":                                   {note: stats},
		"log-stats-interval":                          noted(stats),
		"dynamic-config-yaml":                         lostFlag(file),
		"dynamic-config-json":                         lostFlag(file),
		"external-providers-config":                   lostFlag("the file is not read: write each provider as [[remote]], and its model as fallback of a [[model]]"),
		"feature-gates":                               lostFlag("semantic caches and the search for personal data are not part of the proxy: a filter plugin can do both"),
		"semantic-cache-model":                        noted(semantic),
		"semantic-cache-dir":                          noted(semantic),
		"semantic-cache-threshold":                    noted(semantic),
		"log-level":                                   noted("is a flag of pdproxy run: --log-level debug, info, warn or error"),
		"log-format":                                  noted("is a flag of pdproxy run: --log-format text or json"),
		"sentry-dsn":                                  noted(sentry),
		"sentry-traces-sample-rate":                   noted(sentry),
		"sentry-profile-session-sample-rate":          noted(sentry),
		"otel-endpoint":                               {arity: takesOne, note: trace, trap: "pdproxy sends spans over HTTP (port 4318 of most collectors), the other proxy over gRPC (4317)"},
		"otel-service-name":                           noted("set OTEL_SERVICE_NAME in the environment of pdproxy"),
		"otel-secure":                                 {arity: takesSwitch, note: trace},
	})
	return specs
}

// stackLogic is a value of --routing-logic.
type stackLogic struct {
	place, why string
	// connector is that of separate engines for prefill and decode; "": engines serve whole
	// requests.
	connector string
	trap      string
}

// stackLogics are the values of --routing-logic in src/vllm_router/parsers/parser.py, release
// 0.1.13; their meaning is in src/vllm_router/routers/routing_logic.py.
func stackLogics() map[string]stackLogic {
	return map[string]stackLogic{
		"roundrobin":  {place: "round_robin"},
		"session":     {place: "conversation", why: "sessions keep their engines by a table, not by a hash"},
		"prefixaware": {place: "kv_aware", why: "the proxy remembers which engine has which prefix, and also counts queued work"},
		"loadaware":   {place: "kv_aware", why: "the cached part of the prompt against the load, in seconds of work instead of shares"},
		"kvaware": {place: "kv_aware", why: "by the engines' KV events where kv_events is set",
			trap: "set kv_events of each engine (vLLM: --kv-events-config); without them the proxy assumes that an engine keeps the prompts that it was sent"},
		"priority": {place: "least_load", why: "the class of a request decides its place in the queue: [[priority_class]]",
			trap: "name the classes of clients by [[priority_class]] and limits.priority_header: without them all requests have one class"},
		// The router sends two requests and passes no kv_transfer_params: the engines share KV
		// through LMCache.
		"disaggregated_prefill": {place: "least_load", why: "by requests and tokens in flight", connector: config.ConnectorVLLMStore,
			trap: "the router names no KV connector: vllm-store (engines share KV through LMCache) is assumed; with NIXL set connector = \"vllm-nixl\""},
		// The router passes the kv_transfer_params of the prefill's answer to decode and takes
		// turns on both sides.
		"disaggregated_prefill_orchestrated": {place: "round_robin", connector: config.ConnectorVLLMNixl},
	}
}

// stackPlace reads the routing logic.
func (g *gateway) stackPlace() stackLogic {
	name, ok := g.text("routing-logic")
	logics := stackLogics()
	logic, known := logics[name]
	switch {
	case !ok:
		g.problem(g.file, 0, g.key("routing-logic"), "is required")
		return logic
	case !known:
		g.problem(g.file, g.line("routing-logic"), g.key("routing-logic"), "want one of %s", strings.Join(slices.Sorted(maps.Keys(logics)), ", "))
		return logic
	}
	if name == "session" {
		key, ok := g.text("session-key")
		if !ok || key == "" {
			g.problem(g.file, g.line("routing-logic"), g.key("session-key"), "is required with the routing logic session")
		}
		g.doc.set("conversation", "headers", list([]string{key}), g.key("session-key"))
	}
	g.doc.set("policy", "place", text(logic.place), strings.TrimSuffix(g.key("routing-logic")+" "+name+"; "+logic.why, "; "))
	if logic.trap != "" {
		g.warn(g.file, g.line("routing-logic"), g.key("routing-logic"), "%s", logic.trap)
	}
	return logic
}

// stackEngines writes the static engines.
func (g *gateway) stackEngines(logic stackLogic) {
	backends, models, labels := g.items("static-backends"), g.items("static-models"), g.items("static-model-labels")
	if len(models) > 0 && len(models) != len(backends) {
		g.problem(g.file, g.line("static-models"), g.key("static-models"), "holds %d models, and %s %d URLs: each URL needs one", len(models), g.key("static-backends"), len(backends))
		return
	}
	if logic.connector != "" && len(labels) != len(backends) {
		g.problem(g.file, g.line("static-model-labels"), g.key("static-model-labels"), "holds %d labels, and %s %d URLs: the routing logic needs one for each URL", len(labels), g.key("static-backends"), len(backends))
		return
	}
	for i, at := range backends {
		e := gatewayEngine{flag: "static-backends", at: at, name: "e" + strconv.Itoa(i), role: config.RoleBoth, connector: config.ConnectorNone}
		if logic.connector != "" {
			role, ok := g.stackRole(labels[i].text)
			if !ok {
				g.problem(g.file, labels[i].line, g.key("static-model-labels"), "a label is neither in %s nor in %s", g.key("prefill-model-labels"), g.key("decode-model-labels"))
			}
			e.role, e.connector = role, logic.connector
			e.name = e.role[:1] + strconv.Itoa(i)
		}
		before := g.doc.engines()
		g.addEngine(e)
		if len(models) > 0 && g.doc.engines() > before {
			g.doc.sections[len(g.doc.sections)-1].set("model", text(models[i].text), g.key("static-models"))
		}
	}
	g.stackAliases()
}

// stackAliases reads the names of models: --static-aliases gpt:llama,other:mistral.
func (g *gateway) stackAliases() {
	for _, at := range g.items("static-aliases") {
		name, model, ok := strings.Cut(at.text, ":")
		if !ok {
			g.problem(g.file, at.line, g.key("static-aliases"), "want ALIAS:MODEL, separated by commas")
			continue
		}
		m := g.doc.add("model")
		m.set("name", text(name), g.key("static-aliases"))
		m.set("alias_of", text(model), "")
	}
}

// stackRole returns the role of an engine with that label.
func (g *gateway) stackRole(label string) (role string, ok bool) {
	switch {
	case slices.Contains(texts(g.items("prefill-model-labels")), label):
		return config.RolePrefill, true
	case slices.Contains(texts(g.items("decode-model-labels")), label):
		return config.RoleDecode, true
	}
	return config.RoleBoth, false
}

// stackLabels adds the patterns of the engines that the router finds by the label model of
// their pods.
func (g *gateway) stackLabels(logic stackLogic) {
	port, ok := g.integer("k8s-port", 1, 65535)
	if !ok {
		port = 8000
	}
	namespace, ok := g.text("k8s-namespace")
	if !ok {
		namespace = "default"
	}
	selector, _ := g.text("k8s-label-selector")
	g.doc.kubernetes(namespace, selector)
	add := func(name, role, connector, comment string) {
		g.doc.pattern(pattern{name: name, service: name, namespace: namespace, port: port, role: role, connector: connector, comment: comment})
	}
	if logic.connector == "" {
		add("vllm", config.RoleBoth, config.ConnectorNone, "a Service whose selector is "+cmp.Or(selector, "that of the engines"))
		return
	}
	labels := slices.Concat(g.items("prefill-model-labels"), g.items("decode-model-labels"))
	if len(labels) == 0 {
		g.problem(g.file, g.line("routing-logic"), g.key("prefill-model-labels"), "is required with this routing logic, and %s", g.key("decode-model-labels"))
	}
	for _, label := range labels {
		role, _ := g.stackRole(label.text)
		add(label.text, role, logic.connector, "a Service whose selector is model="+label.text)
	}
}
