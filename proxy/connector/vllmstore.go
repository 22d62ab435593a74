package connector

import "github.com/pdproxy/pdproxy/proxy/engine"

// vllmStore is vLLM with a KV cache that its engines share, by any connector:
// LMCacheConnectorV1 and LMCacheMPConnector, MooncakeStore, ExampleConnector, offloading
// to a shared tier. Prefill computes the prompt and thereby stores its KV in the cache.
// Decode gets the client's request and finds the KV there by the tokens. The legs have no
// transfer parameters, and no engine holds blocks for another engine. So the proxy
// neither pairs engines nor frees blocks. LMCache's own PD mode (enable_pd) is none of
// these: docs/reference/engines.md says why it has no connector.
//
// Sources, in vLLM:
// examples/disaggregated/lmcache/disagg_prefill_lmcache_v1/disagg_proxy_server.py,
// examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py (prefill with one
// token, then decode as the client asked).
type vllmStore struct {
	nixl // same routes, facts and unpairable forms as every vLLM engine
}

func (vllmStore) Name() string { return "vllm-store" }

// Compatible accepts every pair: engines that do not match find no KV of each other.
func (vllmStore) Compatible(_, _ *engine.Facts) error { return nil }

// Prefill requests one token, which no client sees.
func (vllmStore) Prefill(a *Attempt, dst []byte) (Leg, error) {
	return vllmPrefill(a, a.LegID, dst, nil)
}

// ReadPrefill only checks that the prompt was computed.
func (vllmStore) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	_, _, err := transferParams(body, nil, nil) // checks the whole body
	return Handoff{}, err
}

// Decode is the client's request.
func (s vllmStore) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	return s.Aggregated(a, dst)
}

// Reclaims: engines hold nothing for each other.
func (vllmStore) Reclaims() bool { return false }

// Cleanup sends nothing: engines hold nothing for each other.
func (vllmStore) Cleanup(*Attempt, Orphan) []Cleanup { return nil }
