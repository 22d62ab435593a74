// Package coordinator places requests: it shows the policies a snapshot of the
// candidates, checks and commits what they decide, mints the disagg id and
// hands out the lease. Local owns the state it decides on.
package coordinator

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// Decider is the seam where policies plug in. policy names who decided. A false
// ok means that the policy has no usable answer; policy is then the reason, one
// of the Reason constants, and the native rule decides. Every such fallback but
// ReasonAbsent is counted. Implementations must not block longer than their own
// budget, must not keep f, and are called by many goroutines. Place may write
// scores into the candidates, and Scored, for explain.
type Decider interface {
	Plan(ctx context.Context, f *abi.PlanFacts) (a abi.PlanAnswer, policy string, ok bool)
	Place(ctx context.Context, f *abi.PlaceFacts) (d abi.PlaceDecision, policy string, ok bool)
	Mint(ctx context.Context, f *abi.MintFacts) (id uint64, policy string, ok bool)
	// Needs is what the policies want to be shown beyond what is always there.
	Needs() abi.Needs
}

// The reasons why a native rule decided instead of a policy.
const (
	ReasonAbsent    = "absent"      // no policy has the hook; not counted
	ReasonLate      = "late"        // the time budget was used up
	ReasonTrap      = "trap"        // the guest trapped
	ReasonParked    = "parked"      // the policy failed too often and is not asked
	ReasonNonsense  = "nonsense"    // the answer breaks the contract
	ReasonDuplicate = "duplicate"   // the minted id is in flight
	ReasonPair      = "pair_broken" // the circuit of the chosen pair is open
	ReasonTrial     = "trial_taken" // another request became the trial of a half-open circuit
	ReasonFailed    = "failed"      // any other
)

// ReasonCoordinator is why a worker placed a request itself: the coordinator in
// another process did not answer in time.
const ReasonCoordinator = "coordinator"

// Ask is one request for a placement.
type Ask struct {
	Model   string           // "" when the client named none
	Request abi.RequestFacts // for the policies
	Key     Key              // for those that need blocks or conversations
	// Aggregate forces one leg, on an engine of role both or, for each phase in
	// the set, on one of that phase alone. 0 lets the plan decide, unless
	// Request.PairBroken forces one leg on an engine of role both.
	Aggregate abi.Role
	// Two forces two legs: the plan policy is not asked. Aggregate and
	// Request.PairBroken win over it.
	Two bool
	// Within limits which instances may be given what.
	Within Within
	// Prefill keeps the prefill target of an earlier placement, whose blocks
	// another decode will read; ID then keeps its disagg id.
	Prefill engine.Target
	ID      uint64
	// Excluded targets failed in an earlier attempt of this exchange; their
	// instances are used again only when nothing else is left, not even one with
	// an open circuit.
	Excluded []engine.Target
	// Same, if Decode is set, are the targets to be used again, as long as they
	// would be offered; Prefill is zero for one leg.
	Same Pair

	// Only, if Decode is set, are the only targets that will do, for two legs: no
	// policy is asked, and nothing is learned of the request. Where one of them has
	// anything in flight, or could not be chosen, there is no target.
	Only Pair

	// Lookup is the result of the search for the request's conversation. The first
	// Place fills it in; the later ones of the same exchange use it.
	Lookup Lookup
}

// Lookup is which turn of which conversation a request is.
type Lookup struct {
	Turn conversation.Turn
	Done bool // Turn is known
	// Process names the process that numbers the instances of Turn's homes; 0: this
	// process.
	Process uint64
}

// Found sets Lookup.Turn, and what the policies see of the turn.
func (a *Ask) Found(turn conversation.Turn) {
	a.Lookup.Turn, a.Lookup.Done = turn, true
	a.Request.Turn, a.Request.Conversation = turn.Number, string(turn.Key.AppendText(nil))
}

// Within is the instances that a request may be given: for each phase of two
// legs, and for the whole of it. nil: any; its zero value limits nothing.
type Within struct{ Prefill, Decode, Whole []*engine.Instance }

// Pair is the targets of the two legs of an attempt.
type Pair struct{ Prefill, Decode engine.Target }

// Placement is what was decided and committed. Release the Lease exactly once;
// that leaves the rest as it is.
type Placement struct {
	Flow    abi.Flow
	Prefill engine.Target // zero when aggregated
	Decode  engine.Target
	ID      uint64            // the disagg id; 0 when aggregated
	Policy  string            // the place policy that decided, "native" for the fallback
	Turn    conversation.Turn // zero when nobody needs conversations
	// Matched is how many prompt tokens the target that computes the prompt is
	// believed to hold, by its events; -1: not known.
	Matched int64
	// FirstByte limits the attempt's time until the client's first byte; 0: as
	// configured. The plan policy set it.
	FirstByte time.Duration
	// Fallbacks that happened on the way, as labels what/reason.
	Fallbacks []Fallback
	Notes     []string // what the plan and the place policy left for explain
	// Facts is the table that was decided on, for explain; of one that was decided on
	// in another process only the request, the flow, the rows and Scored.
	Facts   abi.PlaceFacts
	Targets []engine.Target // row i of Facts.Candidates
	Lease   *Lease

	table *table
}

// Recycle gives the memory of Facts.Candidates and Targets back, which are nil
// afterwards. To be called at most once, by the one who has read them; without
// it the garbage collector does the work.
func (p *Placement) Recycle() {
	if t := p.table; t != nil {
		t.place.Candidates, t.targets = p.Facts.Candidates, p.Targets
		t.recycle()
	}
	p.table, p.Facts.Candidates, p.Targets = nil, nil, nil
}

// Fallback is one counted deviation from what was configured.
type Fallback struct{ What, Reason string }

// Coordinator places and releases; it is called by every exchange.
type Coordinator interface {
	// Place returns a committed placement, or a *NoTargetError, ErrUnknownModel,
	// ErrModelNeeded, a *RejectedError or the cause of the context's end. The
	// blocks of a.Key must stay as they are until Computed; of the rest it keeps
	// nothing. It adds to a.Request which turn of which conversation
	// the exchange is, and finds that out once.
	Place(ctx context.Context, a *Ask) (*Placement, error)
	// Cut says how the prompts for a model are cut into blocks.
	Cut(c *Cut, model string)
	// Computed is told how much of a prompt its engine had cached.
	Computed(p *Placement, key *Key, prompt, cached int64)
	// Ready reports whether one request could be placed now.
	Ready() bool
	// Needs is what an Ask should say of a request beyond what it always says.
	Needs() abi.Needs
}
