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
	"github.com/pdproxy/pdproxy/proxy/sidecar"
)

// placing chooses the engines of one request: for its first attempt, for its retries, and for a
// decode leg that needs another engine. It changes the question to the coordinator until the answer
// passes all restrictions, and learns from each outcome of attempt.Run.
type placing struct {
	x       *exchange
	ask     coordinator.PlacementRequest // the question
	route   sidecar.Route                // the engines that a sidecar or a picker allows
	lease   *coordinator.Lease           // of the last placement; close releases it too, because a panic may have kept the attempt from it
	outcome attempt.Outcome              // of the last attempt
	answer  answer                       // to the question in progress

	retried error              // the failure that the next placement retries; nil: none
	last    error              // the failure of the latest attempt; nil: none
	denied  *attempt.Error     // the failure for which the retry budget had no retry
	full    []*engine.Instance // refused the request for lack of room
	waited  bool               // the last placement has waited for an engine
	avoided []string           // connectors that do not serve the API of the request

	connector connectorRule
	probe     probeRule
	engine    engineRule
	model     modelRule
	hold      holdRule
	rules     [allRules]restriction // of a placement, the innermost first; nil: the rule does not concern the request
}

// The positions of the rules of a placement, the innermost first.
const (
	ofConnector = iota
	ofRoute
	ofProbes
	ofEngines
	ofModels
	ofHold
	ofRetry
	allRules
)

// restriction is a rule for the engines that a request may use. Its zero value is the beginning.
type restriction interface {
	// begin prepares the next question, and may wait before it. The coordinator gets the question
	// only if all restrictions return nil; an error is the answer for the outer ones.
	begin(p *placing) error
	// judge looks at an answer. It may turn the answer into another error, and reports whether
	// the coordinator is to be asked again: begin then prepares the question. If judge returns
	// false, or begin an error, the restriction starts again from its beginning next time.
	judge(p *placing, a *answer) (again bool)
}

// answer is the answer of the coordinator to one question. If both fields are set, a restriction
// has rejected the placement.
type answer struct {
	placement *coordinator.Placement
	err       error
}

// next returns the placement with which attempt.Run begins an attempt, or goes on with the attempt
// that waits for it. nil: there is no other engine for an attempt that waits.
func (p *placing) next() (*coordinator.Placement, error) {
	switch p.outcome.Needs {
	case attempt.NeedsPick:
		return p.pickedDecode(), nil
	case attempt.NeedsDecode:
		return p.otherDecode(), nil
	case attempt.NeedsServing:
		return p.servingEngine(), nil
	}
	x := p.x
	p.waited, p.probe.before, p.model = false, x.run.Registry.Snapshot(), modelRule{waits: true}
	p.rules = [allRules]restriction{ofConnector: &p.connector}
	if p.route.Restricted || x.gateway != nil {
		p.rules[ofRoute] = routeRule{}
	}
	if x.env.Config.Limits.NoEngineTimeout > 0 {
		p.rules[ofEngines] = &p.engine
	}
	if len(x.env.Models) > 1 {
		p.rules[ofModels] = &p.model
	}
	if p.retried != nil {
		p.rules[ofRetry] = retryRule{}
	}
	return p.search(p.rules[:])
}

// search asks the coordinator until its answer passes all restrictions of the list, or none of
// them has another question.
func (p *placing) search(list []restriction) (*coordinator.Placement, error) {
	x := p.x
	a := &p.answer
	for from := len(list); ; {
		*a = answer{}
		for from > 0 && a.err == nil { // the outermost restriction begins first
			from--
			if r := list[from]; r != nil {
				if a.err = r.begin(p); a.err != nil {
					from++
				}
			}
		}
		if a.err == nil {
			if a.placement, a.err = x.run.Coordinator.Place(x.env.Context, &p.ask); a.err == nil {
				p.lease = a.placement.Lease
			}
		}
		for ; from < len(list); from++ {
			if a.err != nil { // an error concerns the rules that wait for a better answer, and the one that chooses the error
				p.rules[ofProbes], p.rules[ofHold], p.rules[ofRetry] = &p.probe, &p.hold, retryRule{}
			}
			if r := list[from]; r != nil && r.judge(p, a) {
				break
			}
		}
		if from == len(list) && a.err == nil {
			if x.picker != nil {
				x.observed.Served(a.placement.Decode.Instance)
			}
			return a.placement, nil
		}
		if a.placement != nil {
			a.placement.Lease.Release()
		}
		if from == len(list) {
			return nil, a.err
		}
		from++ // the restriction that asks again prepares the question
	}
}

// learn takes the outcome of an attempt. It reports whether the request has ended, and with which
// error.
func (p *placing) learn(o attempt.Outcome) (over bool, err error) {
	switch p.outcome = o; {
	case o.Needs != attempt.NeedsNothing:
		return false, nil
	case o.Err == nil, p.x.gateway != nil: // nobody may repeat what a gateway has sent
		return true, o.Err
	case o.Broken != nil:
		if over, err := p.x.resume(&o); over {
			return true, err
		}
	case errors.Is(o.Err, coordinator.ErrNoTarget) && p.x.env.Tries(abi.Prefill) < p.x.env.Config.Retry.Attempts:
		return false, nil // the last decode engine of the group left before prefill had ended
	case !p.mayRetry(&o):
		return true, o.Err
	}
	p.exclude(&o)
	p.last, p.retried = o.Err, o.Err
	return false, nil
}

// mayRetry reports whether the exchange may retry a failed leg, if the retry budget allows the
// placement of the retry.
func (p *placing) mayRetry(o *attempt.Outcome) bool {
	x := p.x
	var le *attempt.Error
	if x.client.Begun() && !x.stream.resumes() || x.env.Context.Err() != nil || !errors.As(o.Err, &le) || downstream.OwnFault(o.Err) {
		return false
	}
	if x.stream.resumes() && !time.Now().Before(x.stream.by) {
		return false
	}
	if le.Permanent && o.Hook.Decision == abi.LegPass || o.Hook.Decision == abi.LegGiveUp {
		return false
	}
	if p.route.Restricted && p.route.CallerCoordinates() && attempt.Sent(o.Err) { // the blocks that the caller named may have been read and freed
		return false
	}
	attempts := x.env.Config.Retry.Attempts
	if engine.IsRefused(le) && x.env.Config.Limits.NoEngineTimeout > 0 {
		attempts *= 2 // the request waits before each of them, and an ending process may refuse twice
	}
	return p.denied != le && x.env.Tries(le.Phase) < attempts
}

// takeRetry reports whether placement may retry the leg that failed with err, takes the retry from
// the budget and counts it. An engine that has no room gets the request only once. A request that
// has waited for an engine takes nothing from the budget: it adds no load to engines that fail. Nor
// does one that may wait and has lost the connection to its only engine: if that engine has ended,
// the retry learns so and waits.
func (p *placing) takeRetry(placement *coordinator.Placement, err error) bool {
	x := p.x
	var le *attempt.Error
	if !errors.As(err, &le) || p.hasNoRoom(placement) {
		return false
	}
	lost := x.env.Config.Limits.NoEngineTimeout > 0 && le.Status == 0 && le.Code == http.StatusBadGateway &&
		(le.Target.Instance == placement.Decode.Instance || le.Target.Instance == placement.Prefill.Instance)
	if !le.Reserved && !p.waited && !lost && !x.env.Budget.Allow(time.Now(), x.env.Config.Retry.Budget, x.env.Config.Retry.MinBudget) {
		x.journal.Fallback("retry", "budget")
		p.denied = le
		return false
	}
	x.journal.Retry(le.Phase, le.Target.Name(), le.Reason)
	return true
}

// hasNoRoom reports whether an engine of the placement has refused this request for lack of room.
func (p *placing) hasNoRoom(placement *coordinator.Placement) bool {
	return slices.ContainsFunc(p.full, func(i *engine.Instance) bool {
		return i == placement.Prefill.Instance || i == placement.Decode.Instance
	})
}

// exclude excludes the target of a failed leg from the next placements of this exchange. The
// coordinator uses an excluded target only if no others are left. If the leg hook requests the same
// targets again, exclude allows them. If the pair failed, either engine may be at fault, so exclude
// excludes both.
func (p *placing) exclude(o *attempt.Outcome) {
	var le *attempt.Error
	if !errors.As(o.Err, &le) {
		return
	}
	if p.ask.Same = o.Hook.Same; o.Hook.Decision == abi.LegRetry {
		p.full = nil
		p.ask.Excluded = slices.DeleteFunc(p.ask.Excluded, func(t engine.Target) bool {
			return t == o.Hook.Same.Prefill || t == o.Hook.Same.Decode
		})
		return
	}
	failed := le.Target
	if le.Overloaded {
		p.full = append(p.full, failed.Instance)
	}
	if !le.Unresponsive.IsZero() { // perhaps the prefill engine, whose KV the target needed
		failed = le.Unresponsive
	}
	p.ask.Excluded = append(p.ask.Excluded, failed)
	if le.Pair != nil {
		p.ask.Excluded = append(p.ask.Excluded, le.Pair.Prefill)
	}
}

// otherDecode returns a placement on another decode engine for the KV of an attempt whose decode
// leg has failed; nil if the leg must not be retried.
func (p *placing) otherDecode() *coordinator.Placement {
	if !p.mayRetry(&p.outcome) {
		return nil
	}
	p.exclude(&p.outcome)
	if p.route.Restricted {
		p.route.Relax()
	}
	p.waited = false
	return p.searchDecode([]restriction{otherDecodeRule{}})
}

// pickedDecode lets the picker of a sidecar choose the decode engine of an attempt whose prefill
// has answered; nil: decode stays on its engine.
func (p *placing) pickedDecode() *coordinator.Placement {
	if !p.x.pickDecode() || p.route.PickedDecode(p.outcome.Placement.Decode.Instance) {
		return nil
	}
	placement := p.searchDecode(nil)
	if placement == nil {
		p.route.DropPick(sidecar.PickNoTarget)
	}
	return placement
}

// servingEngine returns a placement on the engine to which a gateway has sent the request instead;
// nil if that engine does not serve the request.
func (p *placing) servingEngine() *coordinator.Placement {
	to := p.outcome.Engines
	if len(to) == 0 {
		return nil
	}
	within, aggregate := p.ask.Within, p.ask.Aggregate
	p.ask.Within.Decode, p.ask.Within.Whole = to, to
	if p.outcome.Placement.Prefill.IsZero() {
		p.ask.Aggregate = abi.RoleDecode | abi.RolePrefill // the plan policy is not asked again
	}
	placement := p.searchDecode(nil)
	p.ask.Within, p.ask.Aggregate = within, aggregate
	return placement
}

// searchDecode searches a decode engine for the prefill target and the disagg id of the attempt that
// waits; nil: there is none.
func (p *placing) searchDecode(list []restriction) *coordinator.Placement {
	p.ask.Prefill, p.ask.ID = p.outcome.Placement.Prefill, p.outcome.Placement.ID
	placement, _ := p.search(list)
	p.ask.Prefill, p.ask.ID = engine.Target{}, 0
	return placement
}
