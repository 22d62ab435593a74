package engine

import "github.com/pdproxy/pdproxy/abi"

// Protocol is what the registry must know of a connector to probe its engines.
// Declared here because it is called here; package connector implements it. Its
// methods are pure: the registry does the I/O.
type Protocol interface {
	// Flow is the order of the two legs; aggregated says that the protocol has
	// only one.
	Flow() abi.Flow
	// BothPairs reports whether an instance of role both can take one leg of a pair;
	// else it serves whole requests only.
	BothPairs() bool
	// HealthPath is a GET that costs the engine nothing and answers 2xx when it
	// is well. bootstrap says that it goes to the instance's bootstrap port
	// instead of its URL (sglang prefill).
	HealthPath(role abi.Role) (path string, bootstrap bool)
	// FactPaths are GETs asked each time an instance turns ready.
	FactPaths(role abi.Role) []string
	// ReadFacts adds what the answer to one of FactPaths says. An error means
	// the instance cannot be used with this connector; a path that an old engine
	// does not serve (404) is not an error. Status 0 is no answer: nil then says
	// that the instance can be used without it.
	ReadFacts(f *Facts, path string, status int, body []byte) error
	// Compatible reports why prefill p and decode d cannot be paired, or nil.
	Compatible(p, d *Facts) error
}

// RegistryProtocol is a Protocol whose engines have a registry of their own on
// their bootstrap port, which knows facts of them as well.
type RegistryProtocol interface {
	Protocol
	// RegistryPath is a GET asked of the bootstrap port behind FactPaths; "" for
	// none. Its answer goes to ReadFacts.
	RegistryPath(role abi.Role) string
	// RegistryProbed reports that it is asked with every health probe as well: what
	// it says ends with the engine's process (Facts.Epoch).
	RegistryProbed() bool
}
