package exchange

import (
	"errors"
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// place requests the next placement. If there is none while engines that may serve the model have
// not been looked at, place waits for their first probes: without the wait, a request at the start
// would get an error, or another model, although its engines are ready.
func (x *exchange) place() (*coordinator.Placement, error) {
	before := x.run.Registry.Snapshot()
	p, err := x.placeNow()
	if !x.awaitsProbe(before, err) {
		return p, err
	}
	late := err
	ctx, end := x.beginWait(telemetry.StageWaitsEngine, mostAwaited, late)
	defer end()
	for {
		changed := x.run.Registry.Changed() // before the placement, so that no change is missed
		before = x.run.Registry.Snapshot()
		if p, err = x.placeNow(); !x.awaitsProbe(before, err) {
			return p, err
		}
		switch over := x.run.Waiting.Pause(ctx, changed, mostAwaited); {
		case errors.Is(over, late):
			return nil, late
		case over != nil:
			return nil, x.waitedInVain(over)
		}
	}
}

// mostAwaited bounds the wait of place, also while engines come again and again.
const mostAwaited = 2 * engine.FirstList

// awaitsProbe reports whether a placement that failed with err may succeed after the first probes
// of engines. before is a snapshot from before the placement. A policy may have refused the request
// because a phase has no engine yet.
func (x *exchange) awaitsProbe(before *engine.Snapshot, err error) bool {
	if err == nil || !lacksEngine(err) && !errors.Is(err, coordinator.ErrRejected) {
		return false
	}
	return before.Awaits(x.req.Model)
}

// placeNow requests the next placement from the coordinator.
func (x *exchange) placeNow() (*coordinator.Placement, error) {
	x.journal.Placing()
	if x.gateway != nil {
		x.ask.Within = x.gateway.Within()
	}
	if !x.route.Restricted() {
		return x.PlaceOnce()
	}
	if x.route.CallerCoordinates() {
		x.env.SkipEncode()
	}
	return x.route.Place()
}

// Coordinated implements sidecar.Exchange.
func (x *exchange) Coordinated(policy string) { x.journal.Coordinated(policy) }

// Fallback implements sidecar.Exchange.
func (x *exchange) Fallback(policy, reason string) { x.journal.Fallback(policy, reason) }

// PlaceOnce implements sidecar.Exchange. It requests a placement on engines that serve the API of
// the request. If the connector cannot run the request as two legs, or not with the chosen prefill
// engine, PlaceOnce asks for one engine that answers the request alone, and counts a fallback.
func (x *exchange) PlaceOnce() (*coordinator.Placement, error) {
	serves := func(_ *coordinator.Placement, c connector.Connector) error {
		if !x.servedBy(c) {
			return errNotCarried(c.Name(), x.req.API)
		}
		return nil
	}
	p, err := x.placeWhere(serves)
	if err != nil || p.Flow == abi.FlowAggregated {
		return p, err
	}
	conn := x.run.Connector(p.Decode.Spec.Connector)
	reason, sure, unpairable := x.unpairable(conn, p.Prefill)
	if unpairable == nil {
		return p, nil
	}
	p.Lease.Release()
	limit, aggregate, excluded := p.FirstByte, x.ask.Aggregate, len(x.ask.Excluded) // the plan policy is not asked again
	x.ask.Aggregate, x.ask.Request.PairBroken = conn.AggregatesOn(), true
	p, err = x.placeWhere(func(p *coordinator.Placement, c connector.Connector) error {
		if !x.servedBy(c) || p.Decode.Role != abi.RoleBoth && p.Decode.Role&c.AggregatesOn() == 0 {
			return unpairable
		}
		return nil
	})
	switch {
	case err == nil:
		x.journal.Fallback("aggregated", reason)
	case sure:
		return nil, unpairable
	default:
		x.ask.Aggregate, x.ask.Request.PairBroken, x.ask.Excluded = aggregate, false, x.ask.Excluded[:excluded]
		if p, err = x.placeWhere(serves); err != nil {
			return nil, err
		}
	}
	p.FirstByte = limit
	return p, nil
}

// servedBy reports whether engines of a connector may serve the API of the request. Only the
// operator knows which engines have an EngineRoute.
func (x *exchange) servedBy(c connector.Connector) bool {
	return x.req.API == openai.EngineRoute || c.Serves(x.req.API)
}

// unpairable returns an error if the request cannot run as two legs with that prefill engine,
// and the reason for the metric. If sure is false, the request may succeed as two legs
// nevertheless.
func (x *exchange) unpairable(conn connector.Connector, prefill engine.Target) (reason string, sure bool, err error) {
	if err = conn.Pairable(&x.req); err != nil {
		return "not_pairable", true, err
	}
	if d, ok := conn.(connector.Dated); ok {
		sure, err = d.Unfit(&x.req, prefill.Facts())
	}
	return "forced_tool", sure, err
}

// placeWhere requests a placement that passes check, which returns an error if the connector does
// not suit the request. A model may have engines of several connectors. If check fails, placeWhere
// excludes the engines of that connector and asks again.
func (x *exchange) placeWhere(check func(*coordinator.Placement, connector.Connector) error) (*coordinator.Placement, error) {
	for {
		p, err := x.run.Coordinator.Place(x.env.Context, &x.ask)
		if err != nil {
			return nil, err
		}
		x.held = p.Lease
		conn := x.run.Connector(p.Decode.Spec.Connector)
		if err = check(p, conn); err == nil {
			x.sentTo(p)
			return p, nil
		}
		p.Lease.Release()
		if !x.excludeConnector(conn.Name()) {
			return nil, err
		}
	}
}

// excludeConnector excludes all targets of a connector from the next placements. The
// coordinator uses excluded targets only if no others are left. It returns false if all of
// them were excluded before.
func (x *exchange) excludeConnector(name string) bool {
	before := len(x.ask.Excluded)
	for _, i := range x.run.Registry.Snapshot().Instances {
		for rank := range i.Load {
			t := engine.Target{Instance: i, Rank: rank}
			if i.Spec.Connector == name && !slices.Contains(x.ask.Excluded, t) {
				x.ask.Excluded = append(x.ask.Excluded, t)
			}
		}
	}
	return len(x.ask.Excluded) > before
}
