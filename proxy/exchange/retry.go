package exchange

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// mayRetry reports whether the exchange may retry a failed leg, if takeRetry allows the placement of
// the retry.
func (x *exchange) mayRetry(err error, hook attempt.HookAnswer) bool {
	var le *attempt.Error
	if x.client.Begun() || x.env.Context.Err() != nil || !errors.As(err, &le) || downstream.OwnFault(err) {
		return false
	}
	if le.Permanent && hook.Decision == abi.LegPass || hook.Decision == abi.LegGiveUp {
		return false
	}
	if x.route.CallerCoordinates() && attempt.Sent(err) { // the blocks that the caller named may have been read and freed
		return false
	}
	attempts := x.env.Config.Retry.Attempts
	if engine.IsRefused(le) && x.env.Config.Limits.NoEngineTimeout > 0 {
		attempts *= 2 // the request waits before each of them, and an ending process may refuse twice
	}
	return x.denied != le && x.env.Tries(le.Phase) < attempts
}

// takeRetry reports whether p may retry the leg that failed with err, takes the retry from the budget
// and counts it. An engine that has no room gets the request only once. A request that has waited
// for an engine takes nothing from the budget: it adds no load to engines that fail. Nor does one
// that may wait and has lost the connection to its only engine: if that engine has ended, the retry
// learns so and waits.
func (x *exchange) takeRetry(p *coordinator.Placement, err error) bool {
	var le *attempt.Error
	if !errors.As(err, &le) || x.hasNoRoom(p) {
		return false
	}
	lost := x.env.Config.Limits.NoEngineTimeout > 0 && le.Status == 0 && le.Code == http.StatusBadGateway &&
		(le.Target.Instance == p.Decode.Instance || le.Target.Instance == p.Prefill.Instance)
	if !le.Reserved && !x.waited && !lost && !x.env.Budget.Allow(time.Now(), x.env.Config.Retry.Budget, x.env.Config.Retry.MinBudget) {
		x.journal.Fallback("retry", "budget")
		x.denied = le
		return false
	}
	x.journal.Retry(le.Phase, le.Target.Name(), le.Reason)
	return true
}

// hasNoRoom reports whether an engine of p has refused this request for lack of room.
func (x *exchange) hasNoRoom(p *coordinator.Placement) bool {
	return slices.ContainsFunc(x.full, func(i *engine.Instance) bool {
		return i == p.Prefill.Instance || i == p.Decode.Instance
	})
}

// exclude excludes the target of a failed leg from the next placements of this exchange. The
// coordinator uses an excluded target only if no others are left. If the leg hook requests the same
// targets again, exclude allows them. If the pair failed, either engine may be at fault, so exclude
// excludes both.
func (x *exchange) exclude(err error, hook attempt.HookAnswer) {
	var le *attempt.Error
	if !errors.As(err, &le) {
		return
	}
	if x.ask.Same = hook.Same; hook.Decision == abi.LegRetry {
		x.full = nil
		x.ask.Excluded = slices.DeleteFunc(x.ask.Excluded, func(t engine.Target) bool {
			return t == hook.Same.Prefill || t == hook.Same.Decode
		})
		return
	}
	failed := le.Target
	if le.Overloaded {
		x.full = append(x.full, failed.Instance)
	}
	if !le.Unresponsive.IsZero() { // perhaps the prefill engine, whose KV the target needed
		failed = le.Unresponsive
	}
	x.ask.Excluded = append(x.ask.Excluded, failed)
	if le.Pair != nil {
		x.ask.Excluded = append(x.ask.Excluded, le.Pair.Prefill)
	}
}

// Replace implements attempt.Replacer.
func (x *exchange) Replace(p *coordinator.Placement, err error, hook attempt.HookAnswer) (*coordinator.Placement, bool) {
	x.exclude(err, hook)
	x.route.Relax()
	x.waited = false
	next, placeErr := x.placeDecode(p)
	if placeErr != nil {
		return nil, false
	}
	if x.fallback() != "" && x.mayFail(next) || x.hasEnded(next) || !x.mayRetry(err, hook) || !x.takeRetry(next, err) {
		next.Lease.Release()
		return nil, false
	}
	return next, true
}

// Pick implements attempt.Replacer.
func (x *exchange) Pick(p *coordinator.Placement) (*coordinator.Placement, bool) {
	if !x.route.Pick(p.Decode.Instance) {
		return nil, false
	}
	next, err := x.placeDecode(p)
	if err != nil {
		x.route.DropPick()
		return nil, false
	}
	return next, true
}

// Follow implements attempt.Replacer.
func (x *exchange) Follow(p *coordinator.Placement, to []*engine.Instance) (*coordinator.Placement, bool) {
	if len(to) == 0 {
		return nil, false
	}
	within, aggregate := x.ask.Within, x.ask.Aggregate
	x.ask.Within.Decode, x.ask.Within.Whole = to, to
	if p.Prefill.IsZero() {
		x.ask.Aggregate = abi.RoleDecode | abi.RolePrefill // the plan policy is not asked again
	}
	next, err := x.placeDecode(p)
	x.ask.Within, x.ask.Aggregate = within, aggregate
	return next, err == nil
}

// placeDecode requests another decode target for the prefill target and the disagg id of p.
func (x *exchange) placeDecode(p *coordinator.Placement) (*coordinator.Placement, error) {
	x.ask.Prefill, x.ask.ID = p.Prefill, p.ID
	next, err := x.run.Coordinator.Place(x.env.Context, &x.ask)
	x.ask.Prefill, x.ask.ID = engine.Target{}, 0
	if err == nil {
		x.sentTo(next)
	}
	return next, err
}
