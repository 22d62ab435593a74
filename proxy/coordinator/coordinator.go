// Package coordinator places requests. It passes the candidates to the policies, checks
// and commits their decision, mints the disagg id and returns a lease. Local does this
// with the state of its own process. Through package fleet, other processes can request
// placements from a Local.
//
// The decisions behind this package are in docs/design/placement.md.
package coordinator

import (
	"context"

	"github.com/pdproxy/pdproxy/abi"
)

// Decider calls the policies. policy names the policy that decided. If ok is false, there is no
// usable answer. Then policy is one of the Reason constants, and the native rule decides. The
// coordinator counts each such fallback except ReasonAbsent. Implementations must be safe for
// concurrent use, must observe their time limit and must not retain f. Place may write scores and
// Scored into f for explain.
type Decider interface {
	Plan(ctx context.Context, f *abi.PlanFacts) (a abi.PlanAnswer, policy string, ok bool)
	Place(ctx context.Context, f *abi.PlaceFacts) (d abi.PlaceDecision, policy string, ok bool)
	Mint(ctx context.Context, f *abi.MintFacts) (id uint64, policy string, ok bool)
	// Needs returns the optional facts that the policies use.
	Needs() abi.Needs
	// Headers returns the names of the request headers that the policies declare, in lower
	// case and at most abi.MaxAllHeaders. The list does not change.
	Headers() []string
}

// Reasons why a native rule decided instead of a policy.
const (
	ReasonAbsent    = "absent"      // no policy has the hook; not counted
	ReasonLate      = "late"        // the time budget was used up
	ReasonTrap      = "trap"        // the WebAssembly module trapped
	ReasonParked    = "parked"      // the policy failed too often and is disabled for some time
	ReasonNonsense  = "nonsense"    // the answer breaks the contract
	ReasonDuplicate = "duplicate"   // the minted id is in flight
	ReasonPair      = "pair_broken" // the circuit of the chosen pair is open
	ReasonTrial     = "trial_taken" // another request became the trial of a half-open circuit
	ReasonFailed    = "failed"      // any other reason
)

// ReasonCoordinator is why a worker placed a request itself: the coordinator in
// another process did not answer in time.
const ReasonCoordinator = "coordinator"

// Coordinator places requests. Each exchange calls it.
type Coordinator interface {
	// Place returns a committed placement. The error is a *NoTargetError,
	// ErrUnknownModel, ErrModelNeeded, a *RejectedError, a *HeldError or the cause of the context's
	// end. The blocks of a.Key must not change until Computed. Place retains nothing else
	// of a. The first Place of a PlacementRequest sets its Lookup.
	Place(ctx context.Context, a *PlacementRequest) (*Placement, error)
	// Cut returns how the prompts for a model are cut into blocks.
	Cut(c *Cut, model string)
	// Computed reports how many tokens of a prompt its engine had cached.
	Computed(p *Placement, key *Key, prompt, cached int64)
	// Ready reports whether one request could be placed now.
	Ready() bool
	// Needs returns the optional facts that a PlacementRequest should have.
	Needs() abi.Needs
	// Headers returns the names of the request headers that a PlacementRequest should have, if Needs
	// has abi.NeedHeaders.
	Headers() []string
}
