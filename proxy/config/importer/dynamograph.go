package importer

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// dynamoGraph reads a DynamoGraphDeployment: the flags of its frontend, and its workers. Its
// forms are v1alpha1, with spec.services, and v1beta1, with spec.components
// (deploy/operator/api in ai-dynamo/dynamo).
type dynamoGraph struct {
	*yamlFile
	*dynamo
	name string
	// shared are the variables of all components.
	shared []dynamoVariable
}

type dynamoVariable struct {
	name, value string
	line        int
}

// component is a component of the graph.
type component struct {
	name, kind string
	line       int
	*table
	variables []dynamoVariable
	words     []word
}

// graph returns the first document of a file that is a DynamoGraphDeployment.
func (y *yamlFile) graph(f File) (*table, bool) {
	documents, _ := manifestDocuments(f)
	for _, d := range documents {
		if kind := member(d, "kind"); kind != nil && kind.Value == "DynamoGraphDeployment" {
			return y.table("", d), true
		}
	}
	return nil, false
}

func (g *dynamoGraph) read(root *table) {
	metadata, _, _ := g.yamlFile.sub(root, "metadata")
	g.name, _, _ = g.yamlFile.text(metadata, "name")
	spec, _, found := g.yamlFile.sub(root, "spec")
	if !found {
		g.problem(g.file, 0, "spec", "is required")
		return
	}
	for _, key := range []string{"envs", "env"} {
		g.shared = append(g.shared, g.variables(spec, key)...)
	}
	components := g.components(spec)
	frontend := slices.IndexFunc(components, func(c component) bool { return c.kind == "frontend" })
	if frontend < 0 {
		g.problem(g.file, 0, spec.path, "the graph has no component of type frontend")
		return
	}
	g.frontend(components[frontend])
	namespace, _, _ := g.yamlFile.text(metadata, "namespace")
	g.doc.kubernetes(namespace, "")
	disaggregated := slices.ContainsFunc(components, func(c component) bool { return c.role() == config.RolePrefill })
	for _, c := range components {
		switch c.kind {
		case "frontend":
		case "planner":
			g.doc.note(c.line, c.path, "the planner scales Dynamo's workers: docs/howto/keda.md scales engines by the metrics of pdproxy")
		case "epp":
			g.doc.note(c.line, c.path, "pdproxy is an endpoint picker, too: [epp]")
		default:
			g.worker(c, namespace, disaggregated)
		}
	}
	g.warn(g.file, 0, "", "%s. %s", samplePods, noHTTP)
	for _, e := range spec.entries {
		g.doc.note(e.line, spec.name(e.key), "is a setting of Dynamo's operator, which pdproxy does not use")
	}
}

// components reads spec.services or spec.components.
func (g *dynamoGraph) components(spec *table) []component {
	var components []component
	services, _, _ := g.yamlFile.sub(spec, "services")
	for _, e := range services.entries {
		components = append(components, g.component(e.key, e.line, g.table(services.name(e.key), e.value)))
	}
	nodes, _, _ := g.yamlFile.list(spec, "components")
	for _, node := range nodes {
		t := g.table(spec.name("components"), node)
		name, _, _ := g.yamlFile.text(t, "name")
		t.path += "." + name
		components = append(components, g.component(name, node.Line, t))
	}
	return components
}

// component reads one component.
func (g *dynamoGraph) component(name string, line int, t *table) component {
	c := component{name: name, line: line, table: t}
	for _, key := range []string{"type", "componentType", "subComponentType"} {
		if kind, _, ok := g.yamlFile.text(t, key); ok && kind != "" && (c.kind == "" || c.kind == "worker") {
			c.kind = kind
		}
	}
	for _, key := range []string{"envs", "env"} {
		c.variables = append(c.variables, g.variables(t, key)...)
	}
	for _, key := range []string{"extraPodSpec", "podTemplate"} {
		e, found := t.find(key)
		if !found {
			continue
		}
		pod := g.table(t.name(key), e.value)
		container, _, found := g.yamlFile.sub(pod, "mainContainer")
		if spec, _, ok := g.yamlFile.sub(pod, "spec"); ok {
			if containers, _, ok := g.yamlFile.list(spec, "containers"); ok && len(containers) > 0 {
				container, found = g.table(t.name("containers"), containers[0]), true
			}
		}
		if found {
			c.variables = append(c.variables, g.variables(container, "env")...)
			c.words = g.command(container)
		}
	}
	return c
}

// variables reads variables with a value.
func (g *dynamoGraph) variables(t *table, key string) []dynamoVariable {
	nodes, _, _ := g.yamlFile.list(t, key)
	var variables []dynamoVariable
	for _, node := range nodes {
		one := g.table(t.name(key), node)
		name, found := one.find("name")
		if v, ok := one.find("value"); ok && found {
			variables = append(variables, dynamoVariable{resolve(name.value).Value, resolve(v.value).Value, v.line})
		}
	}
	return variables
}

// command returns the words of a container from its module on: dynamo.NAME.
func (g *dynamoGraph) command(t *table) []word {
	words := g.containerWords(t)
	i := slices.IndexFunc(words, func(w word) bool { return strings.HasPrefix(w.text, "dynamo.") })
	if i < 0 {
		return nil
	}
	words = words[i:]
	if end := slices.IndexFunc(words, func(w word) bool { return w.operator }); end > 0 {
		words = words[:end]
	}
	return words
}

// frontend reads the flags and the variables of the frontend. A flag has priority.
func (g *dynamoGraph) frontend(c component) {
	words := c.words
	for len(words) > 0 && !isFlag(words[0]) {
		words = words[1:]
	}
	for len(words) > 0 {
		words = g.take(words)
	}
	for _, v := range slices.Concat(c.variables, g.shared) {
		name, found := strings.CutPrefix(v.name, "DYN_")
		name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
		name = cmp.Or(map[string]string{"router-use-kv-events": "router-kv-events", "chat-processor": "dyn-chat-processor", "router-load-aware": "load-aware"}[name], name)
		if _, known := g.specs[name]; found && known && !g.on(name) {
			g.add(name, use{v.line, []word{{text: v.value, line: v.line}}})
		}
	}
	g.dynamo.read()
	for _, e := range c.entries {
		if !emptyValues(e.value) {
			g.doc.note(e.line, c.table.name(e.key), "configures the pods of the frontend: the values of pdproxy's chart configure those of pdproxy")
		}
	}
}

// value returns the value of the first of these flags; "": there is none.
func (c component) value(names ...string) string {
	for i, w := range c.words {
		for _, name := range names {
			if value, inline := strings.CutPrefix(w.text, "--"+name+"="); inline {
				return value
			}
			if w.text == "--"+name && i+1 < len(c.words) {
				return c.words[i+1].text
			}
		}
	}
	return ""
}

// role returns the role of a worker, by its type or by its flags.
func (c component) role() string {
	has := func(flag string) bool {
		return slices.ContainsFunc(c.words, func(w word) bool { return w.text == flag })
	}
	mode := cmp.Or(c.value("disaggregation-mode"), c.kind)
	switch {
	case mode == "prefill" || has("--is-prefill-worker"):
		return config.RolePrefill
	case mode == "decode" || has("--is-decode-worker"):
		return config.RoleDecode
	}
	return config.RoleBoth
}

// worker adds the pattern of the engines that replace a worker.
func (g *dynamoGraph) worker(c component, namespace string, disaggregated bool) {
	if len(c.words) == 0 {
		g.doc.note(c.line, c.path, "its container starts no module dynamo.NAME: if it is an engine, name it as [[engine]]")
		return
	}
	module := strings.Split(c.words[0].text, ".")[1]
	port, connector, server := 8000, "", "vllm serve"
	switch module {
	case "vllm":
		connector = cmp.Or(transferConnector(c.words), config.ConnectorVLLMNixl)
	case "sglang":
		port, connector, server = 30000, config.ConnectorSGLang, "sglang.launch_server"
	case "trtllm":
		connector, server = config.ConnectorTRTLLM, "trtllm-serve"
	default:
		g.doc.note(c.line, c.path, "dynamo.%s is no engine that pdproxy calls", module)
		return
	}
	role := c.role()
	switch {
	case !disaggregated:
		role, connector = config.RoleBoth, config.ConnectorNone
	case role != config.RolePrefill && g.conditional:
		role = config.RoleBoth
	case role == config.RoleBoth:
		role = config.RoleDecode // a worker beside prefill workers
	}
	g.doc.note(c.line, c.path, "run %s in these pods instead of %s, and make a Service for them", server, c.words[0].text)
	g.doc.pattern(pattern{name: c.name, service: g.name + "-" + c.name, namespace: namespace, port: port, role: role, connector: connector,
		model: g.model(c), kvEvents: kvEvents(c), comment: "a Service over the pods of " + c.name})
}

// model returns the name of a worker's model, "": a variable holds it.
func (g *dynamoGraph) model(c component) string {
	model := cmp.Or(c.value("served-model-name"), c.value("model"), c.value("model-path"))
	if strings.Contains(model, "$") || strings.HasPrefix(model, "/") {
		return ""
	}
	return model
}

// kvEvents returns the address at which a vLLM worker publishes its KV events.
func kvEvents(c component) string {
	var events struct {
		Enabled   *bool  `json:"enable_kv_cache_events"`
		Publisher string `json:"publisher"`
		Endpoint  string `json:"endpoint"`
	}
	if json.Unmarshal([]byte(c.value("kv-events-config")), &events) != nil || events.Publisher != "zmq" || events.Enabled != nil && !*events.Enabled {
		return ""
	}
	if !strings.HasPrefix(events.Endpoint, "tcp://*:") {
		return ""
	}
	return events.Endpoint
}
