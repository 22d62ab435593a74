// Package policies is the table of the built-in policies: decisions written in
// plain Go, one folder each, that run as WebAssembly or, through Native,
// compiled in. They import nothing of the proxy but the contract, keep no state
// that the proxy needs to be correct, and do not allocate while they decide.
package policies

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/leastload"
	"github.com/pdproxy/pdproxy/policies/plan"
	"github.com/pdproxy/pdproxy/policies/poweroftwo"
	"github.com/pdproxy/pdproxy/policies/roundrobin"
	"github.com/pdproxy/pdproxy/policies/snowflake"
)

// Planner is a plan policy.
type Planner func(*abi.PlanFacts) abi.PlanDecision

// Placer is a place policy with its own state; many goroutines call it at once.
type Placer interface {
	Place(*abi.PlaceFacts) abi.PlaceDecision
}

// Minter is a mint policy.
type Minter func(*abi.MintFacts) uint64

// Plan returns the plan policy of that name in the configuration.
func Plan(name string) (Planner, bool) {
	switch name {
	case "auto":
		return plan.Auto, true
	case "always":
		return plan.Always, true
	case "never":
		return plan.Never, true
	}
	return nil, false
}

// Place returns a new place policy of that name in the configuration, with
// state of its own. seed matters to policies that draw at random.
func Place(name string, seed uint64) (Placer, bool) {
	switch name {
	case "round_robin":
		return &roundrobin.Policy{}, true
	case "least_load":
		return &leastload.Policy{}, true
	case "power_of_two":
		return poweroftwo.New(seed), true
	}
	return nil, false
}

// Mint returns the mint policy of that name in the configuration.
func Mint(name string) (Minter, bool) {
	if name == "snowflake" {
		return snowflake.Mint, true
	}
	return nil, false
}
