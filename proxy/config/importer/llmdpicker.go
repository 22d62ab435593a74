package importer

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// picker reads an EndpointPickerConfig into doc. The names of the plugins are those of
// llm-d-router, pkg/epp/framework/plugins.
type picker struct {
	yamlFile
	doc *document
	// version is the apiVersion of the file.
	version string
	// plugins holds the plugins of the file, by the name that references use.
	plugins map[string]pickerPlugin
	names   []string // in the order of the file
}

type pickerPlugin struct {
	kind       string
	line       int
	parameters *table
}

func (p *picker) read(root *table) {
	if kind, e, ok := p.text(root, "kind"); ok && kind != "EndpointPickerConfig" {
		p.problem(p.file, e.line, "kind", "want EndpointPickerConfig")
	}
	p.version, _, _ = p.text(root, "apiVersion")
	root.take("metadata")
	p.readPlugins(root)
	used := p.profiles(root)
	p.place(used)
	p.plan()
	p.flowControl(root)
	p.remaining(root, used)
}

// serve sets the address at which a gateway asks for engines.
func (p *picker) serve(port int, secure bool, from string) {
	p.doc.set("epp", "listen", text(net.JoinHostPort("0.0.0.0", strconv.Itoa(port))), from+", for a gateway; clients may use server.listen as well")
	if secure {
		p.doc.set("epp.tls", "self_signed", value("true"), "--secure-serving, which is on by default, without --cert-path")
	}
}

// pool adds the InferencePool of the engines.
func (p *picker) pool(name, connector, comment string) {
	p.doc.kubernetes("", "")
	p.doc.pattern(pattern{pool: true, name: "pool", service: name, role: config.RoleBoth, connector: connector, comment: comment})
	p.warn(p.file, 0, "", "%s; the label llm-d.ai/role of a pod is its role", samplePods)
}

// readPlugins reads the list of plugins.
func (p *picker) readPlugins(root *table) {
	p.plugins = map[string]pickerPlugin{}
	nodes, e, ok := p.list(root, "plugins")
	if !ok {
		p.problem(p.file, e.line, "plugins", "is required")
		return
	}
	for _, node := range nodes {
		t := p.table("plugins", node)
		kind, _, ok := p.text(t, "type")
		if !ok {
			p.problem(p.file, node.Line, "plugins.type", "is required")
			continue
		}
		name, _, ok := p.text(t, "name")
		if !ok {
			name = kind
		}
		parameters, _, _ := p.sub(t, "parameters")
		if _, found := p.plugins[name]; found {
			p.problem(p.file, node.Line, "plugins.name", "the file has two plugins of this name")
			continue
		}
		p.plugins[name] = pickerPlugin{kind: kind, line: node.Line, parameters: parameters}
		p.names = append(p.names, name)
	}
}

// profiles returns the names of the plugins that the scheduling profiles use.
func (p *picker) profiles(root *table) []string {
	nodes, _, ok := p.list(root, "schedulingProfiles")
	if !ok {
		return slices.Clone(p.names) // llm-d-router makes a profile of all plugins
	}
	var used []string
	for _, node := range nodes {
		t := p.table("schedulingProfiles", node)
		p.text(t, "name")
		refs, _, _ := p.list(t, "plugins")
		for _, ref := range refs {
			one := p.table("schedulingProfiles.plugins", ref)
			name, _, ok := p.text(one, "pluginRef")
			if !ok {
				p.problem(p.file, ref.Line, "schedulingProfiles.plugins.pluginRef", "is required")
			} else if !p.declared(name, ref.Line) {
				p.problem(p.file, ref.Line, "schedulingProfiles.plugins.pluginRef", "names no plugin of this file")
			} else if !slices.Contains(used, name) {
				used = append(used, name)
			}
			p.float(one, "weight", -1e9, 1e9)
		}
	}
	return used
}

// declared reports whether a plugin is in the file. llm-d-router makes the plugins that only a
// profile names, if the name is that of a type.
func (p *picker) declared(name string, line int) bool {
	if _, found := p.plugins[name]; found {
		return true
	}
	if !slices.Contains(knownPlugins(), name) {
		return false
	}
	p.plugins[name] = pickerPlugin{kind: name, line: line, parameters: &table{path: "plugins.parameters"}}
	p.names = append(p.names, name)
	return true
}

// kinds returns the types of plugins.
func (p *picker) kinds(names []string) []string {
	var kinds []string
	for _, name := range names {
		kinds = append(kinds, p.plugins[name].kind)
	}
	return kinds
}

// placing names the place policy for the types of scorers and filters, the more specific
// ones first.
var placing = []struct {
	place, why string
	kinds      []string
}{
	{"kv_aware", "counts cached blocks and queued tokens as seconds, so weights have no equal",
		[]string{"precise-prefix-cache-scorer", "prefix-cache-scorer", "prefix-cache-affinity-filter", "no-hit-lru-scorer"}},
	{"conversation", "sessions keep their engines", []string{"session-affinity-scorer", "session-affinity-filter"}},
	{"least_load", "by requests and tokens in flight", []string{"queue-scorer", "kv-cache-utilization-scorer", "load-aware-scorer",
		"active-request-scorer", "running-requests-size-scorer", "token-load-scorer", "latency-scorer"}},
	{"round_robin", "requests spread just as evenly", []string{"random-picker"}},
}

// place chooses the place policy by the scorers of the profiles.
func (p *picker) place(used []string) {
	kinds := p.kinds(used)
	for _, choice := range placing {
		i := slices.IndexFunc(choice.kinds, func(kind string) bool { return slices.Contains(kinds, kind) })
		if i < 0 {
			continue
		}
		p.doc.set("policy", "place", text(choice.place), choice.kinds[i]+"; "+choice.why)
		break
	}
	if slices.ContainsFunc(p.kinds(p.names), func(kind string) bool { return strings.HasPrefix(kind, "precise-prefix-cache") }) {
		p.doc.note(0, "precise-prefix-cache", "set kv_events and kv_replay of each engine, so that the index follows its KV events")
	}
	p.sessions()
}

// sessions reads the headers that name a session.
func (p *picker) sessions() {
	var headers []string
	for _, name := range p.names {
		plugin := p.plugins[name]
		if !strings.HasPrefix(plugin.kind, "session-affinity-") {
			continue
		}
		header, _, ok := p.text(plugin.parameters, "headerName")
		if !ok {
			header = "x-session-token"
		}
		algorithm, _, _ := p.text(plugin.parameters, "algorithm")
		if algorithm != "session_id_header" {
			p.warn(p.file, plugin.line, "plugins", "%s: the proxy writes no session header into its answers: clients must send an id of their own in %q", name, header)
		}
		if !slices.Contains(headers, header) {
			headers = append(headers, header)
		}
	}
	if len(headers) > 0 {
		own := config.Default().Conversation.Headers
		p.doc.set("conversation", "headers", list(append(headers, own...)), "headerName of the session affinity")
	}
}

// flowControl reads the bounds of the queue.
func (p *picker) flowControl(root *table) {
	t, _, found := p.sub(root, "flowControl")
	old, at, deprecated := p.sub(root, "saturationDetector")
	if !found {
		if deprecated {
			p.saturation(old, at)
		}
		return
	}
	if detector, at, ok := p.sub(t, "saturationDetector"); ok || !deprecated {
		p.saturation(detector, at)
	} else {
		p.saturation(old, at)
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
	for _, limit := range []struct{ key, ours string }{{"defaultRequestTTL", "queue_timeout"}, {"noEndpointRequestTTL", "no_engine_timeout"}} {
		s, at, ok := p.text(t, limit.key)
		if !ok {
			continue
		}
		d, err := time.ParseDuration(s)
		switch {
		case err != nil || d < 0 || d > maxSeconds*time.Second:
			p.problem(p.file, at.line, "flowControl."+limit.key, "want a duration such as 60s")
		case d > 0:
			p.doc.set("limits", limit.ours, seconds(d.Seconds()), "flowControl."+limit.key)
		default:
			p.doc.note(at.line, "flowControl."+limit.key, "a wait in the queue always ends here: limits.%s", limit.ours)
		}
	}
	for _, left := range t.entries {
		switch left.key {
		case "maxBytes":
			p.doc.note(left.line, "flowControl.maxBytes", "limits.buffer_memory bounds the bytes of all requests and answers together")
		case "usageLimitPolicyPluginRef":
			p.lose(p.doc, p.file, left.line, "flowControl."+left.key, "the proxy has no such ceiling: limits.saturation_queue_depth and limits.saturation_kv_usage hold requests back")
		case "enableEviction":
			p.doc.note(left.line, "flowControl.enableEviction", "the queue is ordered by [[priority_class]] and refuses new requests when it is full")
		default:
			p.lose(p.doc, p.file, left.line, "flowControl."+left.key, "the result has one class of requests: name classes and their limits by [[priority_class]]")
		}
	}
}

// usualDetector is the saturation detector that llm-d uses by default.
const usualDetector = "utilization-detector"

// saturation reads the saturation detector that detector names, nil: llm-d's default.
func (p *picker) saturation(detector *table, at tableEntry) {
	const usual = usualDetector
	name := usual
	if detector != nil {
		if ref, _, ok := p.text(detector, "pluginRef"); ok {
			name = ref
		}
	}
	plugin, found := p.plugins[name]
	switch {
	case !found && name != usual:
		p.problem(p.file, at.line, "saturationDetector.pluginRef", "names no plugin of this file")
		return
	case found && plugin.kind != usual:
		p.doc.note(at.line, "saturationDetector", "the proxy measures saturation by the reports of the engines: see limits.saturation_queue_depth")
		return
	}
	depth, usage := 5, 0.8 // llm-d-router, pkg/epp/framework/plugins/flowcontrol/saturationdetector/utilization/config.go
	if t := plugin.parameters; t != nil {
		if n, _, ok := p.integer(t, "queueDepthThreshold", 1, 1<<30); ok {
			depth = n
		}
		if u, _, ok := p.float(t, "kvCacheUtilThreshold", 0, 1); ok && u > 0 {
			usage = u
		}
		for _, left := range t.entries {
			p.doc.note(left.line, usual+"."+left.key, "old reports of an engine do not count, and limits.saturation_queue_depth has no headroom")
		}
	}
	p.doc.set("limits", "saturation_queue_depth", number(depth), usual+", queueDepthThreshold")
	p.doc.set("limits", "saturation_kv_usage", float(usage), usual+", kvCacheUtilThreshold")
}

// knownPlugins are the types of plugins whose work the proxy does, or that only feed others.
func knownPlugins() []string {
	known := []string{"disagg-profile-handler", "pd-profile-handler", "single-profile-handler", "disagg-headers-handler", "prefill-header-handler",
		"prefix-based-pd-decider", "always-disagg-pd-decider", "prefill-filter", "decode-filter", "encode-filter",
		"max-score-picker", "random-picker", "weighted-random-picker", "openai-parser", "anthropic-parser", "vllmhttp-parser", "sglanghttp-parser",
		"utilization-detector", "concurrency-detector", "metrics-data-source", "core-metrics-extractor", "endpoint-notification-source",
		"token-producer", "inflight-load-producer", "session-id-producer"}
	for _, choice := range placing {
		known = append(known, choice.kinds...)
	}
	return known
}

// gates are types of plugins that refuse requests, or that exclude engines from some requests.
func gates() map[string]string {
	const refuse = "the proxy does not refuse requests by this rule: limits and [[priority_class]] bound them"
	const exclude = "the proxy does not exclude engines by this rule: each engine of a model can get each of its requests"
	return map[string]string{"latency-slo-admitter": refuse, "probabilistic-admitter": refuse, "label-selector-filter": exclude, "endpoint-attribute-filter": exclude,
		"by-label": exclude, "by-label-selector": exclude}
}

// remaining notes the plugins and keys that were not converted.
func (p *picker) remaining(root *table, used []string) {
	for _, name := range p.names {
		plugin := p.plugins[name]
		filter, _, _ := p.boolean(plugin.parameters, "enableFiltering")
		switch gate, isGate := gates()[plugin.kind]; {
		case isGate:
			p.lose(p.doc, p.file, plugin.line, "plugin "+name, "%s", gate)
		case plugin.kind == "context-length-aware" && filter && slices.Contains(used, name):
			p.lose(p.doc, p.file, plugin.line, "plugin "+name, "the proxy does not exclude engines by the length of the prompt: each engine of a model can get each of its requests")
		case slices.Contains(knownPlugins(), plugin.kind) || strings.HasPrefix(plugin.kind, "precise-prefix-cache") || strings.HasPrefix(plugin.kind, "approx-prefix-cache"):
			for _, left := range plugin.parameters.entries {
				if plugin.kind == usualDetector {
					continue // saturation notes them
				}
				p.doc.note(left.line, "plugin "+name+", "+left.key, "has no equivalent: the policies of [policy] place and plan without it")
			}
		case slices.Contains(used, name):
			p.doc.note(plugin.line, "plugin "+name, "has no equivalent: a place policy of your own can do the same")
		default:
			p.doc.note(plugin.line, "plugin "+name, "is not used by a profile")
		}
	}
	notes := map[string]string{
		"featureGates": "features are configuration keys", "dataLayer": "the proxy reads loads and KV events by itself",
		"requestHandler": "the proxy reads the OpenAI and Anthropic forms by itself", "parser": "the proxy reads the OpenAI and Anthropic forms by itself",
	}
	for _, e := range root.entries {
		note, known := notes[e.key]
		if !known {
			p.warn(p.file, e.line, e.key, "unknown key: it is left out")
			continue
		}
		if !emptyValues(e.value) {
			p.doc.note(e.line, e.key, "%s", note)
		}
	}
}
