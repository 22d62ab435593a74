package importer

import (
	"net"
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// picker reads an EndpointPickerConfig into doc. The names of the plugins are those of
// llm-d-router, pkg/epp/framework/plugins.
type picker struct {
	yamlFile
	doc *document
	// version is the apiVersion of the file.
	version string
	// known are the types of plugins that the reader knows.
	known map[string]bool
	// plugins holds the plugins of the file, by the name that references use.
	plugins  map[string]*pickerPlugin
	names    []string // in the order of the file
	profiles []profile
	// sessions are the headers with the id of a session.
	sessions []string
	// labels are entries of discovery.kubernetes.labels: the labels of pods that scorers read.
	labels []string
	// further is the number of endpoints that an answer lists after the chosen one.
	further int
}

// pickerPlugin is one plugin of the file.
type pickerPlugin struct {
	name, kind string
	line       int
	parameters *table
	// scorers do the same as the plugin; read: they are known.
	scorers []scorer
	read    bool
}

// key names the plugin in findings; parameter may be "".
func (g *pickerPlugin) key(parameter string) string {
	if parameter == "" {
		return "plugin " + g.name
	}
	return "plugin " + g.name + ", " + parameter
}

func (p *picker) read(root *table) {
	if kind, e, ok := p.text(root, "kind"); ok && kind != "EndpointPickerConfig" {
		p.problem(p.file, e.line, "kind", "want EndpointPickerConfig")
	}
	p.version, _, _ = p.text(root, "apiVersion")
	root.take("metadata")
	p.known = pickerKinds()
	p.readPlugins(root)
	p.readProfiles(root)
	p.place()
	p.conversations()
	p.blocks()
	p.plan()
	p.flowControl(root)
	p.dataLayer(root)
	p.parsers(root)
	p.remaining(root)
}

// serve sets the address at which a gateway asks for engines.
func (p *picker) serve(port int, secure bool, from string) {
	p.doc.set("epp", "listen", text(net.JoinHostPort("0.0.0.0", strconv.Itoa(port))), from+", for a gateway; clients may use server.listen as well")
	if p.further > 0 {
		p.doc.set("epp", "fallbacks", number(p.further), "maxNumOfEndpoints of the picker, without the first endpoint")
	}
	if secure {
		p.doc.set("epp.tls", "self_signed", value("true"), "--secure-serving, which is on by default, without --cert-path")
	}
}

// pool adds the InferencePool of the engines.
func (p *picker) pool(name, connector, comment string) {
	p.doc.section("epp").sampleKey("pool", text(objectName(name)), "the same pool: its InferenceObjectives and InferenceModelRewrites apply to requests")
	p.doc.kubernetes("", "")
	if len(p.labels) > 0 {
		p.doc.set("discovery.kubernetes", "labels", list(p.labels), "labels of pods that the scorers read; an engine that is no pod needs them in its own table")
	}
	p.doc.pattern(pattern{pool: true, name: "pool", service: name, role: config.RoleBoth, connector: connector, comment: comment})
	p.warn(p.file, 0, "", "%s; the label llm-d.ai/role of a pod is its role", samplePods)
}

// unequal notes a setting that has no equal in the proxy, in the text and as a warning.
func (p *picker) unequal(line int, key, format string, args ...any) {
	p.doc.note(line, key, format, args...)
	p.warn(p.file, line, key, format, args...)
}

// readPlugins reads the list of plugins.
func (p *picker) readPlugins(root *table) {
	p.plugins = map[string]*pickerPlugin{}
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
		if !ok || name == "" {
			name = kind
		}
		parameters, _, _ := p.sub(t, "parameters")
		if _, found := p.plugins[name]; found {
			p.problem(p.file, node.Line, "plugins.name", "the file has two plugins of this name")
			continue
		}
		p.add(&pickerPlugin{name: name, kind: kind, line: node.Line, parameters: parameters})
	}
}

func (p *picker) add(g *pickerPlugin) {
	p.plugins[g.name] = g
	p.names = append(p.names, g.name)
}

// plugin returns the plugin that a profile names. A profile may name a type that the list of plugins
// lacks: llm-d's guides have such files.
func (p *picker) plugin(name string, line int) (*pickerPlugin, bool) {
	if g, found := p.plugins[name]; found {
		return g, true
	}
	if !p.known[name] {
		return nil, false
	}
	g := &pickerPlugin{name: name, kind: name, line: line, parameters: &table{path: "plugins.parameters"}}
	p.add(g)
	return g, true
}

// firstOf returns the first plugin of one of the types; nil: the file has none.
func (p *picker) firstOf(kinds ...string) *pickerPlugin {
	for _, name := range p.names {
		if slices.Contains(kinds, p.plugins[name].kind) {
			return p.plugins[name]
		}
	}
	return nil
}

// blocks reads how many tokens llm-d assumes that an engine keeps, if it does not ask the engine
// (requestcontrol/dataproducer/approximateprefix).
func (p *picker) blocks() {
	g := p.firstOf("approx-prefix-cache-producer")
	if g == nil {
		return
	}
	if tuned, _, ok := p.boolean(g.parameters, "autoTune"); tuned || !ok {
		return
	}
	count, _, ok := p.integer(g.parameters, "lruCapacityPerServer", 0, 1<<30)
	if !ok || count == 0 {
		count = 31250
	}
	size, _, ok := p.integer(g.parameters, "blockSizeTokens", 1, 1<<16)
	if !ok {
		size = 16
	}
	p.doc.set("kv_index", "text_tokens", number(count*size), "lruCapacityPerServer blocks of blockSizeTokens; only for engines without KV events")
}

// remaining notes the plugins that neither score nor filter nor decide, the parameters that nothing
// has read, and the keys of the file that are left.
func (p *picker) remaining(root *table) {
	ownWork, otherWork, gates, scorers := ownWork(), otherWork(), gates(), scorerKinds()
	for _, name := range p.names {
		g := p.plugins[name]
		switch {
		case gates[g.kind] != "":
			p.lose(p.doc, p.file, g.line, g.key(""), "%s", gates[g.kind])
		case otherWork[g.kind] != "":
			p.unequal(g.line, g.key(""), "%s", otherWork[g.kind])
		case ownWork[g.kind] != "":
			p.left(g, ownWork[g.kind])
		case scorers[g.kind] != nil && g.read:
			p.leftOfScorer(g)
		case scorers[g.kind] != nil:
			p.doc.note(g.line, g.key(""), "no leg uses it")
		case !p.known[g.kind]:
			p.unequal(g.line, g.key(""), "is a type that pdproxy import does not know: a scorer of your own is a [[plugin]]")
		default:
			p.left(g, "has no effect here")
		}
	}
	for _, e := range root.entries {
		p.unequal(e.line, e.key, "unknown key: it is left out")
	}
}

// left notes the parameters of a plugin whose work the proxy does by itself.
func (p *picker) left(g *pickerPlugin, how string) {
	for _, e := range g.parameters.entries {
		p.doc.note(e.line, g.key(e.key), "%s", how)
	}
}
