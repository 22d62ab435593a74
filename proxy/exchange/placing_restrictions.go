package exchange

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// The restrictions of a placement that wait for nothing. Those that wait are in placing_waits.go.

// noPreparation is the begin of a restriction that prepares no question.
type noPreparation struct{}

func (noPreparation) begin(*placing) error { return nil }

// routeRule restricts a placement to the engines that a gateway, the coordination policies of a
// sidecar, or a picker allow: one policy or destination after the other.
type routeRule struct{}

func (routeRule) begin(p *placing) error {
	if p.x.gateway != nil {
		p.ask.Within = p.x.gateway.Within()
	}
	if !p.route.Restricted {
		return nil
	}
	if p.route.CallerCoordinates() {
		p.x.env.SkipEncode()
	}
	if err := p.route.Restrict(); err != nil {
		return err
	}
	if p.route.WantsPick() {
		p.x.pickDecode()
	}
	return nil
}

func (routeRule) judge(p *placing, a *answer) (again bool) {
	return p.route.Restricted && p.route.Judge(a.err)
}

// modelRule changes to the next fallback while no engine of the request's model can take the
// request. It does not try a remote whose circuit is open, or again for this request. If none of the
// models has an engine, the request waits for the first model as a request without fallbacks does.
type modelRule struct {
	change string // the model to change to; "": none
	back   bool   // no model has an engine
	moves  bool   // the request moves to the next model rather than wait
	waits  bool   // the request waits for an engine of its model
}

func (r *modelRule) begin(p *placing) error {
	p.waited = false
	if change := r.change; change != "" {
		r.change = ""
		if err := p.x.serveWith(change); err != nil {
			r.back = false
			return err
		}
	}
	r.waits = len(p.x.env.Models) < 2 || r.back
	r.moves = !r.waits && p.x.fallback() != ""
	return nil
}

func (r *modelRule) judge(p *placing, a *answer) (again bool) {
	x := p.x
	switch {
	case r.waits:
		r.back = false
		return false
	case r.moves && a.err == nil && !p.mayFail(a.placement), r.moves && a.err != nil && !lacksEngine(a.err):
		return false
	case r.moves:
		reason := "no_engine"
		if a.err == nil {
			reason = "failed"
		}
		x.journal.Fallback("model", reason)
		r.change = x.fallback()
		return true
	case a.err == nil && isRemote(x.req.Model) && p.mayFail(a.placement), errors.Is(a.err, coordinator.ErrUnknownModel):
		a.err = &coordinator.NoTargetError{Model: x.requested()} // the configuration knows the name
	}
	if !lacksEngine(a.err) || x.env.Config.Limits.NoEngineTimeout == 0 {
		return false
	}
	r.change, r.back = x.env.Models[0], true
	return true
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

// retryRule restricts a retry to placements for which the retry budget has a retry.
type retryRule struct{ noPreparation }

func (retryRule) judge(p *placing, a *answer) (again bool) {
	switch {
	case a.err != nil:
		a.err = firstError(p.x.env.Context, p.last, a.err)
	case p.retried != nil && !p.takeRetry(a.placement, p.retried):
		a.err = p.retried
	default:
		p.retried = nil
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
type otherDecodeRule struct{ noPreparation }

func (otherDecodeRule) judge(p *placing, a *answer) (again bool) {
	if a.err == nil && (p.x.fallback() != "" && p.mayFail(a.placement) || p.hasEnded(a.placement) || !p.takeRetry(a.placement, p.outcome.Err)) {
		a.err = p.outcome.Err
	}
	return false
}
