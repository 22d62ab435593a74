// Command wasm is the module of all built-in policies: `make policies` builds it
// into ../builtin.wasm. Its configuration is their parameters, one a line.
// Natively it is an empty program.
package main

import (
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
	"github.com/pdproxy/pdproxy/policies/builtin"
)

// all holds the policies of this instance of the module.
var all = builtin.New()

func init() {
	for _, p := range all.Plans() {
		guest.Plan(p.Name, func(f *abi.PlanFacts) abi.PlanAnswer { return abi.PlanAnswer{Decision: p.Decide(f)} }, p.Needs)
	}
	for _, p := range all.Places() {
		guest.Place(p.Name, p.Decide, p.Needs)
	}
	for _, p := range all.Mints() {
		guest.Mint(p.Name, p.Decide, p.Needs)
	}
	for _, p := range all.Retains() {
		guest.Retain(p.Name, p.Decide, p.Needs)
	}
	for _, p := range all.Evicts() {
		guest.Evict(p.Name, p.Decide, p.Needs)
	}
	guest.OnConfigure(func(text string) bool {
		err := all.Configure(text)
		if err != nil {
			guest.Log(guest.LogError, err.Error())
		}
		for _, p := range all.Places() { // parameters change the needs
			guest.PlaceNeeds(p.Name, p.Needs)
		}
		var headers []string
		for _, s := range all.Scorers() {
			guest.Score(s.ID, s.Score, s.Needs)
			for _, name := range s.Headers {
				if !slices.Contains(headers, name) {
					headers = append(headers, name)
				}
			}
		}
		guest.Headers(headers...)
		return err == nil
	})
}

func main() {}
