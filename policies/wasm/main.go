// Command wasm is the module of all built-in policies: `make policies` builds it
// into ../builtin.wasm.gz. Natively it is an empty program.
package main

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
	"github.com/pdproxy/pdproxy/policies/leastload"
	"github.com/pdproxy/pdproxy/policies/plan"
	"github.com/pdproxy/pdproxy/policies/poweroftwo"
	"github.com/pdproxy/pdproxy/policies/roundrobin"
	"github.com/pdproxy/pdproxy/policies/snowflake"
)

// The names are those of the table in package policies, which this one cannot
// import, for it holds the module; a test compares the two.
func init() {
	guest.Plan("auto", func(f *abi.PlanFacts) abi.PlanAnswer { return abi.PlanAnswer{Decision: plan.Auto(f)} })
	guest.Plan("always", func(f *abi.PlanFacts) abi.PlanAnswer { return abi.PlanAnswer{Decision: plan.Always(f)} })
	guest.Plan("never", func(f *abi.PlanFacts) abi.PlanAnswer { return abi.PlanAnswer{Decision: plan.Never(f)} })
	guest.Place("round_robin", roundrobin.Place)
	guest.Place("least_load", leastload.Place)
	guest.Place("power_of_two", poweroftwo.Place)
	guest.Mint("snowflake", snowflake.Mint)
}

func main() {}
