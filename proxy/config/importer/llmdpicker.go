package importer

import (
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// picker reads an EndpointPickerConfig into doc. The names of the plugins are those of
// llm-d-router, pkg/epp/framework/plugins.
type picker struct {
	yamlFile
	doc *document
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
	p.text(root, "apiVersion")
	root.take("metadata")
	p.readPlugins(root)
	used := p.profiles(root)
	p.place(used)
	p.plan()
	p.flowControl(root)
	p.doc.set("epp", "listen", text("0.0.0.0:9002"), "the default of --grpc-port, for a gateway; clients may use server.listen as well")
	p.doc.set("epp.tls", "self_signed", value("true"), "--secure-serving, which is on by default, without --cert-path")
	p.remaining(root, used)
	p.warn(p.file, 0, "", "the result has no engine: add the pods of the InferencePool by [[discovery.kubernetes.pool]], or as [[engine]], with their role and connector")
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
	nodes, e, ok := p.list(root, "schedulingProfiles")
	if !ok {
		p.problem(p.file, e.line, "schedulingProfiles", "is required")
		return nil
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
			} else if _, known := p.plugins[name]; !known {
				p.problem(p.file, ref.Line, "schedulingProfiles.plugins.pluginRef", "names no plugin of this file")
			} else if !slices.Contains(used, name) {
				used = append(used, name)
			}
			p.float(one, "weight", -1e9, 1e9)
		}
	}
	return used
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
		p.doc.note("precise-prefix-cache", "set kv_events and kv_replay of each engine, so that the index follows its KV events")
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

// plan chooses the plan policy by the handler of the profiles and its decider.
func (p *picker) plan() {
	for _, name := range p.names {
		handler := p.plugins[name]
		if handler.kind != "disagg-profile-handler" && handler.kind != "pd-profile-handler" {
			continue
		}
		deciders, _, _ := p.sub(handler.parameters, "deciders")
		ref, e, ok := p.text(deciders, "prefill")
		if !ok && handler.kind == "pd-profile-handler" {
			ref, e, ok = p.text(handler.parameters, "deciderPluginName")
		}
		if !ok {
			p.doc.set("policy", "plan", text("never"), handler.kind+" without a decider for prefill")
			return
		}
		decider, known := p.plugins[ref]
		if !known {
			p.problem(p.file, e.line, "deciders.prefill", "names no plugin of this file")
			return
		}
		p.decider(decider)
		return
	}
}

func (p *picker) decider(d pickerPlugin) {
	switch d.kind {
	case "always-disagg-pd-decider":
		p.doc.set("policy", "plan", text("always"), d.kind)
	case "prefix-based-pd-decider":
		n, _, _ := p.integer(d.parameters, "nonCachedTokens", 0, 1<<30)
		if n == 0 {
			p.doc.set("policy", "plan", text("never"), "nonCachedTokens is 0, which disables the decider in llm-d")
			return
		}
		p.doc.set("policy", "plan", text("pd_auto"), d.kind+"; without local_tokens the policy compares measured times")
		p.doc.set("policy.params.pd_auto", "local_tokens", float(float64(n-1)), "nonCachedTokens; the local engine needs role both")
	default:
		p.doc.note("deciders.prefill", "%s: plan = \"auto\" splits each request that can be split", d.kind)
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
	if s, at, ok := p.text(t, "defaultRequestTTL"); ok {
		d, err := time.ParseDuration(s)
		switch {
		case err != nil || d < 0 || d > maxSeconds*time.Second:
			p.problem(p.file, at.line, "flowControl.defaultRequestTTL", "want a duration such as 60s")
		case d > 0:
			p.doc.set("limits", "queue_timeout", seconds(d.Seconds()), "flowControl.defaultRequestTTL")
		default:
			p.doc.note("flowControl.defaultRequestTTL", "a wait in the queue always ends here: limits.queue_timeout")
		}
	}
	for _, left := range t.entries {
		p.doc.note("flowControl."+left.key, "limits.max_exchanges, limits.queue and limits.per_client bound the requests")
	}
}

// saturation reads the saturation detector that detector names, nil: llm-d's default.
func (p *picker) saturation(detector *table, at tableEntry) {
	const usual = "utilization-detector"
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
		p.doc.note("saturationDetector", "the proxy measures saturation by the reports of the engines: see limits.saturation_queue_depth")
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
			p.doc.note(usual+"."+left.key, "old reports of an engine do not count, and limits.saturation_queue_depth has no headroom")
		}
	}
	p.doc.set("limits", "saturation_queue_depth", number(depth), usual+", queueDepthThreshold")
	p.doc.set("limits", "saturation_kv_usage", float(usage), usual+", kvCacheUtilThreshold")
}

// remaining notes the plugins and keys that were not converted.
func (p *picker) remaining(root *table, used []string) {
	known := []string{"disagg-profile-handler", "pd-profile-handler", "single-profile-handler", "prefix-based-pd-decider", "always-disagg-pd-decider",
		"prefill-filter", "decode-filter", "encode-filter", "max-score-picker", "random-picker", "openai-parser",
		"utilization-detector", "concurrency-detector", "metrics-data-source", "core-metrics-extractor", "endpoint-notification-source"}
	for _, choice := range placing {
		known = append(known, choice.kinds...)
	}
	for _, name := range p.names {
		kind := p.plugins[name].kind
		if !slices.Contains(known, kind) && !strings.HasPrefix(kind, "precise-prefix-cache") && !strings.HasPrefix(kind, "approx-prefix-cache") {
			what := "is not used by a profile"
			if slices.Contains(used, name) {
				what = "has no equivalent: a place policy of your own can do the same"
			}
			p.doc.note("plugin "+name, "%s", what)
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
		if resolve(e.value).Kind != yaml.ScalarNode || resolve(e.value).Value != "" {
			p.doc.note(e.key, "%s", note)
		}
	}
}
