package coordinator

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// PlacementRequest is one request for a placement.
type PlacementRequest struct {
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
func (a *PlacementRequest) Remaining(now time.Time) int64 {
	if a.Deadline.IsZero() {
		return 0
	}
	left := a.Deadline.Sub(now)
	if left <= 0 {
		return min(left.Milliseconds(), -1)
	}
	return max(left.Milliseconds(), 1)
}

// excludes reports whether an earlier attempt failed on the instance. It covers all its
// ranks: they are one process, and usually fail together.
func (a *PlacementRequest) excludes(i *engine.Instance) bool {
	for _, t := range a.Excluded {
		if t.Instance == i {
			return true
		}
	}
	return false
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
func (a *PlacementRequest) Found(turn conversation.Turn) {
	a.Lookup.Turn, a.Lookup.Done = turn, true
	a.Request.Turn, a.Request.Conversation = turn.Number, string(turn.Key.AppendText(nil))
}

// Within lists the instances that a request may use: for each phase of two legs, and for
// one leg. A nil list is all instances.
type Within struct{ Prefill, Decode, Whole []*engine.Instance }

// roles returns the phases of two legs that the row may take.
func (w *Within) roles(r *engine.Row) abi.Role {
	roles := r.Facts.Roles
	if !among(w.Prefill, r.Instance) {
		roles &^= abi.RolePrefill
	}
	if !among(w.Decode, r.Instance) {
		roles &^= abi.RoleDecode
	}
	return roles
}

// among reports whether i is in the list; a nil list has all instances.
func among(list []*engine.Instance, i *engine.Instance) bool {
	return list == nil || slices.Contains(list, i)
}

// Pair is the targets of the two legs of an attempt.
type Pair struct{ Prefill, Decode engine.Target }
