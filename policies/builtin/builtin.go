// Package builtin is the only list of the built-in policies: their names,
// needs, parameters and code. The proxy and the WebAssembly module are both
// made from it.
package builtin

import (
	"errors"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/conversation"
	"github.com/pdproxy/pdproxy/policies/dynamocost"
	"github.com/pdproxy/pdproxy/policies/kvaware"
	"github.com/pdproxy/pdproxy/policies/leastload"
	"github.com/pdproxy/pdproxy/policies/likely"
	"github.com/pdproxy/pdproxy/policies/lowestyoungest"
	"github.com/pdproxy/pdproxy/policies/pairaware"
	"github.com/pdproxy/pdproxy/policies/param"
	"github.com/pdproxy/pdproxy/policies/pdauto"
	"github.com/pdproxy/pdproxy/policies/plan"
	"github.com/pdproxy/pdproxy/policies/poweroftwo"
	"github.com/pdproxy/pdproxy/policies/retain"
	"github.com/pdproxy/pdproxy/policies/roundrobin"
	"github.com/pdproxy/pdproxy/policies/scorers"
	"github.com/pdproxy/pdproxy/policies/sglangcache"
	"github.com/pdproxy/pdproxy/policies/sloaware"
	"github.com/pdproxy/pdproxy/policies/snowflake"
	"github.com/pdproxy/pdproxy/policies/trtllmconversation"
	"github.com/pdproxy/pdproxy/policies/trtllmkv"
)

// Policy is one policy of a hook whose code is an F.
type Policy[F any] struct {
	Name   string // in the configuration
	Needs  abi.Needs
	Decide F
}

// Policies holds all built-in policies with one set of parameters. Only its
// owner may set parameters. While none is set, it is safe for concurrent use.
type Policies struct {
	pdAuto       pdauto.Params
	conversation conversation.Params
	kvAware      kvaware.Params
	pairAware    pairaware.Params
	trtllmKV     trtllmkv.Params
	sglangCache  sglangcache.Params
	dynamoCost   dynamocost.Params
	sloAware     sloaware.Params
	likely       likely.Params
	scorers      []scorers.Scorer
}

// New returns the policies with the defaults of all parameters.
func New() *Policies {
	return &Policies{
		pdAuto:       pdauto.Defaults(),
		conversation: conversation.Defaults(),
		kvAware:      kvaware.Defaults(),
		pairAware:    pairaware.Defaults(),
		trtllmKV:     trtllmkv.Defaults(),
		sglangCache:  sglangcache.Defaults(),
		dynamoCost:   dynamocost.Defaults(),
		sloAware:     sloaware.Defaults(),
		likely:       likely.Defaults(),
	}
}

// Plans returns the plan policies.
func (p *Policies) Plans() []Policy[func(*abi.PlanFacts) abi.PlanDecision] {
	return []Policy[func(*abi.PlanFacts) abi.PlanDecision]{
		{"auto", 0, plan.Auto},
		{"always", 0, plan.Always},
		{"never", 0, plan.Never},
		{"pd_auto", pdauto.Needs, p.pdAuto.Plan},
	}
}

// Places returns the place policies.
func (p *Policies) Places() []Policy[func(*abi.PlaceFacts) abi.PlaceDecision] {
	return []Policy[func(*abi.PlaceFacts) abi.PlaceDecision]{
		{"round_robin", 0, roundrobin.Place},
		{"least_load", 0, leastload.Place},
		{"power_of_two", 0, poweroftwo.Place},
		{"conversation", conversation.Needs, p.conversation.Place},
		{"kv_aware", p.kvAware.Needs(), p.kvAware.Place},
		{"pair_aware", p.pairAware.Needs(), p.pairAware.Place},
		{"trtllm_kv_cache_aware", trtllmkv.Needs, p.trtllmKV.Place},
		{"trtllm_conversation", trtllmconversation.Needs, trtllmconversation.Place},
		{"sglang_cache_aware", sglangcache.Needs, p.sglangCache.Place},
		{"dynamo_cost", dynamocost.Needs, p.dynamoCost.Place},
		{"slo_aware", p.sloAware.Needs(), p.sloAware.Place},
	}
}

// Mints returns the mint policies.
func (p *Policies) Mints() []Policy[func(*abi.MintFacts) uint64] {
	return []Policy[func(*abi.MintFacts) uint64]{{"snowflake", 0, snowflake.Mint}}
}

// Retains returns the retain policies.
func (p *Policies) Retains() []Policy[func(*abi.RetainFacts) abi.RetainDecision] {
	return []Policy[func(*abi.RetainFacts) abi.RetainDecision]{
		{"likely", 0, p.likely.Retain},
		{"lease", 0, retain.Lease},
		{"none", 0, retain.None},
	}
}

// Scorers returns the scorers that the configuration has added, in its order. There is none without a
// configuration.
func (p *Policies) Scorers() []scorers.Scorer { return p.scorers }

// AddScorer adds the scorer of an ID of package scorers.
func (p *Policies) AddScorer(id string) error {
	s, err := scorers.New(id)
	if err == nil {
		p.scorers = append(p.scorers, s)
	}
	return err
}

// Evicts returns the evict policies.
func (p *Policies) Evicts() []Policy[func(*abi.EvictFacts) int32] {
	return []Policy[func(*abi.EvictFacts) int32]{{"lowest_youngest", 0, lowestyoungest.Evict}}
}

// Table returns the parameters of a policy, nil when it has none. A value set
// in the table applies to the policy.
func (p *Policies) Table(policy string) param.Table {
	switch policy {
	case "pd_auto":
		return p.pdAuto.Table()
	case "conversation":
		return p.conversation.Table()
	case "kv_aware":
		return p.kvAware.Table()
	case "pair_aware":
		return p.pairAware.Table()
	case "trtllm_kv_cache_aware":
		return p.trtllmKV.Table()
	case "sglang_cache_aware":
		return p.sglangCache.Table()
	case "dynamo_cost":
		return p.dynamoCost.Table()
	case "slo_aware":
		return p.sloAware.Table()
	case "likely":
		return p.likely.Table()
	}
	return nil
}

// Configured lists the policies that have parameters.
func Configured() []string {
	return []string{"pd_auto", "conversation", "kv_aware", "pair_aware", "trtllm_kv_cache_aware", "sglang_cache_aware", "dynamo_cost", "slo_aware", "likely"}
}

// ScorerLine begins a line of the configuration text that adds a scorer.
const ScorerLine = "score "

// Set sets one parameter. The error names the policy, and the unknown parameter
// or the bounds that the value exceeds.
func (p *Policies) Set(policy, name string, value float64) error {
	t := p.Table(policy)
	if t == nil {
		return errors.New("no policy " + strconv.Quote(policy) + " has parameters; there are " + strings.Join(Configured(), ", "))
	}
	if err := t.Set(name, value); err != nil {
		return errors.New(policy + ": " + err.Error())
	}
	return nil
}

// Configure sets parameters from text, one a line as "kv_aware.patience=32", and adds scorers, one a line
// as "score prefix" with an ID of package scorers.
func (p *Policies) Configure(text string) error {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if id, ok := strings.CutPrefix(line, ScorerLine); ok {
			if err := p.AddScorer(id); err != nil {
				return err
			}
			continue
		}
		name, digits, _ := strings.Cut(line, "=")
		policy, name, ok := strings.Cut(name, ".")
		value, err := strconv.ParseFloat(digits, 64)
		if !ok || err != nil {
			return errors.New("read parameters: " + strconv.Quote(line) + " is not policy.parameter=number")
		}
		if err := p.Set(policy, name, value); err != nil {
			return err
		}
	}
	return nil
}
