package importer

import (
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// emptyFilter is the difference of a filter that leaves no engine.
const emptyFilter = "a filter that would remove every engine removes none; llm-d answers 429"

// roleLabel is the label of a pod's role, by which the proxy chooses the engines of a leg itself.
const roleLabel = "llm-d.ai/role"

// labelText matches what the label of an engine and its value may be (proxy/config/labels.go).
var labelText = regexp.MustCompile(`^[A-Za-z0-9_./:-]{1,63}$`)

// labelRule is one condition of a label filter.
type labelRule struct {
	line   int
	label  string
	values []string // empty: any value
	not    bool
}

// labelSelectorFilter reads a LabelSelector of Kubernetes (filter/bylabel/selector.go).
func labelSelectorFilter(p *picker, g *pickerPlugin) []scorer {
	var rules []labelRule
	labels, _, _ := p.sub(g.parameters, "matchLabels")
	expressions, _, _ := p.list(g.parameters, "matchExpressions")
	if n := len(labels.entries) + len(expressions); n > maxScorers {
		p.problem(p.file, g.line, "plugins.parameters", "has %d conditions: a set has at most %d scorers", n, maxScorers)
		return nil
	}
	for _, e := range slices.Clone(labels.entries) {
		if value, _, ok := p.text(labels, e.key); ok {
			rules = append(rules, labelRule{e.line, e.key, []string{value}, false})
		}
	}
	for _, node := range expressions {
		const at = "plugins.parameters.matchExpressions"
		t := p.table(at, node)
		r := labelRule{line: node.Line}
		r.label, _, _ = p.text(t, "key")
		operator, _, _ := p.text(t, "operator")
		r.values = p.words(t, "values")
		p.leftKeys(t)
		r.not = operator == "NotIn" || operator == "DoesNotExist"
		listed := operator == "In" || operator == "NotIn"
		if r.label == "" || !listed && operator != "Exists" && operator != "DoesNotExist" || listed != (len(r.values) > 0) {
			p.problem(p.file, node.Line, at, "want a key, and the operator In or NotIn with values, or Exists or DoesNotExist without values")
			continue
		}
		rules = append(rules, r)
	}
	return p.labelFilters(g, rules)
}

// byLabelFilter reads the values that a label may have (filter/bylabel/filter.go).
func byLabelFilter(p *picker, g *pickerPlugin) []scorer {
	label, e, ok := p.text(g.parameters, "label")
	values := p.words(g.parameters, "validValues")
	none, at, _ := p.boolean(g.parameters, "allowsNoLabel")
	switch {
	case !ok || label == "":
		p.problem(p.file, g.line, "plugins.parameters.label", "is required")
		return nil
	case len(values) == 0 && !none:
		p.problem(p.file, e.line, "plugins.parameters.validValues", "is required without allowsNoLabel")
		return nil
	case label != roleLabel && none && len(values) > 0:
		p.lose(p.doc, p.file, at.line, g.key(at.key), "no filter keeps both engines with a value of the label and engines without the label: the result lacks the filter")
		return nil
	}
	return p.labelFilters(g, []labelRule{{g.line, label, values, len(values) == 0}})
}

// words takes a list of texts.
func (p *picker) words(t *table, key string) (values []string) {
	nodes, e, _ := p.list(t, key)
	for _, w := range scalars(&p.yamlFile, nodes, t.name(e.key)) {
		values = append(values, w.text)
	}
	return values
}

// labelFilters returns the filters of rules that an engine must all fulfil.
func (p *picker) labelFilters(g *pickerPlugin, rules []labelRule) (filters []scorer) {
	var labels []engineLabel
	for _, r := range rules {
		values := strings.Join(r.values, " ")
		sound := labelText.MatchString(r.label) && len(values) <= maxScorerText && !slices.ContainsFunc(r.values, func(v string) bool { return !labelText.MatchString(v) })
		switch {
		case r.label == roleLabel:
			p.doc.note(r.line, g.key(r.label), "the roles of the engines decide which leg they take")
		case !sound:
			p.lose(p.doc, p.file, r.line, g.key(""), "a label and its values have 1 to 63 letters, digits and - _ . / : and all values %d bytes: the result lacks the filter", maxScorerText)
		default:
			params := []param{{"label", text(r.label)}}
			if values != "" {
				params = append(params, param{"values", text(values)})
			}
			if r.not {
				params = append(params, param{"not", "1"})
			}
			labels = append(labels, engineLabel{r.label, r.label})
			filters = append(filters, scorer{name: "label_filter", filter: true, params: params})
		}
	}
	p.needLabels(g, labels...)
	if len(filters) > 0 {
		p.unequal(g.line, g.key(""), emptyFilter)
	}
	return filters
}

// engineLabel is a label of engines that a scorer reads, and the label of their pods with its value.
type engineLabel struct{ name, pod string }

// needLabels notes labels of engines that the scorers of a plugin read. The engines get them from their
// pods, as far as an engine has room for labels.
func (p *picker) needLabels(g *pickerPlugin, labels ...engineLabel) {
	var lost []string
	for _, l := range labels {
		entry := l.name
		if l.pod != l.name {
			entry += "=" + l.pod
		}
		if !slices.Contains(p.labels, entry) {
			if p.roomFor(l.name) {
				p.labels = append(p.labels, entry)
			} else {
				lost = append(lost, entry)
			}
		}
	}
	if len(lost) > 0 {
		p.unequal(g.line, g.key(""), "an engine has one label of each name, and at most %d besides zone, revision and hardware: it lacks %s", config.OtherLabels, strings.Join(lost, ", "))
	}
}

// roomFor reports whether discovery.kubernetes.labels may also have a label of that name.
func (p *picker) roomFor(name string) bool {
	own := func(name string) bool { return name == "zone" || name == "revision" || name == "hardware" }
	others := 0
	for _, entry := range p.labels {
		known, _ := config.PodLabel(entry)
		if known == name {
			return false
		}
		if !own(known) {
			others++
		}
	}
	return own(name) || others < config.OtherLabels
}

// utilizationMetrics are the metrics of filter/utilization with the proxy's parameters.
func utilizationMetrics() map[string]string {
	return map[string]string{"active-requests": "max_active_requests", "running-requests": "max_running_requests",
		"waiting-queue": "max_waiting_requests", "kv-cache-utilization": "max_kv_usage"}
}

// utilizationFilter reads the limits of filter/utilization.
func utilizationFilter(p *picker, g *pickerPlugin) []scorer {
	const at = "plugins.parameters.conditions"
	nodes, e, _ := p.list(g.parameters, "conditions")
	if len(nodes) == 0 {
		p.problem(p.file, max(e.line, g.line), at, "is required")
	}
	limits := map[string]float64{}
	var order []string
	for _, node := range nodes {
		t := p.table(at, node)
		metric, _, _ := p.text(t, "metric")
		ours, known := utilizationMetrics()[metric]
		most := 1e9
		if ours == "max_kv_usage" {
			most = 1
		}
		x, _, ok := p.float(t, "maxValue", 0, most)
		p.leftKeys(t)
		if !known || !ok {
			p.problem(p.file, node.Line, at, "want a metric (active-requests, running-requests, waiting-queue or kv-cache-utilization) and its maxValue")
			continue
		}
		if before, twice := limits[ours]; twice {
			limits[ours] = min(before, x)
			continue
		}
		limits[ours] = x
		order = append(order, ours)
	}
	p.fallback(g)
	var params []param
	for _, name := range order {
		params = append(params, param{name, amount(limits[name])})
	}
	return []scorer{{name: "utilization_filter", filter: true, params: params}}
}

// fallback reads whether a filter that leaves no engine keeps all.
func (p *picker) fallback(g *pickerPlugin) {
	if on, e, given := p.boolean(g.parameters, "fallbackOnEmpty"); !on {
		line := g.line
		if given {
			line = e.line
		}
		p.unequal(line, g.key("fallbackOnEmpty"), emptyFilter)
	}
}

// prefixAffinityFilter reads filter/prefixcacheaffinity.
func prefixAffinityFilter(p *picker, g *pickerPlugin) []scorer {
	params := p.numbers(g, bound{"affinityThreshold", "affinity_threshold", 0, 1, false},
		bound{"explorationProbability", "exploration_probability", 0, 1, false}, bound{"maxTTFTPenaltyMs", "max_ttft_penalty_ms", 0, 1e9, false})
	source, e, given := p.text(g.parameters, "ttftSource")
	if source != "latencyPredictor" {
		line := g.line
		if given {
			line = e.line
		}
		p.unequal(line, g.key("ttftSource"), "max_ttft_penalty_ms compares times that the proxy predicts, not tokens in flight by peakPrefillThroughput")
	}
	if rate, ok := g.parameters.take("peakPrefillThroughput"); ok {
		p.doc.note(rate.line, g.key(rate.key), "has no effect: the proxy predicts the times")
	}
	return []scorer{{name: "prefix_affinity_filter", filter: true, params: params}}
}

// contextLengthScorer reads scorer/contextlengthaware, which is a scorer and with enableFiltering also
// a filter. The range of an engine is its label context_length, whatever the label of its pod is.
func contextLengthScorer(p *picker, g *pickerPlugin) []scorer {
	pod, _, ok := p.text(g.parameters, "label")
	if !ok || pod == "" {
		pod = "llm-d.ai/context-length-range"
	}
	p.needLabels(g, engineLabel{"context_length", pod})
	scorers := []scorer{{name: "context_length"}}
	if filter, at, _ := p.boolean(g.parameters, "enableFiltering"); filter {
		p.unequal(at.line, g.key(at.key), emptyFilter)
		scorers = append(scorers, scorer{name: "context_length_filter", filter: true})
	}
	return scorers
}

// headerLabelScorer reads scorer/headerlabelaffinity.
func headerLabelScorer(p *picker, g *pickerPlugin) []scorer {
	header, _, named := p.text(g.parameters, "headerName")
	label, _, labelled := p.text(g.parameters, "labelKey")
	switch {
	case !named || !labelled || header == "" || label == "":
		p.problem(p.file, g.line, "plugins.parameters", "headerName and labelKey are required")
		return nil
	case !labelText.MatchString(label) || strings.Contains(header, "&"):
		p.unequal(g.line, g.key(""), "a label has 1 to 63 letters, digits and - _ . / :, and a header no &: the result lacks the scorer")
		return nil
	}
	if names, err := abi.ParseHeaders(header); err != nil || len(names) != 1 {
		p.unequal(g.line, g.key(""), "no policy can read the header %s: the result lacks the scorer", text(header))
		return nil
	}
	p.needLabels(g, engineLabel{label, label})
	return []scorer{{name: "header_label", params: []param{{"header", text(header)}, {"label", text(label)}}}}
}

// topologyScorer reads scorer/topologyaffinity.
func topologyScorer(p *picker, g *pickerPlugin) []scorer {
	return []scorer{{name: "topology", pair: true, params: p.places(g)}}
}

// topologyFilter reads filter/topologyaffinity.
func topologyFilter(p *picker, g *pickerPlugin) []scorer {
	params := p.places(g)
	if level, e, ok := p.text(g.parameters, "minAffinity"); ok && level != "" {
		i := slices.IndexFunc(topologyLevels(), func(l topologyLevel) bool { return l.name == level })
		if i < 0 {
			p.problem(p.file, e.line, "plugins.parameters.minAffinity", "want host, rack, zone or region")
		}
		params = append(params, param{"min_affinity", number(i + 1)})
	}
	return []scorer{{name: "topology_filter", filter: true, pair: true, params: params}}
}

// topologyLevel is a part of the place of an engine: its name here, the parameter of
// topology-extractor (datalayer/extractor/topology), and the label of pods that llm-d reads by
// default.
type topologyLevel struct{ name, parameter, label string }

func topologyLevels() []topologyLevel {
	return []topologyLevel{{"host", "hostname", "kubernetes.io/hostname"}, {"rack", "rack", "topology.kubernetes.io/rack"},
		{"zone", "zone", "topology.kubernetes.io/zone"}, {"region", "region", "topology.kubernetes.io/region"}}
}

// places returns the names of the labels with the place of an engine: those that the file names, else
// the defaults of the proxy, which are the names of the levels.
func (p *picker) places(g *pickerPlugin) (params []param) {
	var labels []engineLabel
	extractor := p.firstOf("topology-extractor")
	for _, level := range topologyLevels() {
		name, pod := level.name, level.label
		if extractor != nil {
			if e, found := extractor.parameters.find(level.parameter); found && resolve(e.value).Kind == yaml.ScalarNode && labelText.MatchString(resolve(e.value).Value) {
				name = resolve(e.value).Value
				pod = name
				params = append(params, param{level.name, text(name)})
			}
		}
		labels = append(labels, engineLabel{name, pod})
	}
	p.needLabels(g, labels...)
	return params
}
