package importer

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// The saturation detectors of llm-d; it uses utilization-detector by default.
const (
	usualDetector       = "utilization-detector"
	concurrencyDetector = "concurrency-detector"
)

// gate takes the feature gates and reports whether flowControl is on; its default is off.
func (p *picker) gate(root *table) (flow bool) {
	nodes, e, _ := p.list(root, "featureGates")
	for _, w := range scalars(&p.yamlFile, nodes, e.key) {
		name, state, given := strings.Cut(w.text, "=")
		on, err := strconv.ParseBool(strings.ToLower(strings.TrimSpace(state)))
		switch {
		case given && err != nil:
			p.problem(p.file, w.line, "featureGates", "want the name of a feature, or name=false")
		case name == "flowControl":
			flow = on || !given
		default:
			p.doc.note(w.line, "featureGates", "%s: features are configuration keys", text(name))
		}
	}
	return flow
}

// flowControl reads the bounds of the queue. Without the feature gate, llm-d has no queue: the
// saturation detector then only refuses requests with a priority below 0.
func (p *picker) flowControl(root *table) {
	on := p.gate(root)
	t, _, _ := p.sub(root, "flowControl")
	detector, at, given := p.sub(t, "saturationDetector")
	if old, e, deprecated := p.sub(root, "saturationDetector"); deprecated && !given {
		detector, at, given = old, e, true
	}
	p.saturation(detector, at, given, on)
	if !on {
		for _, e := range t.entries {
			p.doc.note(e.line, t.name(e.key), "llm-d ignores it without the feature gate flowControl")
		}
		return
	}
	if entry, ok := t.take("maxRequests"); ok {
		n, valid := quantity(resolve(entry.value).Value)
		switch {
		case !valid:
			p.problem(p.file, entry.line, "flowControl.maxRequests", "want a whole number such as 100 or 1k")
		case n > 0:
			p.doc.set("limits", "queue", number(n), "flowControl.maxRequests")
		}
	}
	usual := p.waits(t, "defaultRequestTTL", "queue_timeout", time.Minute)
	p.waits(t, "noEndpointRequestTTL", "no_engine_timeout", usual)
	p.bands(t)
	for _, left := range slices.Clone(t.entries) {
		switch left.key {
		case "maxBytes":
			p.unequal(left.line, t.name(left.key), "limits.buffer_memory bounds the bytes of all requests and answers together")
		case "usageLimitPolicyPluginRef":
			if g, found := p.plugins[resolve(left.value).Value]; !found || g.kind != "static-usage-limit-policy" {
				p.lose(p.doc, p.file, left.line, t.name(left.key), "the proxy has no such ceiling: limits.saturation_queue_depth and limits.saturation_kv_usage hold requests back")
			}
		case "enableEviction":
			if on, _, _ := p.boolean(t, left.key); on {
				p.doc.set("policy", "evict", text("lowest_youngest"), t.name(left.key)+"; ends only requests with a priority below 0")
			}
		default:
			p.lose(p.doc, p.file, left.line, t.name(left.key), "the result has one class of requests: name classes and their limits by [[priority_class]]")
		}
	}
}

// waits writes the longest wait of a request in the queue and returns it.
func (p *picker) waits(t *table, key, ours string, usual time.Duration) time.Duration {
	s, at, ok := p.text(t, key)
	d, err := time.ParseDuration(s)
	switch {
	case !ok && usual > 0:
		p.doc.set("limits", ours, seconds(usual.Seconds()), "flowControl."+key+", by default")
		return usual
	case !ok:
	case err != nil || d < 0 || d > maxSeconds*time.Second:
		p.problem(p.file, at.line, t.name(key), "want a duration such as 60s")
	case d > 0:
		p.doc.set("limits", ours, seconds(d.Seconds()), "flowControl."+key)
	default:
		p.unequal(at.line, t.name(key), "a wait in the queue always ends here: limits.%s", ours)
	}
	return d
}

// bands reads the template of the priority bands: how the flows of a band share the queue.
func (p *picker) bands(t *table) {
	const fairness = "fairnessPolicyRef"
	band, _, _ := p.sub(t, "defaultPriorityBand")
	band.take("priority")
	switch kind, e := p.policyRef(band, fairness); kind {
	case "", "global-strict-fairness-policy":
	case "program-aware-fairness":
		p.unequal(e.line, band.name(fairness), "flows get equal shares, not shares by the service that they got before")
		fallthrough
	default:
		p.doc.set("limits", "fairness_header", text("x-llm-d-inference-fairness-id"), fairness+"; only behind a gateway that sets the line")
	}
	if kind, e := p.policyRef(band, "orderingPolicyRef"); kind != "" && kind != "fcfs-ordering-policy" {
		p.unequal(e.line, band.name("orderingPolicyRef"), "the queue of a class is in the order of arrival")
	}
	p.bandLimits(band)
	nodes, _, _ := p.list(t, "priorityBands")
	for _, node := range nodes {
		p.band(p.table("flowControl.priorityBands", node), node.Line)
	}
}

// band writes the class of the requests whose objective has the priority of a band.
func (p *picker) band(t *table, line int) {
	n, _, ok := p.integer(t, "priority", -1_000_000, 1_000_000)
	if !ok {
		p.problem(p.file, line, t.name("priority"), "is required")
		return
	}
	class := p.doc.add("priority_class")
	class.set("name", text("priority"+strconv.Itoa(n)), "of InferenceObjectives with this priority: epp.pool")
	class.set("priority", number(n), t.path)
	for _, key := range []string{"fairnessPolicyRef", "orderingPolicyRef"} {
		if kind, e := p.policyRef(t, key); kind != "" && kind != "global-strict-fairness-policy" && kind != "fcfs-ordering-policy" {
			p.unequal(e.line, t.name(key), "the classes have no policies of their own: limits.fairness_header is for all, and a class is in the order of arrival")
		}
	}
	p.bandLimits(t)
}

// bandLimits names the limits of a band.
func (p *picker) bandLimits(t *table) {
	for _, e := range t.entries {
		p.lose(p.doc, p.file, e.line, t.name(e.key), "limits.queue bounds the waiting requests of all classes together")
	}
}

// policyRef returns the type of the plugin that a key names; "": the key is absent.
func (p *picker) policyRef(t *table, key string) (kind string, e tableEntry) {
	name, e, ok := p.text(t, key)
	if g, found := p.plugins[name]; found {
		return g.kind, e
	}
	if !ok {
		name = ""
	}
	return name, e
}

// saturation reads the saturation detector. Without the feature gate flowControl, the limits of the
// proxy, which hold all requests back, would do more than the detector.
func (p *picker) saturation(t *table, at tableEntry, given, flow bool) {
	name, _, ok := p.text(t, "pluginRef")
	if !ok || name == "" {
		name = usualDetector
	}
	p.leftKeys(t)
	g, found := p.plugins[name]
	switch {
	case !found && name != usualDetector:
		p.problem(p.file, at.line, "saturationDetector.pluginRef", "names no plugin of this file")
		return
	case !flow && given:
		p.unequal(at.line, "saturationDetector", "without the feature gate flowControl llm-d refuses only requests with a priority below 0 while the engines are saturated; the result refuses none")
		return
	case !flow:
		return
	case found && g.kind != usualDetector:
		p.unequal(at.line, "saturationDetector", "the proxy measures saturation by the reports of the engines: see limits.saturation_queue_depth")
		return
	}
	depth, usage := 5, 0.8 // llm-d-router, pkg/epp/framework/plugins/flowcontrol/saturationdetector/utilization/config.go
	if found {
		depth, usage = p.thresholds(g, depth, usage)
	}
	p.doc.set("limits", "saturation_queue_depth", number(depth), usualDetector+", queueDepthThreshold")
	p.doc.set("limits", "saturation_kv_usage", float(usage), usualDetector+", kvCacheUtilThreshold")
}

// thresholds reads the parameters of utilization-detector.
func (p *picker) thresholds(g *pickerPlugin, depth int, usage float64) (int, float64) {
	if n, _, ok := p.integer(g.parameters, "queueDepthThreshold", 1, 1<<30); ok {
		depth = n
	}
	if u, _, ok := p.float(g.parameters, "kvCacheUtilThreshold", 0, 1); ok && u > 0 {
		usage = u
	}
	for _, e := range g.parameters.entries {
		p.unequal(e.line, g.key(e.key), "old reports of an engine do not count, and limits.saturation_queue_depth has no headroom")
	}
	g.parameters.entries = nil
	return depth, usage
}

// dataLayer reads the sources of facts about the engines, which the proxy has by itself.
func (p *picker) dataLayer(root *table) {
	t, _, _ := p.sub(root, "dataLayer")
	notes := map[string]string{
		"peerDiscovery":               "the workers of a fleet find each other: [fleet]",
		"crossReplicaSyncerPluginRef": "the workers of a fleet share their state: [fleet]",
		"crossReplicaSyncInterval":    "the workers of a fleet share their state: [fleet]",
	}
	for _, e := range t.entries {
		switch note, known := notes[e.key]; {
		case known:
			p.unequal(e.line, t.name(e.key), "%s", note)
		case e.key == "discovery":
			p.lose(p.doc, p.file, e.line, t.name(e.key), "the result lacks the endpoints of this source: add each as [[engine]]")
		case !emptyValues(e.value):
			p.doc.note(e.line, t.name(e.key), "the proxy reads loads and KV events by itself")
		}
	}
}

// parsers reads the forms of requests. remaining notes the parsers whose form the proxy lacks.
func (p *picker) parsers(root *table) {
	t, _, _ := p.sub(root, "requestHandler")
	refs, _, _ := p.list(t, "parsers")
	if e, ok := root.take("parser"); ok {
		refs = append(refs, e.value)
	}
	for _, ref := range refs {
		one := p.table("requestHandler.parsers", ref)
		if name, _, ok := p.text(one, "pluginRef"); ok {
			p.parser(name, ref)
		}
		p.leftKeys(one)
	}
	p.leftKeys(t)
}

// parser adds a parser that the list of plugins lacks, as llm-d does.
func (p *picker) parser(name string, at *yaml.Node) {
	if _, found := p.plugin(name, at.Line); !found {
		p.problem(p.file, at.Line, "requestHandler.parsers.pluginRef", "names no plugin of this file")
	}
}
