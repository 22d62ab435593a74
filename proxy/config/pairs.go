package config

import "time"

// Pairs is how prefill and decode engines come together.
type Pairs struct {
	// AllowIncompatible pairs engines also where what they say of themselves
	// excludes a transfer (page size, KV cache type, release, tensor-parallel
	// size): for fleets that were started with the engines' own check switched
	// off. Default false: no request meets such a pair.
	AllowIncompatible bool `toml:"allow_incompatible"`
	// WarmUp sends a request of one token through each pair that is new, so that
	// the engines make their connection before the first user asks; never to an
	// engine that has anything in flight. Engines whose API key is the clients'
	// refuse it. Default false.
	WarmUp bool `toml:"warm_up"`
	// WarmUpInterval is the time between the beginnings of two such requests.
	// Default 100ms; never 0.
	WarmUpInterval Duration `toml:"warm_up_interval"`
}

func defaultPairs() Pairs { return Pairs{WarmUpInterval: Duration(100 * time.Millisecond)} }
