package exchange

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// The restrictions of a placement, the innermost first.

// noPreparation is the begin of a restriction that prepares no question.
type noPreparation struct{}

func (noPreparation) begin() error { return nil }

// connectorRule restricts a placement to engines whose connector serves the API of the request. A
// model may have engines of several connectors. If the connector cannot run the request as two legs,
// or not with the chosen prefill engine, the rule asks for one engine that answers the request alone,
// and counts a fallback.
type connectorRule struct {
	*placing
	noPreparation
	form       form
	unpairable error  // why the request cannot run as two legs
	reason     string // of unpairable, for the metric
	sure       bool   // two legs would fail
	firstByte  time.Duration
	aggregate  abi.Role // of the question for two legs
	excluded   int      // targets, of the question for two legs
}

// form is how many legs the question asks for.
type form uint8

const (
	planned  form = iota // as the plan policy decides
	alone                // one leg, because the chosen two are not possible
	twoAfter             // two legs nevertheless, because no engine can run one
)

func (r *connectorRule) judge(a *answer) (again bool) {
	if a.err == nil {
		conn := r.x.run.Connector(a.placement.Decode.Spec.Connector)
		if a.err = r.check(a.placement, conn); a.err != nil && r.excludeConnector(conn.Name()) {
			return true
		}
	}
	switch {
	case r.form == planned && a.err == nil && a.placement.Flow != abi.FlowAggregated && !r.pairs(a.placement):
		r.form = alone
		r.firstByte, r.aggregate, r.excluded = a.placement.FirstByte, r.ask.Aggregate, len(r.ask.Excluded)
		r.ask.Aggregate, r.ask.Request.PairBroken = r.x.run.Connector(a.placement.Decode.Spec.Connector).AggregatesOn(), true
		return true
	case r.form == alone && a.err != nil && !r.sure:
		r.form = twoAfter
		r.ask.Aggregate, r.ask.Request.PairBroken, r.ask.Excluded = r.aggregate, false, r.ask.Excluded[:r.excluded]
		return true
	case r.form == alone && a.err != nil:
		a.err = r.unpairable
	case r.form == alone:
		r.x.journal.Fallback("aggregated", r.reason)
	}
	if r.form != planned && a.err == nil {
		a.placement.FirstByte = r.firstByte // the plan policy was asked only once
	}
	*r = connectorRule{placing: r.placing}
	return false
}

// check returns why the connector of a placement does not suit the request.
func (r *connectorRule) check(p *coordinator.Placement, c connector.Connector) error {
	serves := r.x.req.API == openai.EngineRoute || c.Serves(r.x.req.API) // only the operator knows which engines have an EngineRoute
	switch {
	case r.form == alone && (!serves || p.Decode.Role != abi.RoleBoth && p.Decode.Role&c.AggregatesOn() == 0):
		return r.unpairable
	case !serves:
		return errNotCarried(c.Name(), r.x.req.API)
	}
	return nil
}

// pairs reports whether the request can run as the two legs of p. Otherwise the fields say why.
func (r *connectorRule) pairs(p *coordinator.Placement) bool {
	conn := r.x.run.Connector(p.Decode.Spec.Connector)
	if r.unpairable = conn.Pairable(&r.x.req); r.unpairable != nil {
		r.reason, r.sure = "not_pairable", true
	} else if d, ok := conn.(connector.Dated); ok {
		r.reason = "forced_tool"
		r.sure, r.unpairable = d.Unfit(&r.x.req, p.Prefill.Facts())
	}
	return r.unpairable == nil
}

// excludeConnector excludes all targets of a connector from the next placements. The
// coordinator uses excluded targets only if no others are left. It returns false if all of
// them were excluded before.
func (p *placing) excludeConnector(name string) bool {
	before := len(p.ask.Excluded)
	for _, i := range p.x.run.Registry.Snapshot().Instances {
		for rank := range i.Load {
			t := engine.Target{Instance: i, Rank: rank}
			if i.Spec.Connector == name && !slices.Contains(p.ask.Excluded, t) {
				p.ask.Excluded = append(p.ask.Excluded, t)
			}
		}
	}
	return len(p.ask.Excluded) > before
}

// routeRule restricts a placement to the engines that a gateway, the coordination policies of a
// sidecar, or a picker allow: one policy or destination after the other.
type routeRule struct{ *placing }

func (r *routeRule) begin() error {
	if r.x.gateway != nil {
		r.ask.Within = r.x.gateway.Within()
	}
	if !r.route.Restricted() {
		return nil
	}
	if r.route.CallerCoordinates() {
		r.x.env.SkipEncode()
	}
	if err := r.route.Restrict(); err != nil {
		return err
	}
	if r.route.WantsPick() {
		r.x.pickDecode()
	}
	return nil
}

func (r *routeRule) judge(a *answer) (again bool) {
	return r.route.Restricted() && r.route.Judge(a.err)
}

// probeRule waits for the first probes of engines if there is no placement while engines that may
// serve the model have not been looked at. Without the wait, a request at the start would get an
// error, or another model, although its engines are ready.
type probeRule struct {
	*placing
	wait
	before  *engine.Snapshot // from before the question
	changed <-chan struct{}  // from before the question, so that no change is missed; nil: there was no question in the wait
	late    error            // the answer that began the wait
}

// maxAwaited bounds the wait for probes, also while engines come again and again.
const maxAwaited = 2 * engine.FirstList

func (r *probeRule) begin() error {
	if r.ctx != nil {
		if r.changed != nil {
			if err := r.x.run.Waiting.Pause(r.ctx, r.changed, maxAwaited); err != nil {
				if !errors.Is(err, r.late) {
					r.x.waitedInVain(err)
				}
				r.stop()
				return err
			}
		}
		r.changed = r.x.run.Registry.Changed()
	}
	r.before = r.x.run.Registry.Snapshot()
	return nil
}

func (r *probeRule) judge(a *answer) (again bool) {
	// A policy may have rejected the request because a phase has no engine yet.
	if a.err == nil || !lacksEngine(a.err) && !errors.Is(a.err, coordinator.ErrRejected) || !r.before.Awaits(r.x.req.Model) {
		if r.ctx != nil {
			r.stop()
		}
		return false
	}
	if r.ctx == nil {
		r.late = a.err
		r.wait = r.x.beginWait(telemetry.StageWaitsEngine, maxAwaited, r.late)
	}
	return true
}

func (r *probeRule) stop() {
	r.end()
	r.before, r.changed, r.late = nil, nil, nil
}

// engineRule restricts a placement to engines whose process has not ended. While no engine can take
// a request for a known model, it waits in the line of the model for at most
// limits.no_engine_timeout, and not beyond the request's deadline.
type engineRule struct {
	*placing
	wait
	model   string // the known model, if the request may wait; "": it may not
	seat    *admission.Seat
	changed <-chan struct{} // from before the question, so that no change is missed
}

func (r *engineRule) begin() (err error) {
	if r.ctx == nil {
		if r.model = ""; r.placing.model.waits && r.x.env.Config.Limits.NoEngineTimeout > 0 {
			r.model = r.x.knownModel()
		}
		if r.model == "" || !r.x.run.Waiting.Occupied(r.model) {
			return nil
		}
		r.queue()
	}
	if r.seat == nil {
		r.seat = r.x.run.Waiting.Enter(r.model)
		err = r.seat.Turn(r.ctx)
	} else {
		err = r.seat.Pause(r.ctx, r.changed)
	}
	if err != nil {
		r.stop()
		return r.x.waitedInVain(err)
	}
	r.changed = r.x.run.Registry.Changed()
	return nil
}

func (r *engineRule) judge(a *answer) (again bool) {
	if a.err == nil && !r.placing.model.moves && r.hasEnded(a.placement) {
		a.err = &coordinator.NoTargetError{Model: r.ask.Model}
	}
	if r.model == "" || !lacksEngine(a.err) {
		if r.waited = r.ctx != nil; r.waited {
			r.stop()
		}
		return false
	}
	if r.ctx == nil {
		r.queue()
	}
	return true
}

// queue begins the wait in the line of the model.
func (r *engineRule) queue() {
	r.wait = r.x.beginWait(telemetry.StageWaitsEngine, time.Duration(r.x.env.Config.Limits.NoEngineTimeout), admission.ErrNoEngineTimeout)
}

func (r *engineRule) stop() {
	if r.seat != nil {
		r.seat.Leave()
	}
	r.end()
	r.seat, r.changed = nil, nil
}

// hasEnded reports whether the process of an engine of placement has ended, and the request may
// wait for its next one.
func (p *placing) hasEnded(placement *coordinator.Placement) bool {
	return p.x.env.Config.Limits.NoEngineTimeout > 0 &&
		(!placement.Prefill.IsZero() && placement.Prefill.Ended() || placement.Decode.Ended())
}

// lacksEngine reports whether a later try may succeed because engines have come.
func lacksEngine(err error) bool {
	return errors.Is(err, coordinator.ErrNoTarget) || errors.Is(err, coordinator.ErrUnknownModel)
}

// modelRule changes to the next fallback while no engine of the request's model can take the
// request. It does not try a remote whose circuit is open, or again for this request. If none of the
// models has an engine, the request waits for the first model as a request without fallbacks does.
type modelRule struct {
	*placing
	change string // the model to change to; "": none
	back   bool   // no model has an engine
	moves  bool   // the request moves to the next model rather than wait
	waits  bool   // the request waits for an engine of its model
}

func (r *modelRule) begin() error {
	r.waited = false
	if change := r.change; change != "" {
		r.change = ""
		if err := r.x.serveWith(change); err != nil {
			r.back = false
			return err
		}
	}
	r.waits = len(r.x.env.Models) < 2 || r.back
	r.moves = !r.waits && r.x.fallback() != ""
	return nil
}

func (r *modelRule) judge(a *answer) (again bool) {
	x := r.x
	switch {
	case r.waits:
		r.back = false
		return false
	case r.moves && a.err == nil && !r.mayFail(a.placement), r.moves && a.err != nil && !lacksEngine(a.err):
		return false
	case r.moves:
		reason := "no_engine"
		if a.err == nil {
			reason = "failed"
		}
		x.journal.Fallback("model", reason)
		r.change = x.fallback()
		return true
	case a.err == nil && isRemote(x.req.Model) && r.mayFail(a.placement), errors.Is(a.err, coordinator.ErrUnknownModel):
		a.err = &coordinator.NoTargetError{Model: x.requested()} // the configuration knows the name
	}
	if !lacksEngine(a.err) || x.env.Config.Limits.NoEngineTimeout == 0 {
		return false
	}
	r.change, r.back = x.env.Models[0], true
	return true
}

// mayFail reports whether the coordinator had only targets for placement that have failed in this
// request, or whose circuit is open. The trial of a half-open circuit is no such target.
func (p *placing) mayFail(placement *coordinator.Placement) bool {
	now := time.Now()
	for _, t := range [...]engine.Target{placement.Prefill, placement.Decode} {
		if !t.IsZero() && (slices.Contains(p.ask.Excluded, t) || t.Breaker.Circuit(now) == circuit.Open && !isTrial(placement, t)) {
			return true
		}
	}
	return false
}

func isTrial(p *coordinator.Placement, t engine.Target) bool {
	row := slices.Index(p.Targets, t)
	return row >= 0 && p.Facts.Candidates[row].Trial
}

// The plan policy is asked again after holdFirst, then after twice as long each time up to
// holdLast, and whenever the engines change.
const (
	holdFirst = 25 * time.Millisecond
	holdLast  = time.Second
)

// holdRule waits while the plan policy holds the request: at most as long as the policy allows, as
// limits.queue_timeout, and until the request's deadline. A retry of the request may wait again. The
// request keeps its place among the running requests.
type holdRule struct {
	*placing
	wait
	began    time.Time
	interval time.Duration // until the policy is asked again
}

func (r *holdRule) begin() error {
	if r.ctx == nil {
		return nil
	}
	if err := r.x.run.Waiting.Pause(r.ctx, r.x.run.Registry.Changed(), r.interval); err != nil {
		r.x.waitedInVain(err)
		r.stop()
		return err
	}
	r.interval = min(2*r.interval, holdLast)
	return nil
}

func (r *holdRule) judge(a *answer) (again bool) {
	var held *coordinator.HeldError
	if a.err == nil || !errors.As(a.err, &held) {
		if r.ctx != nil {
			r.stop()
		}
		return false
	}
	if r.ctx == nil {
		limit := time.Duration(r.x.env.Config.Limits.QueueTimeout)
		if held.Limit > 0 {
			limit = min(limit, held.Limit)
		}
		r.wait = r.x.beginWait(telemetry.StageWaitsPolicy, limit, admission.ErrHeld)
		r.began, r.interval = time.Now(), holdFirst
	}
	return true
}

func (r *holdRule) stop() {
	r.x.journal.Note("the plan policy held the request for " + time.Since(r.began).Round(time.Millisecond).String())
	r.end()
}

// retryRule restricts a retry to placements for which the retry budget has a retry.
type retryRule struct {
	*placing
	noPreparation
}

func (r *retryRule) judge(a *answer) (again bool) {
	switch {
	case a.err != nil:
		a.err = firstError(r.x.env.Context, r.last, a.err)
	case r.retried != nil && !r.takeRetry(a.placement, r.retried):
		a.err = r.retried
	default:
		r.retried = nil
	}
	return false
}

// firstError prefers the failure of a leg to the error that no other target is left.
func firstError(ctx context.Context, leg, place error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if leg != nil {
		return leg
	}
	return place
}

// otherDecodeRule restricts another decode engine for KV that prefill has computed. An attempt with
// other engines is better than a decode engine that is likely to fail.
type otherDecodeRule struct {
	*placing
	noPreparation
}

func (r *otherDecodeRule) judge(a *answer) (again bool) {
	p := a.placement
	if a.err == nil && (r.x.fallback() != "" && r.mayFail(p) || r.hasEnded(p) || !r.takeRetry(p, r.outcome.Err)) {
		a.err = r.outcome.Err
	}
	return false
}

// wait is one wait of a request for a placement. The zero value is none.
type wait struct {
	ctx  context.Context // ends with the request's context, at the request's deadline, and after the limit of the wait
	over func()
}

// beginWait begins a wait. Its context ends after limit with the cause late.
func (x *exchange) beginWait(stage telemetry.Stage, limit time.Duration, late error) wait {
	until, stop := x.untilDeadline(x.env.Context)
	ctx, cancel := context.WithTimeoutCause(until, limit, late)
	x.journal.Stage(stage)
	return wait{ctx, func() {
		x.journal.Stage(telemetry.StageRuns)
		cancel()
		stop()
	}}
}

// end ends the wait.
func (w *wait) end() {
	w.over()
	*w = wait{}
}

// endWaits ends the waits that a panic has left.
func (p *placing) endWaits() {
	if p.probe.ctx != nil {
		p.probe.stop()
	}
	if p.engine.ctx != nil {
		p.engine.stop()
	}
	if p.hold.ctx != nil {
		p.hold.stop()
	}
}

// waitedInVain records that a wait ended with err, and returns err. A client that left is not
// counted as refused.
func (x *exchange) waitedInVain(err error) error {
	if x.env.Context.Err() == nil {
		x.journal.Shed(admission.Reason(err))
	}
	return err
}
