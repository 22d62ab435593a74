package importer

import (
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// ProductionStack converts the flags of the router of vLLM's production stack. Names and
// defaults are those of src/vllm_router/parsers/parser.py.
func ProductionStack(f File) (Result, error) {
	r := &report{}
	programs := []string{"vllm-router", "vllm_router", "vllm_router.app", "app.py"}
	g := &gateway{
		flags: readFlags(r, f, programs, stackFlags()),
		doc:   &document{from: "the flags of the production stack's router"}, name: "the router", seen: map[string]bool{},
	}
	host, port := g.address("host", "0.0.0.0", "port", 8001)
	g.doc.set("server", "listen", text(net.JoinHostPort(host, port)), "--host, --port")
	g.stackEngines(g.stackPlace())
	if kind, ok := g.text("service-discovery"); ok && kind != "static" {
		g.stackPods(kind)
	}
	for _, name := range g.order {
		spec := g.specs[name]
		if spec.note != "" {
			g.doc.note("--"+name, "%s", spec.note)
		}
		if spec.trap != "" {
			g.warn(g.file, g.line(name), "--"+name, "%s", spec.trap)
		}
	}
	if g.doc.engines() == 0 && !g.on("service-discovery") && len(g.problems) == 0 {
		g.warn(g.file, 0, "", "the input names no engine")
	}
	return r.finish(f.Name, g.doc)
}

func stackFlags() map[string]flagSpec {
	specs := map[string]flagSpec{}
	for _, name := range []string{"host", "port", "service-discovery", "static-backends", "static-models", "static-model-labels",
		"prefill-model-labels", "decode-model-labels", "routing-logic", "session-key", "k8s-port", "k8s-namespace", "k8s-label-selector"} {
		specs[name] = flagSpec{arity: takesOne}
	}
	const stats = "metrics are on the admin address; the proxy logs no statistics"
	const sentry = "errors are in the log and in pdproxy_fallbacks_total"
	const files = "no files and batches are stored"
	const lmcache = "kv_aware follows the engines' KV events; there is no LMCache controller"
	const probes = "the proxy probes each engine with the cheap path of its connector: [health]"
	const trace = "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment of pdproxy"
	const file = "its content replaces flags: import the flags that it holds"
	maps.Copy(specs, map[string]flagSpec{
		"static-aliases":                       {arity: takesOne, note: "[[model]] alias_of gives a model another name", trap: "not imported: write it as [[model]] alias_of; until then clients must ask for the engine's own model name"},
		"static-model-types":                   {arity: takesOne, note: probes},
		"static-backend-health-checks":         {note: probes},
		"backend-health-check-timeout-seconds": {arity: takesOne, note: probes},
		"k8s-service-discovery-type":           {arity: takesOne, note: "endpoints of a Service are engines"},
		"k8s-watcher-timeout-seconds":          {arity: takesOne, note: "a watch is renewed without a gap"},
		"k8s-service-discovery-timeout":        {arity: takesOne, note: "a watch is renewed without a gap"},
		"lmcache-controller-port":              {arity: takesOne, note: lmcache},
		"lmcache-health-check-interval":        {arity: takesOne, note: lmcache},
		"lmcache-worker-timeout":               {arity: takesOne, note: lmcache},
		"kv-aware-threshold":                   {arity: takesOne, note: "kv_aware compares seconds of work, not matched tokens with a threshold"},
		"callbacks":                            {arity: takesOne, note: "a filter plugin sees requests and answers"},
		"request-rewriter":                     {arity: takesOne, note: "a filter plugin can change requests"},
		"enable-batch-api":                     {note: files},
		"file-storage-class":                   {arity: takesOne, note: files},
		"file-storage-path":                    {arity: takesOne, note: files},
		"batch-processor":                      {arity: takesOne, note: files},
		"engine-stats-interval":                {arity: takesOne, note: "loads are read with each probe: health.interval"},
		"request-stats-window":                 {arity: takesOne, note: stats},
		"log-stats":                            {note: stats},
		"log-stats-interval":                   {arity: takesOne, note: stats},
		"dynamic-config-yaml":                  {arity: takesOne, note: file, trap: "the file is not read"},
		"dynamic-config-json":                  {arity: takesOne, note: file, trap: "the file is not read"},
		"feature-gates":                        {arity: takesOne, note: "semantic caches and filters for personal data are plugins"},
		"semantic-cache-model":                 {arity: takesOne, note: "there is no semantic cache"},
		"semantic-cache-dir":                   {arity: takesOne, note: "there is no semantic cache"},
		"semantic-cache-threshold":             {arity: takesOne, note: "there is no semantic cache"},
		"log-level":                            {arity: takesOne, note: "is a flag of pdproxy run: --log-level debug, info, warn or error"},
		"sentry-dsn":                           {arity: takesOne, note: sentry},
		"sentry-traces-sample-rate":            {arity: takesOne, note: sentry},
		"sentry-profile-session-sample-rate":   {arity: takesOne, note: sentry},
		"otel-endpoint":                        {arity: takesOne, note: trace, trap: "pdproxy sends spans over HTTP (port 4318 of most collectors), the other proxy over gRPC (4317)"},
		"otel-service-name":                    {arity: takesOne, note: "set OTEL_SERVICE_NAME in the environment of pdproxy"},
		"otel-secure":                          {note: trace},
	})
	return specs
}

// stackPlace reads the routing logic and reports whether prefill and decode run on
// separate engines.
func (g *gateway) stackPlace() (disaggregated bool) {
	logic, ok := g.text("routing-logic")
	place, why := "round_robin", ""
	switch {
	case !ok:
		g.problem(g.file, 0, "--routing-logic", "is required")
	case logic == "roundrobin":
	case logic == "session":
		key, ok := g.text("session-key")
		if !ok {
			g.problem(g.file, g.line("routing-logic"), "--session-key", "is required with --routing-logic session")
		}
		place, why = "conversation", "sessions keep their engines by a table, not by a hash"
		g.doc.set("conversation", "headers", list([]string{key}), "--session-key")
	case logic == "prefixaware":
		place, why = "kv_aware", "the proxy remembers which engine has which prefix, and also counts queued work"
	case logic == "kvaware":
		place, why = "kv_aware", "by the engines' KV events where kv_events is set"
		g.warn(g.file, g.line("routing-logic"), "--routing-logic", "set kv_events of each engine (vLLM: --kv-events-config); without them the proxy assumes that an engine keeps the prompts that it was sent")
	case logic == "disaggregated_prefill":
		disaggregated, place, why = true, "least_load", "by requests and tokens in flight"
	case logic == "priority":
		place, why = "least_load", "the proxy has no priorities"
		g.warn(g.file, g.line("routing-logic"), "--routing-logic", "priority: the proxy does not order requests by priority")
	default:
		g.problem(g.file, g.line("routing-logic"), "--routing-logic", "want roundrobin, session, kvaware, prefixaware, disaggregated_prefill or priority")
	}
	g.doc.set("policy", "place", text(place), strings.TrimSuffix("--routing-logic "+printable(logic)+"; "+why, "; "))
	if disaggregated {
		g.warn(g.file, g.line("routing-logic"), "--routing-logic", "the router names no KV connector: vllm-store (engines share KV through LMCache) is assumed; with NIXL set connector = \"vllm-nixl\"")
	}
	return disaggregated
}

// stackEngines writes the static engines.
func (g *gateway) stackEngines(disaggregated bool) {
	backends, models, labels := g.items("static-backends"), g.items("static-models"), g.items("static-model-labels")
	if len(models) > 0 && len(models) != len(backends) {
		g.problem(g.file, g.line("static-models"), "--static-models", "holds %d models, and --static-backends %d URLs: each URL needs one", len(models), len(backends))
		return
	}
	if disaggregated && len(labels) != len(backends) {
		g.problem(g.file, g.line("static-model-labels"), "--static-model-labels", "holds %d labels, and --static-backends %d URLs: disaggregated_prefill needs one for each URL", len(labels), len(backends))
		return
	}
	for i, at := range backends {
		e := gatewayEngine{flag: "static-backends", at: at, name: "e" + strconv.Itoa(i), role: config.RoleBoth, connector: config.ConnectorNone}
		if disaggregated {
			e.role, e.connector = g.stackRole(labels[i]), config.ConnectorVLLMStore
			e.name = e.role[:1] + strconv.Itoa(i)
		}
		before := g.doc.engines()
		g.addEngine(e)
		if len(models) > 0 && g.doc.engines() > before {
			g.doc.sections[len(g.doc.sections)-1].set("model", text(models[i].text), "--static-models")
		}
	}
}

// stackRole returns the role of an engine with that label.
func (g *gateway) stackRole(label word) string {
	named := func(flag string) bool {
		return slices.ContainsFunc(g.items(flag), func(w word) bool { return w.text == label.text })
	}
	switch {
	case named("prefill-model-labels"):
		return config.RolePrefill
	case named("decode-model-labels"):
		return config.RoleDecode
	}
	g.problem(g.file, label.line, "--static-model-labels", "a label is neither in --prefill-model-labels nor in --decode-model-labels")
	return config.RoleBoth
}

// stackPods notes the settings of the discovery of pods.
func (g *gateway) stackPods(kind string) {
	if !strings.HasPrefix(kind, "k8s") {
		g.problem(g.file, g.line("service-discovery"), "--service-discovery", "want static or k8s")
		return
	}
	port, ok := g.integer("k8s-port", 1, 65535)
	if !ok {
		port = 8000
	}
	namespace, ok := g.text("k8s-namespace")
	if !ok {
		namespace = "default"
	}
	g.doc.note("--service-discovery k8s", "add a Service over the pods, and [[discovery.kubernetes.engine]] with url = \"http://SERVICE.%s:%d\"", namespace, port)
	if selector, ok := g.text("k8s-label-selector"); ok && selector != "" {
		g.doc.note("--k8s-label-selector", "%s: the selector of the Service", selector)
	}
	g.warn(g.file, g.line("service-discovery"), "--service-discovery", "the result lacks the engines that the router finds by label")
}
