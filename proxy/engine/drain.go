package engine

import (
	"fmt"
	"slices"
	"time"
)

// movesAtOnce is how many streams of an instance move to other engines every evictEvery. The other
// engines compute their prompts again.
const movesAtOnce = 4

// Moving is the argument of upstream.Client.EvictIdle for an instance that responds, but whose open
// streams are to go on at other engines. Control uses it only during the call.
type Moving struct {
	*Instance
	Left int // how many more streams may move now; a call that agrees takes one
}

// Drain makes the instance of that name get no new requests until Undrain. The instance does not
// leave, and its probes go on. move: its open streams go on at other engines after
// Options.MoveAfter, counted from the first Drain that says so; otherwise they stay, also after an
// earlier Drain. The error is ErrUnknown if there is no such instance or it leaves.
func (r *Registry) Drain(name string, move bool) error { return r.setDrained(name, true, move) }

// Undrain undoes Drain. Streams that have not moved yet stay. The error is as for Drain.
func (r *Registry) Undrain(name string) error { return r.setDrained(name, false, false) }

func (r *Registry) setDrained(name string, drained, move bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.named(name)
	if i == nil {
		return fmt.Errorf("drain engine %q: %w", name, ErrUnknown)
	}
	if i.drained.Swap(drained) != drained {
		i.since.Store(time.Now().UnixMilli())
		what := "engine is drained"
		if !drained {
			what = "engine is no longer drained"
		}
		r.log.Info(what, "engine", name, "move", move)
	}
	if move {
		r.moveLater(i)
	} else {
		i.moveAt.Store(0)
	}
	r.publish()
	return nil
}

// moveLater makes the streams of i move after Options.MoveAfter, unless their time is set already.
func (r *Registry) moveLater(i *Instance) {
	if r.o.MoveAfter != nil && i.moveAt.CompareAndSwap(0, time.Now().Add(r.o.MoveAfter()).UnixMilli()) {
		signal(i.evictNow)
	}
}

// moves reports whether the open streams of i are to go on at other engines now. An instance that
// leaves only because its configuration has changed, or that has been added again, has a successor
// at the same address: its streams stay.
func (r *Registry) moves(i *Instance) bool {
	at := i.moveAt.Load()
	return at != 0 && time.Now().UnixMilli() >= at &&
		!slices.ContainsFunc(r.Snapshot().Instances, func(o *Instance) bool {
			return o != i && o.Spec.URL == i.Spec.URL && o.State() != Draining
		})
}

// leaving reports whether the instance has begun to leave the registry.
func (i *Instance) leaving() bool { return i.staying.Err() != nil }
