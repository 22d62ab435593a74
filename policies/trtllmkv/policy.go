// Package trtllmkv is the built-in place policy trtllm_kv_cache_aware: the
// score of the router of TensorRT-LLM's trtllm-serve disaggregated with type
// kv_cache_aware, for comparison. Source: KvCacheAwareRouter of
// tensorrt_llm/serve/router.py.
package trtllmkv

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs are the additional facts that the policy needs.
const Needs = abi.NeedBlocks

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct{ MaxBatchSize float64 }

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	return param.Table{
		{Name: "max_batch_size", Value: &p.MaxBatchSize, Default: 64, Least: 1, Most: 1e6, Unit: "requests", Meaning: "requests in flight with the same weight as a match of the whole prompt"},
	}
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// Place is the policy, a pure function of the facts that does not allocate. It
// reads p, which must not change during the call. An index of -1 for a leg
// means that no candidate fits.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored, f.Scale = true, abi.LowWins
	return candidates.Legs(f, func(leg candidates.Leg, _ abi.Role) int32 {
		return candidates.Cheapest(f.Candidates, leg, f.Sequence, func(c *abi.Candidate) float64 {
			return float64(c.Requests)/p.MaxBatchSize - share(c, f.Request.PromptTokens)
		})
	})
}

// share returns the matching part of the prompt. No block contains the last
// token of a prompt, and an incomplete last block counts as a whole one.
func share(c *abi.Candidate, prompt int64) float64 {
	block := int64(c.BlockTokens)
	if block == 0 {
		return 0
	}
	padded := (prompt - 1 + block - 1) / block * block
	return float64(c.Matched()) / float64(max(1, padded))
}
