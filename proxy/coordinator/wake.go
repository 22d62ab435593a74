package coordinator

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Waker wakes engines that sleep. Safe for concurrent use.
type Waker interface {
	// May reports whether a sleeping engine is being woken, or may be woken now.
	May(i *engine.Instance) bool
	// Wake begins to wake a sleeping engine if May allows it, and returns at once.
	Wake(i *engine.Instance)
}

// SetWaker makes placements that find no target wake engines of the model. It is called before the
// first Place.
func (l *Local) SetWaker(w Waker) { l.waker = w }

// wake wakes the engines that a request lacks: one for one leg, or a prefill and a decode engine that
// can be paired. The missing phase shows which of the two the plan policy asked for. If none of these
// engines can be woken, wake tries the other form.
func (l *Local) wake(p *engine.Pool, a *PlacementRequest, missing abi.Phase) {
	if l.waker == nil || len(p.Asleep) == 0 || a.Only.Decode.Instance != nil || a.Prefill.Instance != nil {
		return
	}
	w := wakes{waker: l.waker, pool: p, request: a}
	if missing == abi.PhaseNone {
		_ = w.one() || w.pair()
	} else {
		_ = w.pair() || w.one()
	}
}

// wakes chooses the engines to wake for one request.
type wakes struct {
	waker   Waker
	pool    *engine.Pool
	request *PlacementRequest
}

// The distances of a target from taking a request.
const (
	awake = iota
	waking
	wakeable
	unreachable
)

func (w *wakes) distance(r *engine.Row, sleeps bool) int {
	switch {
	case !sleeps:
		return awake
	case !w.waker.May(r.Instance):
		return unreachable
	case r.Waking():
		return waking
	}
	return wakeable
}

// nearest returns the nearest target that matches. found.Instance is nil if none can be reached.
func (w *wakes) nearest(match func(r *engine.Row) bool) (found engine.Target, distance int) {
	distance = unreachable
	for n, rows := range [...][]engine.Row{w.pool.Ready, w.pool.Asleep} {
		for i := range rows {
			if r := &rows[i]; match(r) {
				if d := w.distance(r, n == 1); d < distance {
					found, distance = r.Target, d
				}
			}
		}
	}
	return found, distance
}

// one wakes an engine that takes the whole request. It returns false if none is needed or reachable.
func (w *wakes) one() bool {
	a := w.request
	target, distance := w.nearest(func(r *engine.Row) bool {
		return (r.Facts.Roles == abi.RoleBoth || r.Facts.Roles&a.Aggregate != 0) && among(a.Within.Whole, r.Instance)
	})
	if distance == wakeable {
		w.waker.Wake(target.Instance)
	}
	return distance == waking || distance == wakeable
}

// pair wakes the engines of the nearest pair. It returns false if none is needed or reachable.
func (w *wakes) pair() bool {
	var best [2]engine.Target
	least := 2 * unreachable
	seen := make(map[uint32]bool)
	for _, rows := range [...][]engine.Row{w.pool.Ready, w.pool.Asleep} {
		for i := range rows {
			group := rows[i].Facts.Group
			if group == 0 || seen[group] {
				continue
			}
			seen[group] = true
			for _, first := range [...]abi.Role{abi.RolePrefill, abi.RoleDecode} { // an engine of both roles may take either phase
				one, far := w.partner(group, first, nil)
				other, further := w.partner(group, abi.RoleBoth&^first, one.Instance)
				if far < unreachable && further < unreachable && far+further < least {
					best, least = [2]engine.Target{one, other}, far+further
				}
			}
		}
	}
	if least == 2*unreachable || least == 2*awake {
		return false
	}
	for _, t := range best {
		if t.Asleep(t.Rank) {
			w.waker.Wake(t.Instance)
		}
	}
	return true
}

// partner returns the nearest target of a group for a phase on another instance than not.
func (w *wakes) partner(group uint32, phase abi.Role, not *engine.Instance) (engine.Target, int) {
	within := w.request.Within.Prefill
	if phase == abi.RoleDecode {
		within = w.request.Within.Decode
	}
	return w.nearest(func(r *engine.Row) bool {
		return r.Facts.Group == group && r.Facts.Roles&phase != 0 && r.Instance != not && among(within, r.Instance)
	})
}
