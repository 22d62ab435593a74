package exchange

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// connectorRule restricts a placement to engines whose connector serves the API of the request. A
// model may have engines of several connectors. If the connector cannot run the request as two legs,
// or not with the chosen prefill engine, the rule asks for two engines of another connector, then for
// one engine that answers the request alone, and counts a fallback.
type connectorRule struct {
	wide       coordinator.Within // that of the question without the rule
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

// begin limits the question to the connectors that serve the API of the request.
func (r *connectorRule) begin(p *placing) error {
	r.wide = p.ask.Within
	if len(p.avoided) > 0 {
		w := &p.ask.Within
		w.Prefill, w.Decode, w.Whole = p.remaining(w.Prefill), p.remaining(w.Decode), p.remaining(w.Whole)
	}
	return nil
}

func (r *connectorRule) judge(p *placing, a *answer) (again bool) {
	p.ask.Within = r.wide
	var conn connector.Connector
	if a.err == nil {
		conn = p.x.run.Connector(a.placement.Decode.Spec.Connector)
		if !p.serves(conn) {
			a.err = errNotCarried(conn.Name(), p.x.req.API)
			if p.avoid(conn.Name()) {
				return true
			}
		} else if r.form == alone && !answersAlone(conn, a.placement.Decode) {
			a.err = r.unpairable
			if p.excludeTargets(conn.Name(), func(t engine.Target) bool { return !answersAlone(conn, t) }) > 0 {
				return true
			}
		}
	}
	switch {
	case r.form == planned && a.err == nil && a.placement.Flow != abi.FlowAggregated && !r.pairs(&p.x.req, conn, a.placement):
		if n := r.excludeUnfit(p, conn); n > 0 {
			r.unfit += n
			return true
		}
		r.form = alone
		p.ask.Excluded = p.ask.Excluded[:len(p.ask.Excluded)-r.unfit] // they may serve the request whole
		r.firstByte, r.aggregate, r.excluded = a.placement.FirstByte, p.ask.Aggregate, len(p.ask.Excluded)
		p.ask.Aggregate, p.ask.Request.PairBroken = p.aggregatesOn(), true
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

// excludeUnfit excludes the targets of a connector that cannot run the legs of the request from the
// next placements, so that newer engines or those of another connector get it. It returns the number
// of these targets.
func (r *connectorRule) excludeUnfit(p *placing, conn connector.Connector) int {
	if r.reason == notPairable {
		if !p.hasOther(func(c connector.Connector) bool { return c.Name() != conn.Name() && c.Pairable(&p.x.req) == nil }) {
			return 0
		}
		return p.excludeTargets(conn.Name(), func(engine.Target) bool { return true })
	}
	d, dated := conn.(connector.Dated)
	if !dated {
		return 0
	}
	return p.excludeTargets(conn.Name(), func(t engine.Target) bool {
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
}

// excludeTargets excludes those targets of a connector from the next placements that match, and
// returns their number. The coordinator uses excluded targets only if no others are left.
func (p *placing) excludeTargets(name string, match func(engine.Target) bool) int {
	before := len(p.ask.Excluded)
	for _, i := range p.x.run.Registry.Snapshot().Instances {
		for rank := range i.Load {
			t := engine.Target{Instance: i, Rank: rank}
			if i.Spec.Connector == name && !slices.Contains(p.ask.Excluded, t) && match(t) {
				p.ask.Excluded = append(p.ask.Excluded, t)
			}
		}
	}
	return len(p.ask.Excluded) - before
}

// serves reports whether engines of a connector serve the API of the request. Only the operator
// knows which engines have an EngineRoute.
func (p *placing) serves(conn connector.Connector) bool {
	return p.x.req.API == openai.EngineRoute || conn.Serves(p.x.req.API)
}

// answersAlone reports whether a target can answer a request alone.
func answersAlone(conn connector.Connector, t engine.Target) bool {
	return t.Role == abi.RoleBoth || t.Role&conn.AggregatesOn() != 0
}

// avoid leaves the engines of a connector out of all later questions of the request. It returns
// false if no other connector of the model serves the API of the request.
func (p *placing) avoid(name string) bool {
	if !p.hasOther(func(c connector.Connector) bool { return c.Name() != name && p.serves(c) }) {
		return false
	}
	p.avoided = append(p.avoided, name)
	return true
}

// remaining returns the instances of a list of Within whose connector is not avoided.
func (p *placing) remaining(list []*engine.Instance) []*engine.Instance {
	if list == nil {
		list = p.x.run.Registry.Snapshot().Instances
	}
	left := make([]*engine.Instance, 0, len(list))
	for _, i := range list {
		if !slices.Contains(p.avoided, i.Spec.Connector) {
			left = append(left, i)
		}
	}
	return left
}

// hasOther reports whether the connector of an engine of the request's model matches, whatever the
// state of the engine.
func (p *placing) hasOther(match func(connector.Connector) bool) bool {
	model := p.x.knownModel()
	return slices.ContainsFunc(p.x.run.Registry.Snapshot().Instances, func(i *engine.Instance) bool {
		return match(p.x.run.Connector(i.Spec.Connector)) && slices.Contains(i.Models(), model)
	})
}

// aggregatesOn returns the roles whose engines answer a request alone with some connector of the
// model.
func (p *placing) aggregatesOn() (roles abi.Role) {
	p.hasOther(func(c connector.Connector) bool {
		if p.serves(c) {
			roles |= c.AggregatesOn()
		}
		return false
	})
	return roles
}
