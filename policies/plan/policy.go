// Package plan holds the built-in plan policies. They decide how many legs a
// request gets. Each is a pure function of the facts.
package plan

import "github.com/pdproxy/pdproxy/abi"

// Auto chooses two legs if a prefill and a decode target exist, or one leg if a target can serve
// the request alone. Otherwise it rejects the request. A request whose form does not work with two
// legs gets one.
func Auto(f *abi.PlanFacts) abi.PlanDecision {
	switch {
	case f.PrefillTargets > 0 && f.DecodeTargets > 0 && !f.Request.PairBroken:
		return abi.PlanDisaggregate
	case f.BothTargets > 0:
		return abi.PlanAggregate
	}
	return abi.PlanReject
}

// Always chooses two legs, whether or not there are targets for them. It rejects a request whose
// form does not work with two legs.
func Always(f *abi.PlanFacts) abi.PlanDecision {
	if f.Request.PairBroken {
		return abi.PlanReject
	}
	return abi.PlanDisaggregate
}

// Never chooses one leg, whether or not there is a target for it.
func Never(*abi.PlanFacts) abi.PlanDecision { return abi.PlanAggregate }
