package importer

import (
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// stackValues reads the values of the production stack's chart: routerSpec as the flags that
// helm/templates/deployment-router.yaml makes of it, and servingEngineSpec for the names of the
// engines' Services (helm/templates/service-vllm.yaml).
type stackValues struct {
	yamlFile
	*gateway
	models []stackModel
	port   int // of the engines' containers
}

// stackModel is an entry of servingEngineSpec.modelSpec.
type stackModel struct{ name, model string }

// stackRelease is the release of the chart's own tutorials. Values do not contain it.
const stackRelease = "vllm"

// stackKeys are the keys of routerSpec that the chart gives to the router as flags.
func stackKeys() map[string]string {
	return map[string]string{
		"containerPort": "port", "serviceDiscovery": "service-discovery", "k8sServiceDiscoveryType": "k8s-service-discovery-type",
		"staticBackends": "static-backends", "staticModels": "static-models", "routingLogic": "routing-logic", "sessionKey": "session-key",
		"prefixMinMatchLength": "prefix-min-match-length", "rootPath": "root-path",
		"engineScrapeInterval": "engine-stats-interval", "requestStatsWindow": "request-stats-window",
		"lmcacheControllerPort": "lmcache-controller-port", "lmcacheControllerReplyPort": "lmcache-controller-reply-port",
		"lmcacheControllerHeartbeatPort": "lmcache-controller-heartbeat-port",
	}
}

func (v *stackValues) read(values *values) {
	values.others(v.doc, "is not of the router: the chart keeps it")
	engines, at, found := v.yamlFile.sub(values.table, "servingEngineSpec")
	if found {
		v.engines(engines)
		v.doc.note(at.line, engines.path, "the chart goes on to run the engines: set routerSpec.enableRouter = false, and keep the rest")
	}
	router, _, _ := v.yamlFile.sub(values.table, "routerSpec")
	v.router(router)
	v.apiKey(engines)
	v.apiKey(router)
	v.stack(v.services)
	deployment := "configures the pods of the old router: the values of pdproxy's own chart configure those of pdproxy"
	for _, e := range router.entries {
		if !emptyValues(e.value) {
			v.doc.note(e.line, router.name(e.key), "%s", deployment)
		}
	}
	for _, e := range values.entries {
		v.doc.note(e.line, values.name(e.key), "is not of the router: the chart keeps it")
	}
}

// router reads routerSpec as flags.
func (v *stackValues) router(router *table) {
	for key, flag := range stackKeys() {
		v.names[flag] = router.name(key)
	}
	for _, e := range slices.Clone(router.entries) {
		flag, known := stackKeys()[e.key]
		if !known {
			continue
		}
		router.take(e.key)
		if n := resolve(e.value); n.Kind != yaml.ScalarNode {
			v.wrong(router, e, "one value")
		} else if n.ShortTag() != "!!null" && n.Value != "" {
			v.add(flag, use{e.line, []word{{text: n.Value, line: e.line}}})
		}
	}
	if !v.on("port") {
		v.add("port", use{0, []word{{text: "8000"}}})
	}
	if !v.on("service-discovery") {
		v.add("service-discovery", use{0, []word{{text: "k8s"}}})
	}
	if !v.on("routing-logic") {
		v.add("routing-logic", use{0, []word{{text: "roundrobin"}}})
	}
	v.otel(router)
	extra, _, _ := v.yamlFile.list(router, "extraArgs")
	for words := scalars(&v.yamlFile, extra, router.name("extraArgs")); len(words) > 0; {
		words = v.take(words)
	}
	v.repeated()
}

// otel reads routerSpec.otel, which has no effect without an endpoint.
func (v *stackValues) otel(router *table) {
	otel, _, _ := v.yamlFile.sub(router, "otel")
	if e, found := otel.find("endpoint"); !found || resolve(e.value).Value == "" {
		return
	}
	for _, k := range []struct{ key, flag string }{{"endpoint", "otel-endpoint"}, {"serviceName", "otel-service-name"}, {"secure", "otel-secure"}} {
		v.names[k.flag] = otel.name(k.key)
		if e, found := otel.take(k.key); found {
			v.add(k.flag, use{e.line, []word{{text: resolve(e.value).Value, line: e.line}}})
		}
	}
}

// apiKey reads vllmApiKey of servingEngineSpec or routerSpec: engines refuse requests without
// this key, and clients send it.
func (v *stackValues) apiKey(t *table) {
	e, found := t.take("vllmApiKey")
	if !found || emptyValues(e.value) {
		return
	}
	v.lose(v.doc, v.file, e.line, t.name("vllmApiKey"), "clients send this key, and engines check it; pdproxy import writes no keys: put it into a file, name the file in api_key_file of the engines, and list the clients' keys in server.auth.keys_file")
}

// engines reads the names of the engines' Services and of their models.
func (v *stackValues) engines(t *table) {
	v.port = 8000
	if n, _, ok := v.yamlFile.integer(t, "containerPort", 1, 65535); ok {
		v.port = n
	}
	if on, e, ok := v.boolean(t, "enableEngine"); ok && !on {
		v.warn(v.file, e.line, t.name("enableEngine"), "the chart runs no engines: name your own engines as [[engine]]")
		return
	}
	nodes, _, _ := v.yamlFile.list(t, "modelSpec")
	for _, node := range nodes {
		spec := v.table(t.name("modelSpec"), node)
		name, _, ok := v.yamlFile.text(spec, "name")
		on, _, given := v.boolean(spec, "enabled")
		model, _, _ := v.yamlFile.text(spec, "modelURL")
		switch {
		case given && !on:
		case !ok:
			v.problem(v.file, node.Line, t.name("modelSpec.name"), "is required")
		default:
			v.models = append(v.models, stackModel{name, model})
		}
	}
}

// services adds the pattern of the Service of each model.
func (v *stackValues) services(logic stackLogic) {
	if len(v.models) == 0 {
		v.stackLabels(logic)
		return
	}
	v.doc.kubernetes("", "")
	for _, m := range v.models {
		p := pattern{name: m.name, service: stackRelease + "-" + m.name + "-engine-service", port: v.port, role: config.RoleBoth,
			connector: config.ConnectorNone, model: m.model, comment: "the Service RELEASE-" + m.name + "-engine-service of the chart, here of the release " + stackRelease}
		if logic.connector != "" {
			role, ok := v.stackRole(m.name)
			if !ok {
				v.problem(v.file, v.line("routing-logic"), v.key("routing-logic"), "the model %s is neither in --prefill-model-labels nor in --decode-model-labels of extraArgs", text(m.name))
			}
			p.role, p.connector = role, logic.connector
		}
		v.doc.pattern(p)
	}
}
