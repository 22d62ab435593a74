// Package budget counts the failures of a plugin: those that exceed what is
// borne within a window of time park it until it is loaded again.
package budget

import (
	"sync"
	"sync/atomic"
	"time"
)

// Budget is how many failures one version of a plugin may still have. It is
// safe for concurrent use; asking whether it is parked costs one load.
type Budget struct {
	most   int
	window time.Duration
	parked atomic.Bool

	mu       sync.Mutex
	first    time.Time       // of the first failure; guarded by mu
	failures []time.Duration // since then, a ring of the last most ones at most; guarded by mu
	next     int             // where the oldest one stands once the ring is full; guarded by mu
}

// New returns a budget that bears most failures within any window of that
// length; the next one parks.
func New(most int, window time.Duration) *Budget {
	return &Budget{most: most, window: window}
}

// Parked reports whether the budget was exceeded once. It stays so.
func (b *Budget) Parked() bool { return b.parked.Load() }

// Fail counts a failure at that time and reports whether this one parked the
// plugin.
func (b *Budget) Fail(now time.Time) (parked bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.parked.Load() {
		return false
	}
	if b.first.IsZero() {
		b.first = now
	}
	at := now.Sub(b.first)
	if len(b.failures) < b.most {
		b.failures = append(b.failures, at)
		return false
	}
	if b.most == 0 || at-b.failures[b.next] < b.window {
		b.failures = nil
		b.parked.Store(true)
		return true
	}
	b.failures[b.next] = at
	b.next = (b.next + 1) % b.most
	return false
}
