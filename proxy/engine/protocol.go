package engine

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

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
	// Tokenizes is the form in which the engines answer requests for the token ids of a
	// prompt.
	Tokenizes() tokens.Dialect
	// Loads lists the routes on which the engines may report their load, the best first;
	// empty: they report none.
	Loads() []LoadRoute
}

// PortKeeper is a Protocol whose decode engines may keep the ports of a prefill process after
// another process has taken its bootstrap address. A request of such a pair waits until a time
// limit ends it.
type PortKeeper interface {
	Protocol
	KeepsPorts()
}

// LoadRoute is an HTTP route of an engine. A GET of Path answers with a load report.
type LoadRoute struct {
	Path string // with its query
	Form LoadForm
}

// LoadForm is the form of a load report. Package loads reads the forms.
type LoadForm uint8

// The forms of load reports.
const (
	LoadMetrics      LoadForm = iota // Prometheus' text format, with the names of vLLM or SGLang
	LoadSGLang                       // GET /v1/loads of SGLang
	LoadSGLangLegacy                 // GET /get_load of earlier SGLang
	LoadTRTLLM                       // GET /metrics of TensorRT-LLM: a JSON list
)

// RegistryProtocol is a Protocol whose engines have a registry on their bootstrap port. The
// registry has further facts.
type RegistryProtocol interface {
	Protocol
	// RegistryPath is the path of a GET to the bootstrap port after FactPaths; "" for
	// none. Its answer goes to ReadFacts.
	RegistryPath(role abi.Role) string
	// RegistryProbed reports whether RegistryPath is also read with every health probe,
	// because its answer changes with the engine's process (Facts.Epoch).
	RegistryProbed() bool
}
