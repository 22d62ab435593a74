package exchange

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// The restrictions of a placement that wait for nothing. Those that wait are in placing_waits.go.

// noPreparation is the begin of a restriction that prepares no question.
type noPreparation struct{}

func (noPreparation) begin(*placing) error { return nil }

// connectorRule restricts a placement to engines whose connector serves the API of the request. A
// model may have engines of several connectors. If the connector cannot run the request as two legs,
// or not with the chosen prefill engine, the rule asks for one engine that answers the request alone,
// and counts a fallback.
type connectorRule struct {
	noPreparation
	form       form
	unpairable error  // why the request cannot run as two legs
	reason     string // of unpairable, for the metric
	sure       bool   // two legs would fail
	firstByte  time.Duration
	aggregate  abi.Role // of the question for two legs
	excluded   int      // targets, of the question for two legs
	unfit      int      // targets of these that the rule has excluded
}

// notPairable is the reason of a request whose form no pair of engines can run.
const notPairable = "not_pairable"

// form is how many legs the question asks for.
type form uint8

const (
	planned  form = iota // as the plan policy decides
	alone                // one leg, because the chosen two are not possible
	twoAfter             // two legs nevertheless, because no engine can run one
)

func (r *connectorRule) judge(p *placing, a *answer) (again bool) {
	var conn connector.Connector
	if a.err == nil {
		conn = p.x.run.Connector(a.placement.Decode.Spec.Connector)
		role := a.placement.Decode.Role
		serves := p.x.req.API == openai.EngineRoute || conn.Serves(p.x.req.API) // only the operator knows which engines have an EngineRoute
		switch {
		case r.form == alone && (!serves || role != abi.RoleBoth && role&conn.AggregatesOn() == 0):
			a.err = r.unpairable
		case !serves:
			a.err = errNotCarried(conn.Name(), p.x.req.API)
		}
		if a.err != nil && p.excludeConnector(conn.Name()) {
			return true
		}
	}
	switch {
	case r.form == planned && a.err == nil && a.placement.Flow != abi.FlowAggregated && !r.pairs(&p.x.req, conn, a.placement):
		if d, dated := conn.(connector.Dated); dated && r.reason != notPairable {
			if n := p.excludeUnfit(conn.Name(), d); n > 0 {
				r.unfit += n
				return true
			}
		}
		r.form = alone
		p.ask.Excluded = p.ask.Excluded[:len(p.ask.Excluded)-r.unfit] // they may serve the request whole
		r.firstByte, r.aggregate, r.excluded = a.placement.FirstByte, p.ask.Aggregate, len(p.ask.Excluded)
		p.ask.Aggregate, p.ask.Request.PairBroken = conn.AggregatesOn(), true
		return true
	case r.form == alone && a.err != nil && !r.sure:
		r.form = twoAfter
		p.ask.Aggregate, p.ask.Request.PairBroken, p.ask.Excluded = r.aggregate, false, p.ask.Excluded[:r.excluded]
		return true
	case r.form == alone && a.err != nil:
		a.err = r.unpairable
	case r.form == alone:
		p.x.journal.Fallback("aggregated", r.reason)
	}
	if r.form != planned && a.err == nil {
		a.placement.FirstByte = r.firstByte // the plan policy was asked only once
	}
	*r = connectorRule{}
	return false
}

// pairs reports whether the request can run as the two legs of a placement. Otherwise the fields say
// why.
func (r *connectorRule) pairs(req *openai.Request, conn connector.Connector, placement *coordinator.Placement) bool {
	if r.unpairable = conn.Pairable(req); r.unpairable != nil {
		r.reason, r.sure = notPairable, true
	} else if d, ok := conn.(connector.Dated); ok {
		r.reason, r.sure, r.unpairable = d.Unfit(req, abi.Prefill, placement.Prefill)
		if r.unpairable == nil {
			r.reason, r.sure, r.unpairable = d.Unfit(req, abi.Decode, placement.Decode)
		}
	}
	return r.unpairable == nil
}

// excludeUnfit excludes the targets of a connector that are too old for the legs of the request from
// the next placements, so that newer engines get it. It returns the number of these targets.
func (p *placing) excludeUnfit(name string, d connector.Dated) int {
	before := len(p.ask.Excluded)
	p.excludeTargets(name, func(t engine.Target) bool {
		for _, leg := range [...]struct {
			role  abi.Role
			phase abi.Phase
		}{{abi.RolePrefill, abi.Prefill}, {abi.RoleDecode, abi.Decode}} {
			if t.Role&leg.role == 0 {
				continue
			}
			if _, _, err := d.Unfit(&p.x.req, leg.phase, t); err != nil {
				return true
			}
		}
		return false
	})
	return len(p.ask.Excluded) - before
}

// excludeConnector excludes all targets of a connector from the next placements. The
// coordinator uses excluded targets only if no others are left. It returns false if all of
// them were excluded before.
func (p *placing) excludeConnector(name string) bool {
	before := len(p.ask.Excluded)
	p.excludeTargets(name, func(engine.Target) bool { return true })
	return len(p.ask.Excluded) > before
}

// excludeTargets excludes those targets of a connector from the next placements that match.
func (p *placing) excludeTargets(name string, match func(engine.Target) bool) {
	for _, i := range p.x.run.Registry.Snapshot().Instances {
		for rank := range i.Load {
			t := engine.Target{Instance: i, Rank: rank}
			if i.Spec.Connector == name && !slices.Contains(p.ask.Excluded, t) && match(t) {
				p.ask.Excluded = append(p.ask.Excluded, t)
			}
		}
	}
}

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
