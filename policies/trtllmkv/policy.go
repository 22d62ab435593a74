// Package trtllmkv is the built-in place policy trtllm_kv_cache_aware: the score
// by which the router of TensorRT-LLM's trtllm-serve disaggregated chooses with
// type kv_cache_aware, for comparison. Source: KvCacheAwareRouter of
// tensorrt_llm/serve/router.py.
package trtllmkv

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs is what the policy asks for beyond the usual facts.
const Needs = abi.NeedBlocks

// Params is what an operator may change. Table has names, defaults and bounds.
type Params struct{ MaxBatchSize float64 }

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	return param.Table{
		{Name: "max_batch_size", Value: &p.MaxBatchSize, Default: 64, Least: 1, Most: 1e6, Unit: "requests", Meaning: "requests in flight that weigh as much as a match of the whole prompt"},
	}
}

// Defaults returns the parameters as they are when nothing is configured.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// Place is the policy, a pure function of the facts that does not allocate. It
// reads p, which nobody may change meanwhile. An index of -1 where a leg was to
// be placed means that no candidate fits.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored = true
	return candidates.Legs(f, func(leg candidates.Leg, _ abi.Role) int32 {
		return candidates.Cheapest(f.Candidates, leg, f.Sequence, func(c *abi.Candidate) float64 {
			return float64(c.Requests)/p.MaxBatchSize - share(c, f.Request.PromptTokens)
		})
	})
}

// share is the part of the prompt that matches. The last token of a prompt is in
// no block, and a last block that is not full counts as a whole one.
func share(c *abi.Candidate, prompt int64) float64 {
	block := int64(c.BlockTokens)
	if block == 0 {
		return 0
	}
	padded := (prompt - 1 + block - 1) / block * block
	return float64(c.Matched()) / float64(max(1, padded))
}
