package policies

import (
	"context"
	"fmt"

	"github.com/pdproxy/pdproxy/abi"
)

// Native decides with built-in policies that are compiled in. It satisfies
// coordinator.Decider, always has an answer and is safe for concurrent use.
type Native struct {
	plan  Planner
	place Placer
	mint  Minter
	names Names
	needs abi.Needs
}

// Names are the names of the policies of a Native, as in [policy] of the
// configuration.
type Names struct{ Plan, Place, Mint string }

// NewNative returns the built-in policies of the given names with default
// parameters. The error names the unknown policy.
func NewNative(names Names) (*Native, error) { return defaults().Native(names) }

// Native returns the built-in policies of the given names. The error names the
// unknown policy.
func (s *Set) Native(names Names) (*Native, error) {
	n := &Native{names: names, needs: s.Needs(names.Plan) | s.Needs(names.Place) | s.Needs(names.Mint)}
	var ok bool
	if n.plan, ok = s.Plan(names.Plan); !ok {
		return nil, fmt.Errorf("find policy: no built-in plan policy %q", names.Plan)
	}
	if n.place, ok = s.Place(names.Place); !ok {
		return nil, fmt.Errorf("find policy: no built-in place policy %q", names.Place)
	}
	if n.mint, ok = s.Mint(names.Mint); !ok {
		return nil, fmt.Errorf("find policy: no built-in mint policy %q", names.Mint)
	}
	return n, nil
}

// Plan decides with the plan policy.
func (n *Native) Plan(_ context.Context, f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	return abi.PlanAnswer{Decision: n.plan(f)}, n.names.Plan, true
}

// Place decides with the place policy.
func (n *Native) Place(_ context.Context, f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
	return n.place(f), n.names.Place, true
}

// Needs returns the additional facts that the three policies need.
func (n *Native) Needs() abi.Needs { return n.needs }

// Headers implements coordinator.Decider: the built-in policies declare no request headers.
func (n *Native) Headers() []string { return nil }

// Mint issues an id with the mint policy.
func (n *Native) Mint(_ context.Context, f *abi.MintFacts) (uint64, string, bool) {
	return n.mint(f), n.names.Mint, true
}
