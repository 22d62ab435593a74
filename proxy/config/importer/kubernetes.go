package importer

import (
	"cmp"
	"net"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// samplePods is the warning for a router that finds its engines by labels of pods.
const samplePods = "the result has the engines only as comments: check the names of the tables [[discovery.kubernetes...]], and remove the # of their lines"

// pattern is a [[discovery.kubernetes.engine]], or with pool a [[discovery.kubernetes.pool]].
type pattern struct {
	pool bool
	name string
	// service and namespace name the Service or the InferencePool; without namespace, that
	// of the proxy's pod.
	service, namespace string
	// port is the port of the pods; 0: that of the Service or the pool.
	port            int
	role, connector string
	model, kvEvents string
	// comment says which object of the cluster is meant.
	comment string
}

// kubernetes adds [discovery.kubernetes] as a comment. pods is a label selector.
func (d *document) kubernetes(namespace, pods string) {
	s := d.section("discovery.kubernetes")
	s.sample, s.above = true, "Engines in Kubernetes: check these names, then remove the # of all lines of [discovery.kubernetes] and [[discovery.kubernetes...]]. The rights of the proxy are in docs/howto/discovery.md."
	s.set("namespace", text(namespace), namespaceComment(namespace))
	if pods != "" {
		s.set("pods", text(pods), "only these pods are engines")
	}
}

func namespaceComment(namespace string) string {
	if namespace == "" {
		return "the namespace of the proxy's pod"
	}
	return ""
}

// pattern adds a table of discovery.kubernetes as a comment.
func (d *document) pattern(p pattern) {
	kind := "engine"
	if p.pool {
		kind = "pool"
	}
	host := objectName(p.service)
	if p.namespace != "" {
		host += "." + objectName(p.namespace)
	}
	if p.port > 0 {
		host = net.JoinHostPort(host, strconv.Itoa(p.port))
	}
	s := d.add("discovery.kubernetes." + kind)
	s.sample = true
	s.set("name", text(objectName(p.name)), "")
	s.set("url", text("http://"+host), p.comment)
	s.set("role", text(p.role), "")
	s.set("connector", text(p.connector), "")
	if p.model != "" {
		s.set("model", text(p.model), "")
	}
	if p.kvEvents != "" {
		s.set("kv_events", text(p.kvEvents), "--kv-events-config")
	}
	if p.connector == config.ConnectorVLLMMooncake && p.role == config.RolePrefill {
		s.set("bootstrap_port", number(8998), "VLLM_MOONCAKE_BOOTSTRAP_PORT of the engines")
	}
}

// objectName returns the name of an object of Kubernetes that is most like name.
func objectName(name string) string {
	name = strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}, name)
	return cmp.Or(strings.Trim(name[:min(len(name), 63)], "-"), "engines")
}

// values are the values of a Helm chart.
type values struct {
	yamlFile
	*table
	// outside are the keys beside those of the chart, if it is nested in another one.
	outside []tableEntry
	// parents names the tables of outside.
	parents []string
}

// maxNesting is how deep a chart may be nested in the values of another one.
const maxNesting = 4

// chartValues reads a file as the values of a chart that have one of these keys, or of a chart
// in which that chart is nested. It reports false for any other text, without a problem.
func chartValues(r *report, f File, keys ...string) (*values, bool) {
	var root yaml.Node
	if len(f.Text) > maxText || yaml.Unmarshal(f.Text, &root) != nil || len(root.Content) == 0 || !hasKey(root.Content[0], keys, maxNesting) {
		return nil, false
	}
	v := &values{yamlFile: yamlFile{report: r, file: f.Name}}
	t, ok := v.document(f)
	for depth := maxNesting; ok && depth > 0; depth-- {
		if slices.ContainsFunc(keys, func(key string) bool { _, found := t.find(key); return found }) {
			v.table = t
			return v, true
		}
		i := slices.IndexFunc(t.entries, func(e tableEntry) bool { return hasKey(e.value, keys, depth-1) })
		if i < 0 {
			break
		}
		nested := t.entries[i]
		for _, e := range slices.Delete(slices.Clone(t.entries), i, i+1) {
			v.outside, v.parents = append(v.outside, e), append(v.parents, t.name(e.key))
		}
		t = v.yamlFile.table(t.name(nested.key), nested.value)
	}
	return nil, false
}

// hasKey reports whether a mapping, or one within it, has one of the keys with a mapping. It
// follows no alias, so that its time is proportional to the file.
func hasKey(n *yaml.Node, keys []string, depth int) bool {
	if n.Kind != yaml.MappingNode || depth == 0 {
		return false
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if slices.Contains(keys, n.Content[i].Value) && n.Content[i+1].Kind == yaml.MappingNode {
			return true
		}
	}
	for i := 1; i < len(n.Content); i += 2 {
		if hasKey(n.Content[i], keys, depth-1) {
			return true
		}
	}
	return false
}

// others notes the keys of the charts around this one.
func (v *values) others(d *document, consequence string) {
	for i, e := range v.outside {
		d.note(e.line, v.parents[i], "%s", consequence)
	}
}

// scalars returns the items of a list as words.
func scalars(y *yamlFile, nodes []*yaml.Node, key string) []word {
	var words []word
	for _, node := range nodes {
		n := resolve(node)
		if n.Kind != yaml.ScalarNode {
			y.problem(y.file, node.Line, key, "want a list of texts, found a %s", kindOf(node))
			continue
		}
		words = append(words, word{text: n.Value, line: node.Line})
	}
	return words
}

// emptyValues reports whether a value of a chart has no text and no number.
func emptyValues(n *yaml.Node) bool {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value == "" || n.ShortTag() == "!!null"
	case yaml.MappingNode, yaml.SequenceNode:
		step := 1
		if n.Kind == yaml.MappingNode {
			step = 2
		}
		for i := step - 1; i < len(n.Content); i += step {
			if !emptyValues(n.Content[i]) {
				return false
			}
		}
		return true
	}
	return false
}

// embedded reads a text of a value as YAML whose lines are those of the file.
func (y *yamlFile) embedded(key string, node *yaml.Node) (*table, bool) {
	n := resolve(node)
	var root yaml.Node
	if n.Kind != yaml.ScalarNode {
		y.problem(y.file, node.Line, key, "want a text of YAML, found a %s", kindOf(node))
		return nil, false
	}
	err := yaml.Unmarshal([]byte(n.Value), &root)
	switch {
	case err != nil:
		before := len(y.problems)
		y.syntax(err)
		y.problems[before].Line += node.Line
		y.problems[before].Key = printable(key)
		return nil, false
	case len(root.Content) == 0 || resolve(root.Content[0]).Kind != yaml.MappingNode:
		y.problem(y.file, node.Line, key, "want keys with values")
		return nil, false
	}
	if n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		shift(&root, node.Line)
	}
	return y.table("", root.Content[0]), true
}

// shift adds by to the lines of a tree.
func shift(node *yaml.Node, by int) {
	node.Line += by
	for _, c := range node.Content {
		shift(c, by)
	}
}
