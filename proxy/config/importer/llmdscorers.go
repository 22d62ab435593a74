package importer

import (
	"slices"
	"strings"
)

// scorer is a [[scores.scorer]] without its weight and leg.
type scorer struct {
	name   string
	filter bool
	// pair: it compares a target of decode with the chosen one of prefill.
	pair   bool
	params []param
}

// param is a parameter of a scorer.
type param struct {
	key   string
	value value
}

func inlineTable(params []param) value {
	var parts []string
	for _, p := range params {
		parts = append(parts, p.key+" = "+string(p.value))
	}
	return value("{ " + strings.Join(parts, ", ") + " }")
}

// scorerReader returns the scorers that do the same as a plugin. It takes the parameters that it
// reads, so it is called once for a plugin.
type scorerReader func(*picker, *pickerPlugin) []scorer

// scorerKinds are the types of llm-d's scorers and filters: pkg/epp/framework/plugins/scheduling/scorer
// and filter, with the parameters of each.
func scorerKinds() map[string]scorerReader {
	return map[string]scorerReader{
		"prefix-cache-scorer": plain("prefix", bound{"matchLengthWeight", "match_length_weight", 0, 1, false},
			bound{"matchLengthScaleTokens", "match_length_scale_tokens", 1, 1e9, false}),
		"precise-prefix-cache-scorer":  plain("prefix"),
		"queue-scorer":                 plain("queue"),
		"running-requests-size-scorer": plain("running_requests"),
		"kv-cache-utilization-scorer":  plain("kv_usage"),
		"active-request-scorer": plain("active_requests", bound{"idleThreshold", "idle_threshold", 0, 1e6, true},
			bound{"maxBusyScore", "max_busy_score", 0, 1, true}),
		"load-aware-scorer":            plain("load_aware", bound{"threshold", "threshold", 1, 1e6, true}),
		"token-load-scorer":            plain("token_load", bound{"queueThresholdTokens", "queue_threshold_tokens", 1, 1e12, true}),
		"lora-affinity-scorer":         plain("lora"),
		"no-hit-lru-scorer":            plain("no_hit_lru"),
		"mm-embeddings-cache-scorer":   plain("mm_cache"),
		"latency-scorer":               latencyScorer,
		"session-affinity-scorer":      sessionScorer,
		"context-length-aware":         contextLengthScorer,
		"header-label-affinity-scorer": headerLabelScorer,
		"topology-affinity-scorer":     topologyScorer,
		"endpoint-attribute-scorer":    attributeScorer,

		"label-selector-filter":        labelSelectorFilter,
		"by-label-selector":            labelSelectorFilter,
		"by-label":                     byLabelFilter,
		"utilization-filter":           utilizationFilter,
		"prefix-cache-affinity-filter": prefixAffinityFilter,
		"session-affinity-filter":      sessionFilter,
		"topology-affinity-filter":     topologyFilter,
		"slo-headroom-tier-filter":     asFilter(plain("slo_headroom_filter", bound{"epsilonExploreNeg", "epsilon_explore_neg", 0, 1, false})),
		"endpoint-attribute-filter":    attributeFilter,
	}
}

// bound is a parameter that is a number, with the bounds of llm-d.
type bound struct {
	key, ours   string
	least, most float64
	// lenient: llm-d takes its default for a number below least; else it does not start.
	lenient bool
}

// plain returns the reader of a scorer whose parameters are numbers.
func plain(name string, bounds ...bound) scorerReader {
	return func(p *picker, g *pickerPlugin) []scorer {
		return []scorer{{name: name, params: p.numbers(g, bounds...)}}
	}
}

func asFilter(read scorerReader) scorerReader {
	return func(p *picker, g *pickerPlugin) []scorer {
		list := read(p, g)
		for i := range list {
			list[i].filter = true
		}
		return list
	}
}

// numbers takes the parameters that are numbers.
func (p *picker) numbers(g *pickerPlugin, bounds ...bound) (params []param) {
	for _, b := range bounds {
		least, most := b.least, b.most
		if b.lenient {
			least, most = -1e300, 1e300
		}
		x, e, ok := p.float(g.parameters, b.key, least, most)
		switch {
		case !ok:
		case x < b.least || x > b.most:
			p.doc.note(e.line, g.key(b.key), "is out of range: llm-d uses its default, which is that of the proxy")
		default:
			params = append(params, param{b.ours, amount(x)})
		}
	}
	return params
}

// amount returns x as a TOML integer if it is whole, else as a float.
func amount(x float64) value { return value(strings.TrimSuffix(string(float(x)), ".0")) }

// scorers returns the scorers that do the same as a plugin: none if it is no scorer or has no equal.
func (p *picker) scorers(g *pickerPlugin) []scorer {
	read, known := scorerKinds()[g.kind]
	if known && !g.read {
		g.read, g.scorers = true, read(p, g)
	}
	return g.scorers
}

// latencyScorer reads the weights of scorer/latency. Its composite weights are for engines without
// predictions: the proxy gives them equal weights.
func latencyScorer(p *picker, g *pickerPlugin) []scorer {
	params := p.numbers(g, bound{"ttftWeight", "ttft_weight", 0, 1e6, false}, bound{"tpotWeight", "tpot_weight", 0, 1e6, false})
	switch strategy, e, ok := p.text(g.parameters, "headroomSelectionStrategy"); {
	case ok && strategy == "most":
		params = append(params, param{"most_headroom", "1"})
	case ok && strategy != "least":
		p.doc.note(e.line, g.key(e.key), "is no strategy: llm-d uses least")
	}
	var given []tableEntry
	var weights []float64
	for _, key := range []string{"compositeKVWeight", "compositeQueueWeight", "compositePrefixWeight"} {
		x, e, ok := p.float(g.parameters, key, -1e300, 1e300)
		if ok {
			given = append(given, e)
		} else {
			x = 1
		}
		weights = append(weights, x)
	}
	for _, e := range given {
		if slices.Min(weights) != slices.Max(weights) {
			p.unequal(e.line, g.key(e.key), "without predictions, KV memory, queue and prefix have equal weights")
		}
	}
	return []scorer{{name: "latency", params: params}}
}

// leftOfScorer notes the parameters of a scorer that nothing has read.
func (p *picker) leftOfScorer(g *pickerPlugin) {
	for _, e := range g.parameters.entries {
		switch how, idle := idleParameters()[e.key]; {
		case idle:
			p.doc.note(e.line, g.key(e.key), "%s", how)
		case g.kind == "precise-prefix-cache-scorer":
			p.doc.note(e.line, g.key(e.key), "%s", ownWork()["precise-prefix-cache-producer"])
		default:
			p.unequal(e.line, g.key(e.key), "has no equal: the scorer works without it")
		}
	}
}

// idleParameters are parameters of scorers and filters without an effect on their scores.
func idleParameters() map[string]string {
	const one, ignored = "the proxy has one source of this fact", "llm-d ignores it, too"
	return map[string]string{
		"prefixMatchInfoProducerName": "the proxy has one index of blocks", "latencyPredictionInfoProducerName": one, "inFlightLoadProducerName": one,
		"topologyProducerName": one, "profileName": "the home of a conversation is that of the same leg",
		"requestTimeout": ignored, "prefixPluginType": ignored, "prefixPluginName": ignored,
	}
}
