package sidecar

import (
	"errors"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Place places the request by the first of the coordination policies that can serve it.
// A policy that cannot serve it now, because its engines are away or have failed, is
// skipped and counted. If no other policy is left, Place tries those again whose engines
// have failed.
//
// A request whose engines an ext_proc picker has chosen is placed on these engines.
func (r *Route) Place() (*coordinator.Placement, error) {
	if len(r.destinations) > 0 {
		return r.placePicked()
	}
	if r.local[0] = r.sc.Local(); r.local[0] == nil {
		return nil, &coordinator.NoTargetError{Model: r.Body.Model}
	}
	if r.profile != "" || !r.Body.API.Generates() {
		r.restrictTo(coordinator.Within{Whole: r.local[:]}, r.local[0].Role, false)
		p, err := r.Exchange.PlaceOnce()
		if err == nil && r.profile != "" {
			r.usedPolicy("profile_" + r.profile)
		}
		return p, err
	}
	p, skipped, err := r.placeByPolicy(false)
	if err != nil && skipped && errors.Is(err, coordinator.ErrNoTarget) {
		p, _, err = r.placeByPolicy(true)
	}
	return p, err
}

// placeByPolicy tries each policy once. Policies whose engines have failed are tried only
// with includeFailed; skipped reports that one was not.
func (r *Route) placeByPolicy(includeFailed bool) (p *coordinator.Placement, skipped bool, err error) {
	order := r.sc.Order()
	if r.first != "" && order[0] != r.first {
		order = append([]string{r.first}, slices.DeleteFunc(slices.Clone(order), func(n string) bool { return n == r.first })...)
	}
	err = &coordinator.NoTargetError{Model: r.Body.Model}
	for _, name := range order {
		if !r.restrict(name) {
			if name == r.first {
				r.Exchange.Fallback(name, "not_applicable")
			}
			continue
		}
		if !includeFailed && r.exhausted(name) {
			r.Exchange.Fallback(name, "failed")
			skipped = true
			continue
		}
		r.picked[0] = nil
		if name == config.CoordinateDecodePicked && r.decodeKnownFirst() {
			r.askPicker()
		}
		if p, err = r.Exchange.PlaceOnce(); err == nil {
			r.usedPolicy(name)
			return p, skipped, nil
		}
		if !errors.Is(err, coordinator.ErrNoTarget) {
			return nil, skipped, err
		}
		r.Exchange.Fallback(name, "no_target")
	}
	return nil, skipped, err
}

// decodeKnownFirst reports whether the decode engine must be known before the prefill leg
// is sent: the decode leg may begin before prefill has answered, or prefill sends the KV
// to decode.
func (r *Route) decodeKnownFirst() bool {
	local := r.local[0]
	conn := connector.Of(local)
	_, ordered := conn.(connector.Ordered)
	return local.Flow == abi.FlowConcurrent || connector.PinsDecode(conn) || ordered && r.ScheduleStyle != "context_first"
}

// restrict limits the next placement to the engines of a coordination policy. It returns
// false if the policy is not for this request.
func (r *Route) restrict(name string) bool {
	local := r.local[:]
	switch name {
	case config.CoordinateLocal:
		r.restrictTo(coordinator.Within{Whole: local}, local[0].Role, false)
		return servesWhole(local[0])
	case config.CoordinatePrefillNamed:
		r.restrictTo(coordinator.Within{Prefill: r.named, Decode: local, Whole: local}, 0, true)
		return len(r.named) > 0
	case config.CoordinatePrefillPlaced:
		r.restrictTo(coordinator.Within{Decode: local, Whole: local}, 0, false)
	case config.CoordinateDecodeNamed:
		r.restrictTo(coordinator.Within{Prefill: local, Decode: r.named, Whole: local}, 0, true)
		return len(r.named) > 0
	default: // decode_placed, decode_picked
		r.restrictTo(coordinator.Within{Prefill: local, Whole: local}, 0, false)
	}
	return true
}

// restrictTo sets the limits of the next placement. A request that cannot run as a pair
// stays on one engine.
func (r *Route) restrictTo(within coordinator.Within, aggregate abi.Role, two bool) {
	r.Ask.Within, r.Ask.Two = within, two
	if !r.Ask.Request.PairBroken {
		r.Ask.Aggregate = aggregate
	}
}

// exhausted reports whether every engine that a policy allows has failed in an earlier
// attempt of this exchange.
func (r *Route) exhausted(name string) bool {
	switch name {
	case config.CoordinateLocal:
		return r.failedOn(r.local[0])
	case config.CoordinatePrefillNamed, config.CoordinateDecodeNamed:
		return !slices.ContainsFunc(r.named, func(i *engine.Instance) bool { return !r.failedOn(i) })
	}
	return false
}

// usedPolicy records the policy that has placed the request.
func (r *Route) usedPolicy(name string) {
	r.policy = name
	r.Exchange.Coordinated(name)
}

// Relax lets the decode leg move to the next destination of an ext_proc picker, or to other engines once every engine that the header or
// the picker named has failed. For engines of the header it does so only if the order of
// the policies allows that.
func (r *Route) Relax() {
	switch r.policy {
	case CoordinatedByPicker:
		r.nextDestination()
		return
	case config.CoordinateDecodeNamed:
		if !r.exhausted(r.policy) || !slices.Contains(r.sc.Order(), config.CoordinateDecodePlaced) {
			return
		}
	case config.CoordinateDecodePicked:
		if r.picked[0] == nil || !r.failedOn(r.picked[0]) {
			return
		}
	default:
		return
	}
	r.Ask.Within.Decode = nil
	r.Exchange.Fallback(r.policy, "failed")
}

// Pick requests the decode engine from the picker after prefill has answered. It returns true if
// the request must be placed again, because the picker has chosen another engine than decode. If
// that placement fails, call DropPick.
func (r *Route) Pick(decode *engine.Instance) bool {
	return r.policy == config.CoordinateDecodePicked && !r.decodeKnownFirst() && r.askPicker() && r.picked[0] != decode
}

// DropPick counts that the request could not be placed on the engine of the picker, and
// allows other decode engines again.
func (r *Route) DropPick() {
	r.Ask.Within.Decode = nil
	r.Exchange.Fallback(config.CoordinateDecodePicked, "no_target")
}

// askPicker sends a request to the picker and limits decode to the engine that the picker chooses.
// It returns false, and counts the reason, if there is none.
func (r *Route) askPicker() bool {
	i, reason := r.pick()
	if reason != "" {
		r.Exchange.Fallback(config.CoordinateDecodePicked, reason)
		return false
	}
	r.picked[0] = i
	r.Ask.Within.Decode = r.picked[:]
	return true
}

// pick returns the engine that the picker chooses for decode, or the reason why there is
// none. The engine must be known, able to take the phase, ready, and must not have failed
// in this exchange.
func (r *Route) pick() (*engine.Instance, string) {
	sc, local := r.sc, r.local[0]
	if sc.picker == nil {
		return nil, "failed" // the order of an operator may name decode_picked without a picker
	}
	q := &pickRequest{
		RequestID: r.ID, Model: r.Body.Model, Phase: abi.Decode.String(),
		PromptTokens: r.Ask.Request.PromptTokens, MaxTokens: r.Body.MaxTokens, Stream: r.Body.Stream,
		Prefill: local.Spec.Address(), Candidates: []string{},
	}
	snapshot := sc.registry.Snapshot()
	for _, i := range snapshot.Instances {
		if i.State() == engine.Ready && isPeer(local, i, abi.RoleDecode) && !r.failedOn(i) {
			q.Candidates = append(q.Candidates, i.Spec.Address())
		}
	}
	endpoints, reason := sc.picker.ask(r.Context, q)
	for _, address := range endpoints {
		i := sc.addresses.find(snapshot, strings.TrimSpace(address))
		switch {
		case i == nil || !isPeer(local, i, abi.RoleDecode):
			reason = "not_allowed"
		case i.State() != engine.Ready:
			reason = "not_ready"
		case r.failedOn(i):
			reason = "has_failed"
		default:
			return i, ""
		}
	}
	return nil, reason
}
