package importer

import (
	"cmp"
	"encoding/json"
	"net"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// llmdValues reads the values of llm-d's charts:
//
//   - inferencepool of the Inference Extension (config/charts/inferencepool), with
//     inferenceExtension and inferencePool;
//   - llm-d-router (llm-d-router, config/charts/routerlib), with router;
//   - llm-d-modelservice (llm-d-modelservice, charts/llm-d-modelservice), with modelArtifacts,
//     routing, prefill and decode.
type llmdValues struct {
	yamlFile
	doc *document
}

// llmdValueKeys are keys that only these charts have.
func llmdValueKeys() []string {
	return []string{"inferenceExtension", "inferencePool", "router", "modelArtifacts"}
}

func (l *llmdValues) read(v *values) {
	const chart = "is not of the picker: the chart keeps it"
	v.others(l.doc, chart)
	extension, at, found := l.sub(v.table, "inferenceExtension")
	pool, _, hasPool := l.sub(v.table, "inferencePool")
	router, _, isRouter := l.sub(v.table, "router")
	switch {
	case isRouter:
		l.doc.from = "the values of llm-d's router chart"
		epp, at, _ := l.sub(router, "epp")
		servers, _, _ := l.sub(router, "modelServers")
		predictor, e, _ := l.sub(router, "latencyPredictor")
		predicts, _, _ := l.boolean(predictor, "enabled")
		if predicts {
			l.doc.note(e.line, router.name("latencyPredictor"), "the proxy predicts times by the measured ones of each engine: its servers are not needed")
		}
		l.picker(epp, at.line, servers, predicts)
		l.left(router, chart)
	case found || hasPool:
		l.doc.from = "the values of the inferencepool chart"
		servers, _, _ := l.sub(pool, "modelServers")
		if e, ok := pool.take("modelServerType"); ok {
			servers.entries = append(servers.entries, tableEntry{key: "type", line: e.line, value: e.value})
		}
		l.picker(extension, at.line, servers, false)
		l.left(pool, "is a part of the InferencePool: the chart keeps it")
	default:
		l.doc.from = "the values of the llm-d-modelservice chart"
		l.modelService(v.table)
	}
	l.left(v.table, chart)
}

// left notes the keys of a table that nothing has read.
func (l *llmdValues) left(t *table, consequence string) {
	for _, e := range t.entries {
		if !emptyValues(e.value) {
			l.doc.note(e.line, t.name(e.key), "%s", consequence)
		}
	}
}

// picker reads the endpoint picker: its configuration, which is a text in pluginsCustomConfig,
// and its flags.
func (l *llmdValues) picker(epp *table, line int, servers *table, predicts bool) {
	p := &picker{yamlFile: l.yamlFile, doc: l.doc}
	file, at, given := l.text(epp, "pluginsConfigFile")
	if !given {
		file = "default-plugins.yaml"
	}
	custom, _, _ := l.sub(epp, "pluginsCustomConfig")
	e, found := custom.take(file)
	own, inChart := chartPlugins(predicts)[file]
	switch {
	case found:
		if root, ok := l.embedded(custom.name(file), e.value); ok {
			p.read(root)
		}
	case inChart:
		line := cmp.Or(at.line, line) // of all findings, because the text has one line
		if root, ok := l.embedded(file, &yaml.Node{Kind: yaml.ScalarNode, Style: yaml.LiteralStyle, Value: own, Line: line - 1}); ok {
			p.read(root)
		}
	default:
		l.problem(l.file, cmp.Or(at.line, line), epp.name("pluginsConfigFile"), "%s is not in pluginsCustomConfig: add its text there, or import that file", text(file))
	}
	for _, e := range custom.entries {
		l.doc.note(e.line, custom.name(e.key), "is not the file of pluginsConfigFile: the picker does not read it")
	}
	port, _, ok := l.integer(epp, "extProcPort", 1, 65535)
	if !ok {
		port = 9002
	}
	p.serve(port, l.flags(epp), "extProcPort")
	l.left(epp, "configures the pods of the picker: the values of pdproxy's own chart configure those of pdproxy")
	p.pool(l.poolName(servers), l.serverConnector(servers), "the InferencePool of the chart: the name of the Helm release")
	l.left(servers, "is the selector of the InferencePool: the chart keeps it")
}

// chartPlugins are the files with plugins that the charts have, by name. Each text has one line. default-plugins.yaml has
// other plugins if the router chart runs a predictor of latencies (config/charts/routerlib,
// templates/_config.yaml).
func chartPlugins(predicts bool) map[string]string {
	files := map[string]string{
		"default-plugins.yaml": `{plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {type: prefix-cache-scorer}], ` +
			`schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: kv-cache-utilization-scorer, weight: 2}, {pluginRef: prefix-cache-scorer, weight: 3}]}]}`,
		"payload-agnostic.yaml": `{plugins: [{type: active-request-scorer}, {type: session-affinity-scorer}]}`,
	}
	if predicts {
		files["default-plugins.yaml"] = `{plugins: [` +
			`{type: prefix-cache-affinity-filter, name: strict-affinity-filter, parameters: {affinityThreshold: 0.99, ttftSource: latencyPredictor, maxTTFTPenaltyMs: 5000}}, ` +
			`{type: slo-headroom-tier-filter}, ` +
			`{type: prefix-cache-affinity-filter, name: loose-affinity-filter, parameters: {affinityThreshold: 0.8, ttftSource: latencyPredictor, maxTTFTPenaltyMs: 5000}}, ` +
			`{type: latency-scorer}, {type: weighted-random-picker}, {type: latency-slo-admitter}]}`
	}
	return files
}

// flags reads the flags of the picker and reports whether its port has TLS.
func (l *llmdValues) flags(epp *table) (secure bool) {
	secure = true
	flags, _, _ := l.sub(epp, "flags")
	if on, _, ok := l.boolean(flags, "secure-serving"); ok {
		secure = on
	}
	l.left(flags, "is a flag of the picker without an equivalent in pdproxy")
	return secure
}

// poolName returns the most likely name of the InferencePool: llm-d's guides give the release
// the name in the label llm-d.ai/guide of the pods.
func (l *llmdValues) poolName(servers *table) string {
	if e, found := servers.find("matchLabels"); found && resolve(e.value).Kind == yaml.MappingNode {
		return cmp.Or(l.guide(l.table(servers.name("matchLabels"), e.value)), "llm-d")
	}
	return "llm-d"
}

func (l *llmdValues) guide(labels *table) string {
	e, found := labels.find("llm-d.ai/guide")
	if !found {
		return ""
	}
	return resolve(e.value).Value
}

// serverConnector returns the connector of a model server's usual transfer.
func (l *llmdValues) serverConnector(servers *table) string {
	kind, _, _ := l.text(servers, "type")
	switch kind {
	case "sglang":
		return config.ConnectorSGLang
	case "trtllm-serve":
		return config.ConnectorTRTLLM
	}
	return config.ConnectorVLLMNixl
}

// modelService reads the engines: their connector, their model, and the port of the service.
func (l *llmdValues) modelService(root *table) {
	artifacts, _, _ := l.sub(root, "modelArtifacts")
	model, _, _ := l.text(artifacts, "name")
	labels, _, _ := l.sub(artifacts, "labels")
	routing, _, _ := l.sub(root, "routing")
	proxy, at, sidecar := l.sub(routing, "proxy")
	if n, _, ok := l.integer(routing, "servicePort", 1, 65535); ok {
		l.doc.set("server", "listen", text(net.JoinHostPort("0.0.0.0", strconv.Itoa(n))), "routing.servicePort")
	}
	connector := l.sidecarConnector(proxy)
	prefill, decode := l.engines(root, "prefill", &connector), l.engines(root, "decode", &connector)
	if prefill && !decode {
		l.problem(l.file, 0, "decode", "the file has prefill engines and no decode engines")
	}
	if connector == "" {
		connector = config.ConnectorNone
		if prefill {
			connector = config.ConnectorVLLMNixl
		}
	}
	if on, _, ok := l.boolean(proxy, "enabled"); sidecar && (!ok || on) {
		l.doc.note(at.line, "routing.proxy", "decode pods keep llm-d's sidecar, which passes requests of pdproxy on; without it (routing.proxy.enabled: false) the engines must listen at routing.servicePort")
	}
	l.left(proxy, "is a setting of llm-d's sidecar: give the sidecar's flags to pdproxy import llm-d, to replace it")
	l.doc.kubernetes("", "")
	l.doc.pattern(pattern{pool: true, name: "pool", service: cmp.Or(l.guide(labels), "llm-d"), role: config.RoleBoth, connector: connector, model: model,
		comment: "the InferencePool whose labels are those of the pods"})
	l.warn(l.file, 0, "", "%s; the label llm-d.ai/role of a pod is its role", samplePods)
	l.warn(l.file, 0, "", "these values name no policies: import the values of the inferencepool or router chart too, and add its [policy]")
	l.left(artifacts, "is a setting of the engines: the chart keeps it")
	l.left(routing, "is a setting of the chart's Service: the chart keeps it")
}

// sidecarConnector returns the connector of the routing sidecar, "": the values name none.
func (l *llmdValues) sidecarConnector(proxy *table) string {
	kind, e, ok := l.text(proxy, "connector")
	if !ok {
		return ""
	}
	connector, known := sidecarConnectors()[kind]
	if !known {
		l.problem(l.file, e.line, proxy.name("connector"), "want nixlv2, shared-storage, sglang, mooncake or offloading")
	}
	return connector
}

// engines reports whether the chart runs engines of a role, and reads the connector from their
// arguments if it is not known.
func (l *llmdValues) engines(root *table, role string, connector *string) bool {
	t, at, found := l.sub(root, role)
	if !found {
		return false
	}
	if on, _, ok := l.boolean(t, "create"); ok && !on {
		return false
	}
	if n, _, ok := l.integer(t, "replicas", 0, 1<<20); ok && n == 0 {
		return false
	}
	containers, _, _ := l.list(t, "containers")
	for _, c := range containers {
		args, _, _ := l.list(l.table(t.name("containers"), c), "args")
		if found := transferConnector(scalars(&l.yamlFile, args, t.name("containers.args"))); *connector == "" {
			*connector = found
		}
	}
	l.doc.note(at.line, role, "the chart goes on to run these engines")
	return true
}

// transferConnectors are the names of vLLM's connectors (vllm/distributed/kv_transfer/
// kv_connector/factory.py).
func transferConnectors() map[string]string {
	return map[string]string{
		"NixlConnector": config.ConnectorVLLMNixl, "MooncakeConnector": config.ConnectorVLLMMooncake, "MoRIIOConnector": config.ConnectorVLLMMoRIIO,
		"LMCacheConnectorV1": config.ConnectorVLLMStore, "LMCacheMPConnector": config.ConnectorVLLMStore, "SharedStorageConnector": config.ConnectorVLLMStore,
	}
}

// transferConnector returns the connector of an engine's --kv-transfer-config; "": none.
func transferConnector(words []word) string {
	for i, w := range words {
		value, inline := strings.CutPrefix(w.text, "--kv-transfer-config=")
		if w.text == "--kv-transfer-config" && i+1 < len(words) {
			value, inline = words[i+1].text, true
		}
		var transfer struct {
			Connector string `json:"kv_connector"`
			Extra     struct {
				Connectors []struct {
					Connector string `json:"kv_connector"`
				} `json:"connectors"`
			} `json:"kv_connector_extra_config"`
		}
		if !inline || json.Unmarshal([]byte(value), &transfer) != nil {
			continue
		}
		for _, inner := range transfer.Extra.Connectors { // MultiConnector
			if c := transferConnectors()[inner.Connector]; c != "" {
				return c
			}
		}
		return transferConnectors()[transfer.Connector]
	}
	return ""
}
