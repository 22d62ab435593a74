package config

// Pairs configures the pairing of prefill and decode engines.
type Pairs struct {
	// AllowIncompatible also pairs engines whose facts exclude a transfer (page size,
	// KV cache type, release, tensor-parallel size): for fleets that were started with
	// the engines' own check disabled. Default false: no request uses such a pair.
	AllowIncompatible bool `toml:"allow_incompatible"`
	// SameLabels lists labels of engines, such as "zone". Both legs of a request then
	// run on engines with the same values of these labels, with every place policy. An
	// engine without one of the labels takes no leg of two. Default []: no label.
	SameLabels []string `toml:"same_labels"`
	// WarmUp sends a request of one token through each new pair, so that the engines
	// connect before the first user's request; never to an engine with requests in
	// flight. If it fails, the circuit of the pair opens. Engines that require the clients'
	// API keys reject it. Broken pairs get such a request in any case. Default false.
	WarmUp bool `toml:"warm_up"`
}

func defaultPairs() Pairs {
	return Pairs{SameLabels: []string{}}
}
