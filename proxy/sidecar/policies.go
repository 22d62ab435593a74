package sidecar

import (
	"errors"
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Restrict limits the next question to the coordinator to the engines of the present coordination
// policy, or of the present destination of a picker. The policies are tried in their order. A policy
// that cannot serve the request now, because its engines are away or have failed, is skipped and
// counted. If no other policy is left, those are tried again whose engines have failed. The error
// is a *coordinator.NoTargetError: no policy is for this request.
func (r *Route) Restrict() error {
	if r.step.begun {
		return nil
	}
	r.step.begun = true
	if len(r.destinations) > 0 {
		r.nextPicked()
		return nil
	}
	if r.local[0] = r.sc.Local(); r.local[0] == nil {
		r.step = step{}
		return &coordinator.NoTargetError{Model: r.Body.Model}
	}
	if r.profile != "" || !r.Body.API.Generates() {
		r.restrictTo(coordinator.Within{Whole: r.local[:]}, r.local[0].Role, false)
		return nil
	}
	r.step.order = r.order()
	if !r.nextPolicy() {
		r.step = step{}
		return &coordinator.NoTargetError{Model: r.Body.Model}
	}
	return nil
}

// Judge takes the coordinator's answer to the question that Restrict has limited; nil is a placement.
// It reports whether another policy or destination may serve the request. Restrict then limits the
// question to its engines.
func (r *Route) Judge(err error) (again bool) {
	switch {
	case err == nil:
		r.usedPolicy()
	case errors.Is(err, coordinator.ErrNoTarget):
		again = r.next()
	}
	if !again {
		r.step = step{}
	}
	return again
}

// step is the policy or the destination to which the question is limited now. The zero value is
// before the first one.
type step struct {
	begun  bool
	failed bool     // the second pass: engines that have failed are tried again
	order  []string // the policies
	at     int      // of the policy or destination that is tried next
	policy string   // "": none
	left   bool     // the first pass has left out a policy whose engines have failed
	alone  bool     // the destination is tried without the prefill engines that the picker named
}

// next moves on after an answer without a target.
func (r *Route) next() bool {
	switch {
	case len(r.destinations) > 0:
		return r.nextPicked()
	case r.step.policy == "": // one engine alone can serve the request
		return false
	}
	r.Journal.Fallback(r.step.policy, "no_target")
	return r.nextPolicy()
}

// nextPolicy moves on to the next coordination policy that can serve the request.
func (r *Route) nextPolicy() bool {
	for {
		if r.step.at == len(r.step.order) {
			if r.step.failed || !r.step.left {
				return false
			}
			r.step.at, r.step.failed = 0, true
		}
		name := r.step.order[r.step.at]
		r.step.at++
		switch {
		case !r.restrict(name):
			if name == r.first {
				r.Journal.Fallback(name, "not_applicable")
			}
		case !r.step.failed && r.exhausted(name):
			r.Journal.Fallback(name, "failed")
			r.step.left = true
		default:
			r.step.policy, r.picked[0] = name, nil
			return true
		}
	}
}

// order returns the coordination policies in the order of this request.
func (r *Route) order() []string {
	order := r.sc.Order()
	if r.first == "" || order[0] == r.first {
		return order
	}
	return append([]string{r.first}, slices.DeleteFunc(slices.Clone(order), func(n string) bool { return n == r.first })...)
}

// nextPicked moves on to the next destination of the picker: with the prefill engines that the
// picker named, then alone. Destinations on which an attempt has failed are the last choice.
func (r *Route) nextPicked() bool {
	if r.step.policy != "" && !r.step.alone {
		r.placeAlone(r.local[0])
		return true
	}
	for ; ; r.step.at++ {
		if r.step.at == len(r.destinations) {
			if r.step.failed {
				return false
			}
			r.step.at, r.step.failed = 0, true
		}
		if i := r.destinations[r.step.at]; r.failedOn(i) == r.step.failed {
			r.step.at++
			r.step.policy = CoordinatedByPicker
			r.placeOn(i)
			return true
		}
	}
}

// placeOn limits the placement to a destination with the named prefill engines, if one of them can
// take the request.
func (r *Route) placeOn(i *engine.Instance) {
	r.local[0], r.step.alone = i, false
	if !slices.ContainsFunc(r.named, func(p *engine.Instance) bool { return isPeer(i, p, abi.RolePrefill) && !r.failedOn(p) }) {
		r.placeAlone(i)
		return
	}
	r.restrictTo(coordinator.Within{Prefill: r.named, Decode: r.local[:], Whole: r.local[:]}, 0, true)
}

// placeAlone limits the placement to a destination alone. If the engine cannot serve alone, the
// place policy chooses prefill.
func (r *Route) placeAlone(i *engine.Instance) {
	r.step.alone = true
	if len(r.named) > 0 {
		r.Journal.Fallback("picker_prefill", "no_target")
	}
	if servesWhole(i) || !r.Body.API.Generates() {
		r.restrictTo(coordinator.Within{Whole: r.local[:]}, i.Role, false)
	} else {
		r.restrictTo(coordinator.Within{Decode: r.local[:], Whole: r.local[:]}, 0, true)
	}
}

// decodeKnownFirst reports whether the decode engine must be known before the prefill leg
// is sent: the decode leg may begin before prefill has answered.
func (r *Route) decodeKnownFirst() bool {
	local := r.local[0]
	_, ordered := connector.Of(local).(connector.Ordered)
	return local.Flow == abi.FlowConcurrent || ordered && r.ScheduleStyle != "context_first"
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
func (r *Route) usedPolicy() {
	name := r.step.policy
	if name == "" && r.profile != "" {
		name = "profile_" + r.profile
	}
	if name != "" {
		r.policy = name
		r.Journal.Coordinated(name)
	}
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
	r.Journal.Fallback(r.policy, "failed")
}

// DefersDecode reports whether the picker chooses the decode engine after prefill has answered.
func (r *Route) DefersDecode() bool {
	return r.policy == config.CoordinateDecodePicked && !r.decodeKnownFirst()
}

// WantsPick reports whether the picker is to choose the decode engine before the question that
// Restrict has limited, because the legs begin at the same time.
func (r *Route) WantsPick() bool {
	return r.step.policy == config.CoordinateDecodePicked && r.decodeKnownFirst()
}

// AsksForDecode prepares the request to the picker for the decode engine alone: the picker sees the
// local engine as that of prefill, and, with sidecar.picker_subset, only engines that may decode.
func (r *Route) AsksForDecode(c *PickerClient, q *extproc.Request) {
	q.Header = append(slices.Clip(q.Header), upstream.Field{Name: extproc.HeaderPrefill, Value: endpointOf(r.local[0])})
	if c.cfg.PickerSubset {
		q.Subset = []string{}
		for _, i := range c.registry.Snapshot().Instances {
			if i.State() == engine.Ready && isPeer(r.local[0], i, abi.RoleDecode) && !r.failedOn(i) {
				q.Subset = append(q.Subset, endpointOf(i))
			}
		}
	}
}

// FollowDecode limits decode to the first destination of the picker that can take the leg: a known
// engine that is ready and has not failed in this exchange. If there is none, it returns the reason.
func (r *Route) FollowDecode(c *PickerClient, d *extproc.Decision) (reason string) {
	snapshot := c.registry.Snapshot()
	reason = PickNoDestination
	for _, address := range d.Destinations {
		i := c.addresses.find(snapshot, withoutScheme(address))
		switch {
		case i == nil || !isPeer(r.local[0], i, abi.RoleDecode):
			reason = PickNotAllowed
		case i.State() != engine.Ready:
			reason = PickNotReady
		case r.failedOn(i):
			reason = PickHasFailed
		default:
			r.picked[0] = i
			r.Ask.Within.Decode = r.picked[:]
			return ""
		}
	}
	return reason
}

// PickedDecode reports whether the picker has chosen that decode engine.
func (r *Route) PickedDecode(i *engine.Instance) bool { return r.picked[0] == i }

// DropPick counts that the picker has chosen no decode engine on which the request could be placed,
// and allows every decode engine again.
func (r *Route) DropPick(reason string) {
	r.picked[0], r.Ask.Within.Decode = nil, nil
	r.Journal.Fallback(config.CoordinateDecodePicked, reason)
}
