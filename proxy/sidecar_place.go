package proxy

import (
	"errors"
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// coordinate places a sidecar's request: the first of its coordination policies
// that can serve it does. One that could have, but for what failed or is away,
// is passed over and counted. What was passed over because it had failed is
// tried again when nothing else is left.
func (x *exchange) coordinate() (*coordinator.Placement, error) {
	c := &x.side
	snapshot := x.s.deps.Registry.Snapshot()
	if c.home[0] = c.sc.home(snapshot); c.home[0] == nil {
		return nil, &coordinator.NoTargetError{Model: x.req.Model}
	}
	x.encoded = x.encoded || c.phase != "" // its caller has seen to that
	if c.phase != "" || !x.req.API.Generates() {
		x.narrowTo(coordinator.Within{Whole: c.home[:]}, c.home[0].Role, false)
		p, err := x.placeOnce()
		if err == nil && c.phase != "" {
			x.coordinated("profile_" + c.phase)
		}
		return p, err
	}
	p, skipped, err := x.coordinateBy(false)
	if err != nil && skipped && errors.Is(err, coordinator.ErrNoTarget) {
		p, _, err = x.coordinateBy(true)
	}
	return p, err
}

// coordinateBy goes through the policies once. desperate: those whose engines
// have failed are not passed over; skipped says that one was.
func (x *exchange) coordinateBy(desperate bool) (p *coordinator.Placement, skipped bool, err error) {
	c := &x.side
	order := *c.sc.order.Load()
	if c.first != "" && order[0] != c.first {
		order = append([]string{c.first}, slices.DeleteFunc(slices.Clone(order), func(n string) bool { return n == c.first })...)
	}
	err = &coordinator.NoTargetError{Model: x.req.Model}
	for _, name := range order {
		if !x.narrow(name) {
			if name == c.first {
				x.journal.Fallback(name, "not_applicable")
			}
			continue
		}
		if !desperate && x.spent(name) {
			x.journal.Fallback(name, "failed")
			skipped = true
			continue
		}
		c.choice[0] = nil
		if name == config.CoordinateDecodePicked && x.decodeFirst() {
			x.pickInto()
		}
		if p, err = x.placeOnce(); err == nil {
			x.coordinated(name)
			return p, skipped, nil
		}
		if !errors.Is(err, coordinator.ErrNoTarget) {
			return nil, skipped, err
		}
		x.journal.Fallback(name, "no_target")
	}
	return nil, skipped, err
}

// decodeFirst reports whether decode is to be known before prefill is sent: its leg
// may begin before prefill has answered, or prefill sends it the KV.
func (x *exchange) decodeFirst() bool {
	home := x.side.home[0]
	conn := x.s.connector(home.Spec.Connector)
	_, ordered := conn.(connector.Ordered)
	return home.Flow == abi.FlowConcurrent || binds(conn) || ordered && x.cfg.Retry.ScheduleStyle != "context_first"
}

// narrow makes the next placement that of a coordination policy; false: the
// policy is not for this request.
func (x *exchange) narrow(name string) bool {
	c := &x.side
	home := c.home[:]
	switch name {
	case config.CoordinateLocal:
		x.narrowTo(coordinator.Within{Whole: home}, home[0].Role, false)
		return x.s.servesWhole(home[0])
	case config.CoordinatePrefillNamed:
		x.narrowTo(coordinator.Within{Prefill: c.named, Decode: home, Whole: home}, 0, true)
		return len(c.named) > 0
	case config.CoordinatePrefillPlaced:
		x.narrowTo(coordinator.Within{Decode: home, Whole: home}, 0, false)
	case config.CoordinateDecodeNamed:
		x.narrowTo(coordinator.Within{Prefill: home, Decode: c.named, Whole: home}, 0, true)
		return len(c.named) > 0
	default: // decode_placed, decode_picked
		x.narrowTo(coordinator.Within{Prefill: home, Whole: home}, 0, false)
	}
	return true
}

// narrowTo sets what the next placement may be. A request that was found not to
// pair keeps its one leg.
func (x *exchange) narrowTo(within coordinator.Within, aggregate abi.Role, two bool) {
	x.ask.Within, x.ask.Two = within, two
	if !x.ask.Request.PairBroken {
		x.ask.Aggregate = aggregate
	}
}

// spent reports whether every engine that a policy leaves to choose from has
// failed in an earlier attempt of this exchange.
func (x *exchange) spent(name string) bool {
	switch name {
	case config.CoordinateLocal:
		return x.failedOn(x.side.home[0])
	case config.CoordinatePrefillNamed, config.CoordinateDecodeNamed:
		return !slices.ContainsFunc(x.side.named, func(i *engine.Instance) bool { return !x.failedOn(i) })
	}
	return false
}

// failedOn reports whether an earlier attempt failed on the instance.
func (x *exchange) failedOn(i *engine.Instance) bool {
	return slices.ContainsFunc(x.ask.Excluded, func(t engine.Target) bool { return t.Instance == i })
}

// coordinated notes which policy placed the request.
func (x *exchange) coordinated(name string) {
	x.side.policy = name
	x.journal.Coordinated(name)
}

// widen lets the decode leg move to other engines than that which the header or
// the picker named, when that has failed; what the header named only if the
// policies allow it.
func (x *exchange) widen() {
	c := &x.side
	switch c.policy {
	case config.CoordinateDecodeNamed:
		if !x.spent(c.policy) || !slices.Contains(*c.sc.order.Load(), config.CoordinateDecodePlaced) {
			return
		}
	case config.CoordinateDecodePicked:
		if c.choice[0] == nil || !x.failedOn(c.choice[0]) {
			return
		}
	default:
		return
	}
	x.ask.Within.Decode = nil
	x.journal.Fallback(c.policy, "failed")
}

// pick has the picker choose decode for a prefill that has answered. What it
// cannot decide stays as the place policy did.
func (a *attempt) pick() {
	x := a.x
	if x.side.policy != config.CoordinateDecodePicked || x.decodeFirst() || !x.pickInto() || x.side.choice[0] == a.p.Decode.Instance {
		return
	}
	p, err := a.placeDecode()
	if err != nil {
		x.ask.Within.Decode = nil
		x.journal.Fallback(config.CoordinateDecodePicked, "no_target")
		return
	}
	a.move(p)
}

// pickInto asks the picker and limits decode to its choice; false: it has none
// that is of use, which is counted.
func (x *exchange) pickInto() bool {
	c := &x.side
	i, reason := x.askPicker()
	if reason != "" {
		x.journal.Fallback(config.CoordinateDecodePicked, reason)
		return false
	}
	c.choice[0] = i
	x.ask.Within.Decode = c.choice[:]
	return true
}
