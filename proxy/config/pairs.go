package config

import "time"

// Pairs configures the pairing of prefill and decode engines.
type Pairs struct {
	// AllowIncompatible also pairs engines whose facts exclude a transfer (page size,
	// KV cache type, release, tensor-parallel size): for fleets that were started with
	// the engines' own check disabled. Default false: no request uses such a pair.
	AllowIncompatible bool `toml:"allow_incompatible"`
	// WarmUp sends a request of one token through each new pair, so that the engines
	// connect before the first user's request; never to an engine with requests in
	// flight. Engines that require the clients' API keys reject it. Default false.
	WarmUp bool `toml:"warm_up"`
	// WarmUpInterval is the time between the starts of two such requests. Default
	// 100ms; never 0.
	WarmUpInterval Duration `toml:"warm_up_interval"`
}

func defaultPairs() Pairs { return Pairs{WarmUpInterval: Duration(100 * time.Millisecond)} }
