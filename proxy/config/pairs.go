package config

// Pairs is how prefill and decode engines come together.
type Pairs struct {
	// AllowIncompatible pairs engines also where what they say of themselves
	// excludes a transfer (page size, KV cache type, release, tensor-parallel
	// size): for fleets that were started with the engines' own check switched
	// off. Default false: no request meets such a pair.
	AllowIncompatible bool `toml:"allow_incompatible"`
}
