// Package policies is the table of the built-in policies: decisions written in
// plain Go, one folder each, that run as WebAssembly or, through Native,
// compiled in. They import nothing of the proxy but the contract, are pure
// functions of their facts, and do not allocate while they decide.
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

// Placer is a place policy.
type Placer func(*abi.PlaceFacts) abi.PlaceDecision

// Minter is a mint policy.
type Minter func(*abi.MintFacts) uint64

// PlanNames, PlaceNames and MintNames list the policies of a hook by their names
// in the configuration, in the order in which the module of builtin.wasm has
// them.
func PlanNames() []string { return []string{"auto", "always", "never"} }

// PlaceNames lists the place policies.
func PlaceNames() []string { return []string{"round_robin", "least_load", "power_of_two"} }

// MintNames lists the mint policies.
func MintNames() []string { return []string{"snowflake"} }

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

// Place returns the place policy of that name in the configuration.
func Place(name string) (Placer, bool) {
	switch name {
	case "round_robin":
		return roundrobin.Place, true
	case "least_load":
		return leastload.Place, true
	case "power_of_two":
		return poweroftwo.Place, true
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
