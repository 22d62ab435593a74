package importer

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// origin is a router whose files a reader takes.
type origin struct {
	// name is that of the command.
	name string
	// input says what the reader expects.
	input string
	// programs are the names of the router's programs, in a command line or in a manifest.
	programs []string
	// kind is that of an object of Kubernetes.
	kind string
	// own are top-level keys that only this router has, charts keys of its Helm values at any
	// depth, and others further top-level keys.
	own, charts, others []string
	// flags returns its flags; nil: none.
	flags func() map[string]flagSpec
}

func origins() []origin {
	return []origin{
		{name: "trtllm", input: "a disagg_config.yaml of TensorRT-LLM (context_servers, generation_servers), or the file of its metadata server",
			own: []string{"context_servers", "generation_servers", "disagg_cluster"}, others: slices.Concat(trtllmKeys(), metadataKeys())},
		{name: "vllm-router", input: "the flags of vllm-router, or a Kubernetes manifest whose container runs it",
			programs: []string{"vllm-router", "vllm_router", "vllm_router.launch_router", "launch_router.py"}, flags: vllmFlags},
		{name: "sglang-router", input: "the flags of SGLang's model gateway, or a Kubernetes manifest whose container runs it",
			programs: []string{"sglang-router", "sglang_router", "smg", "amg", "sgl-model-gateway", "sglang_router.launch_router", "launch_router.py"}, flags: sglangFlags},
		{name: "production-stack", input: "the flags of the production stack's router, a Kubernetes manifest whose container runs it, or Helm values with routerSpec or servingEngineSpec",
			programs: []string{"vllm-router", "vllm_router", "vllm_router.app", "app.py"}, charts: []string{"routerSpec", "servingEngineSpec"}, flags: stackFlags},
		{name: "llm-d", input: "an EndpointPickerConfig, Helm values of llm-d, or the flags or the configuration of pd-sidecar, also in a Kubernetes manifest",
			programs: []string{"pd-sidecar", "llm-d-routing-sidecar", "llm-d-router-disagg-sidecar", "routing-sidecar"},
			kind:     "EndpointPickerConfig", own: []string{"plugins", "schedulingProfiles"}, charts: llmdValueKeys(), flags: sidecarFlags},
		{name: "dynamo", input: "the flags of Dynamo's frontend, or a DynamoGraphDeployment",
			programs: []string{"dynamo.frontend"}, kind: "DynamoGraphDeployment", flags: dynamoFlags},
		{name: "litellm", input: "a config.yaml of LiteLLM's proxy (model_list)",
			own: []string{"model_list", "litellm_settings"}, others: []string{"router_settings", "general_settings", "environment_variables"}},
	}
}

// programsOf returns the names of a router's programs.
func programsOf(name string) []string { return originOf(name).programs }

func originOf(name string) origin {
	all := origins()
	return all[slices.IndexFunc(all, func(o origin) bool { return o.name == name })]
}

// accepts reports whether f may be a file of a router. Otherwise the problem says what the reader
// expects, and which router has such files.
func (r *report) accepts(f File, name string) bool {
	s, o := signsOf(f), originOf(name)
	level, other := o.level(s), ""
	for _, one := range origins() {
		if l := one.level(s); l >= chart && l > level {
			level, other = l, one.name
		}
	}
	if other == "" && level > foreign {
		return true
	}
	message := "the file is no input of " + name
	if s.unreadable != "" {
		message = "the file " + s.unreadable
	}
	message += ": expected is " + o.input
	if other != "" {
		message += "; the file looks like one for: pdproxy import " + other
	}
	r.problem(f.Name, 0, "", "%s", message)
	return false
}

// signs are the parts of a file that tell its router.
type signs struct {
	unreadable string // the reason why the file is no input of any router; "": it may be one
	root       *yaml.Node
	documents  []*yaml.Node
	manifest   bool
	words      []word // of a text that is no YAML with keys
	keys       []string
}

// lineKey matches a top-level key of a YAML file.
var lineKey = regexp.MustCompile(`(?m)^"?([A-Za-z_-]+)"?:(?:[ \t\r]|$)`)

func signsOf(f File) (s signs) {
	switch {
	case !utf8.Valid(f.Text) || strings.ContainsRune(string(f.Text), 0):
		s.unreadable = "is no UTF-8 text"
		return s
	case len(f.Text) > maxText:
		s.unreadable = "is larger than 4 MiB"
		return s
	}
	s.documents, s.manifest = manifestDocuments(f)
	var root yaml.Node
	err := yaml.Unmarshal(f.Text, &root)
	switch {
	case err == nil && len(root.Content) > 0 && resolve(root.Content[0]).Kind == yaml.MappingNode:
		s.root = resolve(root.Content[0])
		for i := 0; i < len(s.root.Content); i += 2 {
			s.keys = append(s.keys, s.root.Content[i].Value)
		}
		return s
	case err != nil: // perhaps YAML with a mistake, which the reader names
		for _, m := range lineKey.FindAllStringSubmatch(string(f.Text), -1) {
			s.keys = append(s.keys, m[1])
		}
	}
	w := wordReader{report: &report{}, text: string(f.Text), line: 1}
	s.words = w.split()
	if len(s.words) == 0 {
		s.unreadable = "is empty"
	}
	return s
}

// The levels of a file for a router.
const (
	foreign = iota
	common  // other routers have the keys or flags too
	chart   // a Helm chart, whose keys may be those of another file
	certain // keys, an object or a program of this router alone
)

// level says how certainly a file is one of the router.
func (o *origin) level(s signs) int {
	switch {
	case s.unreadable != "":
		return foreign
	case slices.ContainsFunc(s.keys, func(key string) bool { return slices.Contains(o.own, key) }), runs(s.words, o.programs), o.deploys(s):
		return certain
	case s.root != nil && len(o.charts) > 0 && !s.manifest && hasKey(s.root, o.charts, maxNesting):
		return chart
	case o.may(s):
		return common
	}
	return foreign
}

// deploys reports whether a manifest has an object of the router, or a container that runs it.
func (o *origin) deploys(s signs) bool {
	y := &yamlFile{report: &report{}}
	for _, d := range s.documents {
		if kind := member(d, "kind"); o.kind != "" && kind != nil && kind.Value == o.kind {
			return true
		}
		for _, c := range containers(d, maxNesting+maxNesting) {
			if t := y.table("containers", c); s.manifest && len(o.programs) > 0 && (named(t, o.programs) || runs(y.containerWords(t), o.programs)) {
				return true
			}
		}
	}
	return false
}

// may reports whether a file has a key or a flag of the router.
func (o *origin) may(s signs) bool {
	if s.manifest {
		return false
	}
	var specs map[string]flagSpec
	if o.flags != nil {
		specs = o.flags()
	}
	has := func(name string) bool { _, known := specs[name]; return known }
	for _, key := range s.keys {
		if key == "<<" || slices.Contains(o.others, key) || o.name == "llm-d" && has(key) {
			return true
		}
	}
	return slices.ContainsFunc(s.words, func(w word) bool {
		name, _, _ := strings.Cut(strings.TrimPrefix(w.text, "--"), "=")
		return isFlag(w) && (has(name) || has(strings.TrimPrefix(name, "router-")) || has(strings.TrimPrefix(name, "no-")))
	})
}
