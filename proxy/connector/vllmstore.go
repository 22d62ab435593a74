package connector

import "github.com/pdproxy/pdproxy/proxy/engine"

// vllmStore is vLLM with a KV cache that its engines share, whichever connector
// they reach it by: LMCacheConnectorV1 and LMCacheMPConnector, MooncakeStore,
// ExampleConnector, offloading to a shared tier. Prefill computes the prompt,
// which puts its KV there; decode is sent the client's request and finds it
// there, by the tokens. The legs say nothing of a transfer, and engines hold
// nothing for each other: there is nothing to pair and nothing to free. LMCache's
// own PD form (enable_pd) is none of these: docs/engines.md says why it has no
// connector.
//
// Sources, in vLLM: examples/disaggregated/lmcache/disagg_prefill_lmcache_v1/
// disagg_proxy_server.py, examples/disaggregated/disaggregated_serving/
// disagg_proxy_demo.py (prefill with one token, then decode as the client asked).
type vllmStore struct {
	nixl // the routes, the facts and the forms that no vLLM engine splits are the same
}

func (vllmStore) Name() string { return "vllm-store" }

// Compatible: engines that do not fit find nothing of each other's.
func (vllmStore) Compatible(_, _ *engine.Facts) error { return nil }

// Prefill asks for one token, which nobody sees.
func (vllmStore) Prefill(a *Attempt, dst []byte) (Leg, error) {
	leg, err := vllmPrefill(a, dst, nil)
	leg.Header = vllmHeader(a.LegID, a.Prefill)
	return leg, err
}

// ReadPrefill has nothing to learn but that the prompt was computed.
func (vllmStore) ReadPrefill(_ *Attempt, body []byte) (Handoff, error) {
	_, err := transferParams(body) // checks all of the body
	return Handoff{}, err
}

// Decode is the client's request.
func (s vllmStore) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	return s.Aggregated(a, dst)
}

// Reclaims: engines hold nothing for each other.
func (vllmStore) Reclaims() bool { return false }

// Cleanup: the same.
func (vllmStore) Cleanup(*Attempt, Orphan) []Cleanup { return nil }
