package connector

import (
	"errors"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// none is for engines that serve whole requests and transfer nothing. It adds the rank
// line (the header that vLLM, and SGLang on its OpenAI routes, read) if the instance
// has several ranks. It also adds a separate request id per attempt, because an engine
// that uses the client's id would mix up two attempts with the same id.
type none struct{}

func (none) Name() string                   { return "none" }
func (none) Flow() abi.Flow                 { return abi.FlowAggregated }
func (none) AggregatesOn() abi.Role         { return 0 }
func (none) Serves(api openai.API) bool     { return api.Path() != "" }
func (none) Pairable(*openai.Request) error { return nil }

// HealthPath is the list of models: engines of unknown kind have it, and on some of
// them /health generates a token.
func (none) HealthPath(abi.Role) (path string, bootstrap bool) { return modelsPath, false }

// FactPaths include that of vLLM's KV events. Other programs answer it with 404.
func (none) FactPaths(abi.Role) []string { return []string{modelsPath, eventSourcesPath} }

// Tokenizes assumes vLLM, because an engine of connector none may be any program. The
// proxy stops its requests to an engine that rejects them.
func (none) Tokenizes() tokens.Dialect { return tokens.VLLM }

func (none) Loads() []engine.LoadRoute {
	return []engine.LoadRoute{metricsRoute, {Path: coreLoadsPath, Form: engine.LoadSGLang}}
}

func (none) ReadFacts(f *engine.Facts, path string, status int, body []byte) error {
	ok, err := served(path, status)
	switch {
	case path == eventSourcesPath:
		readEventSources(f, status, body)
		return nil
	case !ok:
		return err
	}
	return readModels(f, body)
}

// BothPairs: no engine pairs.
func (none) BothPairs() bool { return false }

// Compatible rejects every pair.
func (none) Compatible(_, _ *engine.Facts) error {
	return errors.New("connector none transfers no KV")
}

func (none) Aggregated(a *Attempt, dst []byte) (Leg, error) {
	leg := plain(a, dst)
	leg.Header = vllmHeader(a.LegID, a.Decode)
	return leg, nil
}

func (none) Prefill(*Attempt, []byte) (Leg, error)          { return Leg{}, errNoTwoLegs }
func (none) ReadPrefill(*Attempt, []byte) (Handoff, error)  { return Handoff{}, errNoTwoLegs }
func (none) Decode(*Attempt, *Handoff, []byte) (Leg, error) { return Leg{}, errNoTwoLegs }
func (none) Public(_ *Attempt, answer []byte) []byte        { return answer }
func (none) Reclaims() bool                                 { return false }
func (none) Cleanup(*Attempt, Orphan) []Cleanup             { return nil }
