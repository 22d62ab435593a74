// Package coordinator places requests: it shows the policies a snapshot of the
// candidates, checks and commits what they decide, mints the disagg id and
// hands out the lease. Local owns the state it decides on.
package coordinator

import (
	"context"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Decider is the seam where policies plug in. A false ok means that the policy
// has no usable answer (absent, late, trapped, nonsense): the native rule
// decides and the fallback is counted. Implementations must not block longer
// than their own budget, must not keep f, and are called by many goroutines.
type Decider interface {
	Plan(ctx context.Context, f *abi.PlanFacts) (d abi.PlanDecision, policy string, ok bool)
	Place(ctx context.Context, f *abi.PlaceFacts) (d abi.PlaceDecision, policy string, ok bool)
	Mint(ctx context.Context, f *abi.MintFacts) (id uint64, policy string, ok bool)
}

// Ask is one request for a placement.
type Ask struct {
	Model   string           // "" when the client named none
	Request abi.RequestFacts // for the policies
	// Aggregate forces one leg, on an engine of one of the roles; 0 lets the
	// plan decide. Used for requests whose form cannot be paired.
	Aggregate abi.Role
	// Prefill keeps the prefill target of an earlier placement, whose blocks
	// another decode will read; ID then keeps its disagg id.
	Prefill engine.Target
	ID      uint64
	// Excluded targets failed in an earlier attempt of this exchange; they are
	// used again only when nothing else is left.
	Excluded []engine.Target
}

// Placement is what was decided and committed. Release the Lease exactly once.
type Placement struct {
	Flow    abi.Flow
	Prefill engine.Target // zero when aggregated
	Decode  engine.Target
	ID      uint64
	Policy  string // the place policy that decided, "native" for the fallback
	// Fallbacks that happened on the way, as labels what/reason.
	Fallbacks []Fallback
	Facts     abi.PlaceFacts  // the table that was decided on, for explain
	Targets   []engine.Target // row i of Facts.Candidates
	Lease     *Lease
}

// Fallback is one counted deviation from what was configured.
type Fallback struct{ What, Reason string }

// Coordinator places and releases; it is called by every exchange.
type Coordinator interface {
	// Place returns a committed placement, or ErrNoTarget, ErrUnknownModel,
	// ErrModelNeeded, ErrRejected or the context's error.
	Place(ctx context.Context, a *Ask) (*Placement, error)
}
