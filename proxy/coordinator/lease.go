package coordinator

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Lease is what a placement holds of its targets: load on both, the disagg id,
// and blocks that are expected to come to be there. Its methods may be called any
// number of times, by any goroutine: each hold is dropped once.
type Lease struct {
	local *Local
	id    uint64

	mu       sync.Mutex
	prompt   load.Hold     // of the target that computes the prompt; guarded by mu
	computer *load.Counter // the counter of prompt; nil when no prompt is computed
	since    time.Time
	decode   load.Hold // guarded by mu
	expected [2]job    // at the target that computes the prompt, and at decode; guarded by mu
	computed bool      // guarded by mu
	answered bool      // guarded by mu
	released bool      // guarded by mu
}

// computing takes over the hold of the target that computes the prompt.
func (l *Lease) computing(c *load.Counter, h load.Hold, now time.Time) {
	l.computer, l.prompt, l.since = c, h, now
}

// PrefillDone drops prefill's load: the engine has computed the prompt.
func (l *Lease) PrefillDone() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done(true)
}

// Answered says that the leg that answers the client has the prompt's KV. first
// says that it has only begun: the time until now was the prompt's.
func (l *Lease) Answered(first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done(first)
	l.answered = true
}

// done drops the load of the prompt, and notes how long it took if it took until
// now; l.mu is held.
func (l *Lease) done(now bool) {
	if l.computed || l.released {
		return
	}
	l.computed = true
	if l.computer != nil && now {
		l.computer.Prefill.Measure(l.prompt.Work(), time.Since(l.since))
	}
	l.prompt.Drop()
}

// Release drops whatever the lease still holds. What was expected of legs that
// did not come to it is no longer.
func (l *Lease) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return
	}
	l.released = true
	l.prompt.Drop()
	l.decode.Drop()
	for i, well := range [...]bool{l.computed, l.answered} {
		how := failed
		if well {
			how = came
		}
		l.local.background.end(l.expected[i], how)
		l.expected[i] = job{}
	}
	if l.id != 0 {
		l.local.live.Drop(l.id)
	}
	l.local.open.Add(-1)
}
