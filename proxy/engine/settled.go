package engine

import (
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// FirstList is how long a process waits for the first list of a source of engines: such a list
// may never come.
const FirstList = 5 * time.Second

// Expect notes that a list of engines will arrive. The registry is not settled, and its snapshots
// await engines of every model, until the caller calls arrived, or until limit has passed. arrived
// may be called more than once.
func (r *Registry) Expect(limit time.Duration) (arrived func()) {
	r.expect(1)
	once := sync.OnceFunc(func() { r.expect(-1) })
	late := time.AfterFunc(limit, once)
	return func() {
		late.Stop()
		once()
	}
}

func (r *Registry) expect(lists int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expected += lists
	r.publish()
}

// Settled reports whether the first probe of each instance has ended since Run began, and every
// expected list has arrived. health.timeout bounds the first probe for this purpose, so that an
// engine which does not answer does not delay the start. Once true, the result stays true: engines
// that come later do not make a process unready that serves others.
func (r *Registry) Settled() bool { return r.settled.Load() }

// noteSettled notes in settled that the registry has become so; r.mu is held.
func (r *Registry) noteSettled() {
	if r.runs && !r.settled.Load() && !r.Snapshot().Awaits("") {
		r.settled.Store(true)
	}
}

// begin notes that Run has begun.
func (r *Registry) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runs = true
	r.noteSettled()
}

// Awaits reports whether an engine may serve the model soon that was never ready: the first probe of
// an instance that serves it, or whose models are not known, has not ended, or an expected list of
// engines has not arrived. An empty model stands for every model.
//
// The result belongs to the snapshot: a placement that finds no engine although a snapshot from
// before the placement awaits none would find none again.
func (s *Snapshot) Awaits(model string) bool {
	return s.expects || slices.ContainsFunc(s.unasked, func(i *Instance) bool {
		if i.Role == abi.RoleEncode && model != "" || i.State() == Draining {
			return false
		}
		models := i.Models()
		return model == "" || models == nil || slices.Contains(models, model)
	})
}

// looked notes that the first probe of i has ended, or that its time is over.
func (r *Registry) looked(i *Instance) {
	if i.asked.Load() {
		return
	}
	r.change(func() bool {
		i.asked.Store(true)
		return true
	})
}
