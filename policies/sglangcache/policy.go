// Package sglangcache is the built-in place policy sglang_cache_aware: the rule
// of policy cache_aware of SGLang's model gateway, for comparison. Source:
// sgl-model-gateway/src/policies/cache_aware.rs and, for the defaults, the
// gateway's command line.
package sglangcache

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs are the additional facts that the policy needs.
const Needs = abi.NeedBlocks

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct{ CacheThreshold, BalanceAbs, BalanceRel float64 }

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	return param.Table{
		{Name: "cache_threshold", Value: &p.CacheThreshold, Default: 0.3, Most: 1, Meaning: "share of the prompt above which the longest match decides"},
		{Name: "balance_abs_threshold", Value: &p.BalanceAbs, Default: 64, Most: 1e9, Unit: "requests", Meaning: "difference between the requests of the most and of the least loaded target; above this difference and balance_rel_threshold, load decides"},
		{Name: "balance_rel_threshold", Value: &p.BalanceRel, Default: 1.5, Least: 1, Most: 1e9, Meaning: "factor between the same two numbers; see balance_abs_threshold"},
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
	unit := abi.Scale(0)
	return candidates.Legs(f, func(leg candidates.Leg, phase abi.Role) int32 {
		turn := f.Random
		if phase == abi.RoleDecode {
			turn = ^turn
		}
		byMatch := p.byMatch(f, leg)
		next := abi.UnitRequests
		if byMatch {
			next = abi.UnitTokens
		}
		if f.Scale |= next; unit != 0 && unit != next { // the scores of the two legs have different units
			f.Scale = abi.LowWins
		}
		unit = next
		return candidates.Cheapest(f.Candidates, leg, turn, func(c *abi.Candidate) float64 {
			if byMatch {
				return -float64(c.Matched())
			}
			return float64(c.Requests)
		})
	})
}

// byMatch reports whether the longest match decides rather than the load.
func (p *Params) byMatch(f *abi.PlaceFacts, leg candidates.Leg) bool {
	least, most, matched := int32(math.MaxInt32), int32(0), int64(0)
	for i := range f.Candidates {
		c := &f.Candidates[i]
		if !leg.Suits(c, i) {
			continue
		}
		least, most, matched = min(least, c.Requests), max(most, c.Requests), max(matched, c.Matched())
	}
	if float64(most)-float64(least) > p.BalanceAbs && float64(most) > p.BalanceRel*float64(least) {
		return false
	}
	return float64(matched)/float64(max(1, f.Request.PromptTokens)) > p.CacheThreshold
}
