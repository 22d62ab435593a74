// Package dynamocost is the built-in place policy dynamo_cost: the cost
// function of NVIDIA Dynamo's KV router, for comparison. Source: the default
// worker selector of lib/kv-router/src/scheduling and its configuration's
// defaults.
package dynamocost

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs are the additional facts that the policy needs.
const Needs = abi.NeedBlocks

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct {
	PrefillLoadScale           float64
	OverlapCredit              float64
	HostCacheHit, DiskCacheHit float64
	DecodeActiveRequest        float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	return param.Table{
		{Name: "prefill_load_scale", Value: &p.PrefillLoadScale, Default: 1, Most: 1e6, Meaning: "weight of the blocks to prefill"},
		{Name: "overlap_score_credit", Value: &p.OverlapCredit, Default: 1, Most: 1e6, Meaning: "prefill blocks that a matched block in GPU memory saves"},
		{Name: "host_cache_hit_weight", Value: &p.HostCacheHit, Default: 0.75, Most: 1, Meaning: "the same for a block in host memory"},
		{Name: "disk_cache_hit_weight", Value: &p.DiskCacheHit, Default: 0.25, Most: 1, Meaning: "the same for a block on disk"},
		{Name: "decode_active_request_weight", Value: &p.DecodeActiveRequest, Default: 0, Most: 1e6, Unit: "blocks", Meaning: "cost of a request in flight"},
	}
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// blockTokens is the size of a block, in tokens, that is used when no index has the size.
const blockTokens = 16

// Place is the policy, a pure function of the facts that does not allocate. It
// reads p, which must not change during the call. An index of -1 for a leg
// means that no candidate fits.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored, f.Scale = true, abi.LowWins|abi.UnitBlocks
	return candidates.Legs(f, func(leg candidates.Leg, phase abi.Role) int32 {
		turn := f.Random
		if phase == abi.RoleDecode {
			turn = ^turn
		}
		return candidates.Cheapest(f.Candidates, leg, turn, func(c *abi.Candidate) float64 {
			return p.cost(c, f.Request.PromptTokens, phase)
		})
	})
}

// cost is in blocks. With two legs, the router of prefill does not count the
// blocks of active requests. The router of decode counts only those, each
// prompt as if it shared no block.
func (p *Params) cost(c *abi.Candidate, prompt int64, phase abi.Role) float64 {
	block := float64(c.BlockTokens)
	if block == 0 {
		block = blockTokens
	}
	cost := float64(p.DecodeActiveRequest * float64(c.Requests))
	if phase&abi.RolePrefill != 0 {
		blocks := float64(max(0, c.Queued)+prompt)/block - float64(p.OverlapCredit*float64(c.BlocksGPU)) -
			float64(p.HostCacheHit*float64(c.BlocksCPU)) - float64(p.DiskCacheHit*float64(c.BlocksDisk))
		cost += float64(p.PrefillLoadScale * max(0, blocks))
	}
	if phase&abi.RoleDecode != 0 {
		cost += float64(c.Tokens+prompt) / block
	}
	return cost
}
