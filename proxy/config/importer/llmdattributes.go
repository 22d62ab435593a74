package importer

import (
	"strings"

	"go.yaml.in/yaml/v3"
)

// attributeFacts are the metrics of engines that the proxy reads, with its name for them: those of
// the default engines of core-metrics-extractor (datalayer/extractor/metrics/factories.go).
func attributeFacts() map[string]string {
	return map[string]string{
		"vllm:num_requests_waiting": "queue", "vllm:num_requests_running": "running_requests", "vllm:kv_cache_usage_perc": "kv_usage",
		"sglang:num_queue_reqs": "queue", "sglang:num_running_reqs": "running_requests", "sglang:token_usage": "kv_usage",
	}
}

// fact returns the fact of the proxy that an attribute of endpoints is: core-metrics-extractor names
// the metric of each attribute. "": none.
func (p *picker) fact(attribute string) string {
	extractor := p.firstOf("core-metrics-extractor")
	if extractor == nil {
		return ""
	}
	found, _ := extractor.parameters.find("engineConfigs")
	fact := ""
	for _, engine := range sequence(found.value) {
		for _, custom := range sequence(member(engine, "customMetrics")) {
			key, spec := member(custom, "attributeKey"), member(custom, "metricSpec")
			if key != nil && spec != nil && key.Value == attribute {
				metric, _, _ := strings.Cut(spec.Value, "{")
				fact = attributeFacts()[metric]
			}
		}
	}
	return fact
}

// sequence returns the items of a list; nil for any other node.
func sequence(n *yaml.Node) []*yaml.Node {
	if n == nil || resolve(n).Kind != yaml.SequenceNode {
		return nil
	}
	return resolve(n).Content
}

// attributeScorer reads scorer/endpointattribute. An attribute that is a load of an engine has a scorer
// with the same score: low is good, between the lowest and the highest candidate, or for KV memory
// between 0 and 1.
func attributeScorer(p *picker, g *pickerPlugin) []scorer {
	attribute, _, _ := p.text(g.parameters, "attributeKey")
	producer, _, own := p.text(g.parameters, "producer")
	algorithm, _, _ := p.sub(g.parameters, "algorithm")
	kind, _, _ := p.text(algorithm, "type")
	normalization, _, _ := p.sub(algorithm, "normalization")
	normalization.take("adaptiveRange")
	fixed, _, isFixed := p.sub(normalization, "fixedRange")
	least, _, _ := p.float(fixed, "min", -1e300, 1e300)
	most, _, _ := p.float(fixed, "max", -1e300, 1e300)
	fact := p.fact(attribute)
	if own && producer != "core-metrics-extractor" || kind != "linear_lower_is_better" {
		fact = ""
	}
	share := isFixed && least == 0 && most == 1
	if fact == "" || share != (fact == "kv_usage") || isFixed && !share {
		p.unequal(g.line, g.key(""), "no scorer has this attribute or this range: the proxy reads waiting and running requests and KV memory of engines; the result lacks the scorer")
		return nil
	}
	return []scorer{{name: fact}}
}

// attributeFilter reads filter/endpointattribute. An upper limit of a load of an engine is a limit of
// utilization_filter.
func attributeFilter(p *picker, g *pickerPlugin) []scorer {
	attribute, _, _ := p.text(g.parameters, "attribute")
	producer, _, own := p.text(g.parameters, "producer")
	missing, _, _ := p.text(g.parameters, "onMissing")
	algorithm, _, _ := p.sub(g.parameters, "algorithm")
	algorithm.take("type") // threshold is the only one
	threshold, _, _ := p.sub(algorithm, "threshold")
	operator, _, _ := p.text(threshold, "operator")
	limit, _, ok := p.float(threshold, "value", -1e300, 1e300)
	name := map[string]string{"queue": "max_waiting_requests", "running_requests": "max_running_requests", "kv_usage": "max_kv_usage"}[p.fact(attribute)]
	most := 1e9
	if name == "max_kv_usage" {
		most = 1
	}
	if name == "" || own && producer != "core-metrics-extractor" || operator != "LessThanOrEqual" || missing == "Fail" || !ok || limit < 0 || limit > most {
		p.lose(p.doc, p.file, g.line, g.key(""), "no filter has this attribute or this operator: utilization_filter has upper limits of waiting and running requests and KV memory; the result lacks the filter")
		g.parameters.take("fallbackOnEmpty")
		return nil
	}
	p.fallback(g)
	return []scorer{{name: "utilization_filter", filter: true, params: []param{{name, amount(limit)}}}}
}
