package importer

import (
	"regexp"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// LLMD converts a file of llm-d: the flags or the YAML configuration of pd-sidecar
// (llm-d-router, pkg/sidecar/proxy/options.go), an EndpointPickerConfig
// (apix/config/v1alpha1), or the Helm values of one of its charts. The content tells which one
// it is.
func LLMD(f File) (Result, error) {
	r := &report{}
	if !r.accepts(f, "llm-d") {
		return Result{}, r.problems
	}
	if v, ok := chartValues(r, f, llmdValueKeys()...); ok || len(r.problems) > 0 {
		l := &llmdValues{yamlFile: yamlFile{report: r, file: f.Name}, doc: &document{}}
		if ok {
			l.read(v)
		}
		return r.finish(f.Name, l.doc)
	}
	if _, isManifest := manifestDocuments(f); isManifest && !pickerKind.Match(f.Text) || !isManifest && flagLine.Match(f.Text) {
		s := &sidecar{
			flags: readFlags(r, f, programsOf("llm-d"), sidecarFlags()),
			doc:   &document{from: "the flags of llm-d's pd-sidecar"},
		}
		s.read()
		return r.finish(f.Name, s.doc)
	}
	y := yamlFile{report: r, file: f.Name}
	root, ok := y.document(f)
	if !ok {
		return r.finish(f.Name, &document{})
	}
	_, plugins := root.find("plugins")
	_, kind := root.find("kind")
	if plugins || kind {
		p := &picker{yamlFile: y, doc: &document{from: "an EndpointPickerConfig of llm-d"}}
		p.read(root)
		p.serve(9002, true, "the default of --grpc-port")
		p.pool("llm-d", config.ConnectorVLLMNixl, "the InferencePool that the picker serves")
		return r.finish(f.Name, p.doc)
	}
	s := &sidecar{flags: sidecarKeys(y, root), doc: &document{from: "the configuration of llm-d's pd-sidecar"}}
	s.read()
	return r.finish(f.Name, s.doc)
}

// pickerKind matches the kind of an EndpointPickerConfig, or of a file that should be one.
var pickerKind = regexp.MustCompile(`(?m)^kind:\s*("?EndpointPickerConfig|[^A-Z]*$)|^plugins:`)

// flagLine matches a line of a file of flags: a flag that is no comment.
var flagLine = regexp.MustCompile(`(?m)^([^#\n]*[ \t'"])?--[a-z]`)

// sidecarKeys returns the keys of a configuration of pd-sidecar as the flags with these
// names.
func sidecarKeys(y yamlFile, root *table) *flags {
	out := &flags{report: y.report, file: y.file, specs: sidecarFlags(), uses: map[string][]use{}}
	for _, e := range root.entries {
		spec, known := out.specs[e.key]
		if !known {
			out.unknown(e.line, e.key)
			continue
		}
		nodes := []*yaml.Node{resolve(e.value)}
		if nodes[0].Kind == yaml.SequenceNode && spec.arity == takesMany {
			nodes = nodes[0].Content
		}
		u := use{line: e.line}
		for _, node := range nodes {
			n := resolve(node)
			if n.Kind != yaml.ScalarNode {
				y.wrong(root, e, "one value")
				continue
			}
			u.values = append(u.values, word{text: n.Value, line: node.Line})
		}
		out.add(e.key, u)
	}
	if len(out.order) == 0 && len(y.problems) == 0 {
		y.problem(y.file, 0, "", "the file has no key of pd-sidecar and no plugins of an EndpointPickerConfig")
	}
	return out
}

// quantity reads a whole number of Kubernetes' resource.Quantity: "100", "5k", "1Ki".
func quantity(s string) (int, bool) {
	units := map[string]int{"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
	m := quantityForm.FindStringSubmatch(s)
	if m == nil {
		return 0, false
	}
	n, err := strconv.Atoi(m[1])
	return n * units[m[2]], err == nil
}

var quantityForm = regexp.MustCompile(`^([0-9]{1,9})(k|M|G|Ki|Mi|Gi)?$`)
