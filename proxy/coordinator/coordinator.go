// Package coordinator places requests. It passes the candidates to the policies, checks
// and commits their decision, mints the disagg id and returns a lease. Local does this
// with the state of its own process. Through package fleet, other processes can request
// placements from a Local.
//
// The decisions behind this package are in docs/design/placement.md.
package coordinator

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
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

// Ask is one request for a placement.
type Ask struct {
	Model   string           // "" when the client named none
	Request abi.RequestFacts // shown to the policies
	Key     Key              // matched with earlier prompts
	// Aggregate forces one leg, on an engine of role both or of a phase in the set. 0: the
	// plan policy decides, unless Request.PairBroken forces one leg on an engine of role
	// both.
	Aggregate abi.Role
	// Two forces two legs without the plan policy. Aggregate and Request.PairBroken take
	// precedence.
	Two bool
	// Within limits the instances for each phase.
	Within Within
	// Prefill keeps the prefill target of an earlier placement, so that another decode
	// reads its blocks. ID then is the disagg id of that placement.
	Prefill engine.Target
	ID      uint64
	// Excluded targets failed in an earlier attempt of this exchange. Their instances are
	// the last choice, after those with an open circuit.
	Excluded []engine.Target
	// Same, if its Decode is set, has the targets of an earlier placement. Place uses
	// them again while they are among the candidates. Same.Prefill is zero for one leg.
	Same Pair

	// Only, if its Decode is set, has the only allowed targets of two legs. Then Place
	// calls no policy and does not record the conversation. Place returns a
	// *NoTargetError if one of the two targets is not a candidate, or has a request in
	// flight while the circuit of the pair is closed.
	Only Pair

	// Deadline is the time until which the client waits for the first byte; zero: none.
	Deadline time.Time

	// Lookup is the request's turn of its conversation. The first Place of an exchange
	// fills it in; the later ones use it.
	Lookup Lookup
}

// Remaining returns the time until the deadline in milliseconds, as abi.Traits.Remaining.
func (a *Ask) Remaining(now time.Time) int64 {
	if a.Deadline.IsZero() {
		return 0
	}
	left := a.Deadline.Sub(now)
	if left <= 0 {
		return min(left.Milliseconds(), -1)
	}
	return max(left.Milliseconds(), 1)
}

// Lookup is which turn of which conversation a request is.
type Lookup struct {
	Turn conversation.Turn
	Done bool // Turn is known
	// Process names the process that numbers the instances of Turn's homes; 0: this
	// process.
	Process uint64
}

// Found sets Lookup.Turn and the facts of the turn that the policies see.
func (a *Ask) Found(turn conversation.Turn) {
	a.Lookup.Turn, a.Lookup.Done = turn, true
	a.Request.Turn, a.Request.Conversation = turn.Number, string(turn.Key.AppendText(nil))
}

// Within lists the instances that a request may use: for each phase of two legs, and for
// one leg. A nil list is all instances.
type Within struct{ Prefill, Decode, Whole []*engine.Instance }

// Pair is the targets of the two legs of an attempt.
type Pair struct{ Prefill, Decode engine.Target }

// Placement is a committed decision. The caller calls Lease.Release exactly once; the
// other fields stay valid after that.
type Placement struct {
	Flow    abi.Flow
	Prefill engine.Target // zero when aggregated
	Decode  engine.Target
	ID      uint64            // the disagg id; 0 when aggregated
	Policy  string            // the place policy that decided, "native" for the fallback
	Turn    conversation.Turn // zero if no policy needs conversations
	// Matched is how many prompt tokens the engine that computes the prompt holds
	// according to its events; -1: unknown.
	Matched int64
	// FirstByte is the plan policy's limit for the time until the client's first byte; 0:
	// the configured limit holds.
	FirstByte time.Duration
	// Fallbacks are the fallbacks of this placement, as labels what/reason.
	Fallbacks []Fallback
	Notes     []string // notes of the plan and the place policy, for explain
	// Facts is the table that the place policy saw, for explain. If another process
	// decided, only the request, the flow, the rows and Scored are set.
	Facts   abi.PlaceFacts
	Targets []engine.Target // row i of Facts.Candidates
	Lease   *Lease

	table *table
}

// Recycle returns the memory of Facts.Candidates and Targets to a pool and sets both to
// nil. It is called at most once, after the last use of them. Without it the garbage
// collector frees the memory.
func (p *Placement) Recycle() {
	if t := p.table; t != nil {
		t.place.Candidates, t.targets = p.Facts.Candidates, p.Targets
		t.recycle()
	}
	p.table, p.Facts.Candidates, p.Targets = nil, nil, nil
}

// Fallback is one counted deviation from the configuration.
type Fallback struct{ What, Reason string }

// Coordinator places requests. Each exchange calls it.
type Coordinator interface {
	// Place returns a committed placement. The error is a *NoTargetError,
	// ErrUnknownModel, ErrModelNeeded, a *RejectedError, a *HeldError or the cause of the context's
	// end. The blocks of a.Key must not change until Computed. Place retains nothing else
	// of a. The first Place of an Ask sets its Lookup.
	Place(ctx context.Context, a *Ask) (*Placement, error)
	// Cut returns how the prompts for a model are cut into blocks.
	Cut(c *Cut, model string)
	// Computed reports how many tokens of a prompt its engine had cached.
	Computed(p *Placement, key *Key, prompt, cached int64)
	// Ready reports whether one request could be placed now.
	Ready() bool
	// Needs returns the optional facts that an Ask should have.
	Needs() abi.Needs
	// Headers returns the names of the request headers that an Ask should have, if Needs
	// has abi.NeedHeaders.
	Headers() []string
}
