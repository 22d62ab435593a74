// Package budget has the limits of a plugin: Budget counts failures, and the time
// of calls that timed out, and parks the plugin when there are too many; Host
// counts what the host holds for the plugin.
package budget

import (
	"sync"
	"sync/atomic"
	"time"
)

// borneTimeouts is how many timeouts are borne whatever their time: a machine that
// stalls must not park a plugin.
const borneTimeouts = 2

// Budget is how many failures one version of a plugin may still have, and how
// much time it may still use in calls that time out. It is safe for concurrent
// use; asking whether it is parked costs one load.
type Budget struct {
	most   int
	window time.Duration
	share  float64
	parked atomic.Bool

	mu       sync.Mutex
	first    time.Time       // of the first failure; guarded by mu
	failures []time.Duration // since then, a ring of the last most ones at most; guarded by mu
	next     int             // where the oldest one stands once the ring is full; guarded by mu

	// The time of calls that timed out, less what has been forgotten since: share
	// of the time that passes.
	burned   time.Duration // guarded by mu
	burnedAt time.Time     // guarded by mu
	timeouts int           // since burned was 0; guarded by mu
}

// New returns a budget that bears most failures within any window of that
// length; the next one parks. share is that part of one processor's time which
// calls that time out may use: the third timeout or a later one parks if they
// have used more than share of a window beyond it. 0: their time does not count.
func New(most int, window time.Duration, share float64) *Budget {
	return &Budget{most: most, window: window, share: share}
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

// Timeout counts a call that ended at that time by its time limit, after took. It
// is Fail for such calls.
func (b *Budget) Timeout(now time.Time, took time.Duration) (parked bool) {
	return b.Fail(now) || b.burn(now, took)
}

// burn counts the time of a call that timed out and reports whether this one
// parked the plugin.
func (b *Budget) burn(now time.Time, took time.Duration) (parked bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.share <= 0 || b.parked.Load() {
		return false
	}
	if b.timeouts > 0 {
		b.burned -= time.Duration(b.share * float64(max(0, now.Sub(b.burnedAt))))
	}
	if b.burned <= 0 {
		b.burned, b.timeouts = 0, 0
	}
	b.burned, b.burnedAt = b.burned+took, now
	b.timeouts++
	if b.timeouts <= borneTimeouts || float64(b.burned) <= b.share*float64(b.window) {
		return false
	}
	b.failures = nil
	b.parked.Store(true)
	return true
}
