package engine

import "github.com/pdproxy/pdproxy/abi"

// Protocol is the part of a connector that the registry needs to probe engines. Package
// connector implements it. The methods are pure: the registry does the I/O.
type Protocol interface {
	// Flow is the order of the two legs; aggregated means that the protocol has only
	// one.
	Flow() abi.Flow
	// BothPairs reports whether an instance of role both can take one leg of a pair. If
	// not, it serves whole requests only.
	BothPairs() bool
	// HealthPath is the path of a GET that starts no generation on the engine and answers
	// 2xx if the engine is healthy. bootstrap: the GET goes to the instance's bootstrap
	// port instead of its URL (sglang prefill).
	HealthPath(role abi.Role) (path string, bootstrap bool)
	// FactPaths are the paths that are read each time an instance becomes ready.
	FactPaths(role abi.Role) []string
	// ReadFacts adds the facts in the answer to one of FactPaths. An error means that the
	// instance cannot be used with this connector. A path that an old engine does not
	// serve (404) is not an error. Status 0 means no answer. Then a nil error means that
	// the instance can be used without these facts.
	ReadFacts(f *Facts, path string, status int, body []byte) error
	// Compatible returns why prefill p and decode d cannot be paired, or nil.
	Compatible(p, d *Facts) error
}

// RegistryProtocol is a Protocol whose engines have a registry on their bootstrap port,
// which has further facts.
type RegistryProtocol interface {
	Protocol
	// RegistryPath is the path of a GET to the bootstrap port after FactPaths; "" for
	// none. Its answer goes to ReadFacts.
	RegistryPath(role abi.Role) string
	// RegistryProbed reports whether RegistryPath is also read with every health probe,
	// because its answer changes with the engine's process (Facts.Epoch).
	RegistryProbed() bool
}
