// Package budget holds the limits of a plugin. Budget counts failures, and the
// time of calls that timed out, and parks the plugin when a limit is exceeded.
// Host limits the resources that the host spends on the plugin.
//
// The decisions behind this package are in docs/design/plugins.md.
package budget

import (
	"sync"
	"sync/atomic"
	"time"
)

// allowedTimeouts is the number of timeouts that never park a plugin, however
// long they took: a machine that stalls must not park a plugin.
const allowedTimeouts = 2

// Budget counts the failures of one version of a plugin and the time of its
// calls that timed out. It is safe for concurrent use; Parked costs one atomic
// load.
type Budget struct {
	most   int
	window time.Duration
	share  float64
	parked atomic.Bool

	mu       sync.Mutex
	first    time.Time       // of the first failure; guarded by mu
	failures []time.Duration // times since first, a ring of at most the last most failures; guarded by mu
	next     int             // index of the oldest failure once the ring is full; guarded by mu

	// The sum of the times of calls that timed out. It decreases by share for each unit of elapsed
	// time.
	burned   time.Duration // guarded by mu
	burnedAt time.Time     // guarded by mu
	timeouts int           // number since burned was 0; guarded by mu
}

// New returns a budget that allows most failures within any window of that length; the
// next failure parks. share is the fraction of one processor's time that timed-out calls
// may use. The third timeout or a later one parks if the timed-out calls have exceeded
// this fraction by more than share times the window. With share 0 the time of these calls
// does not count.
func New(most int, window time.Duration, share float64) *Budget {
	return &Budget{most: most, window: window, share: share}
}

// Parked reports whether the budget was ever exceeded.
func (b *Budget) Parked() bool { return b.parked.Load() }

// Fail counts a failure at that time and reports whether this failure parked the plugin.
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

// Timeout counts a call that ended by its time limit at time now, after took. Use it
// instead of Fail for such calls.
func (b *Budget) Timeout(now time.Time, took time.Duration) (parked bool) {
	return b.Fail(now) || b.burn(now, took)
}

// burn counts the time of a call that timed out and reports whether this call parked the plugin.
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
	if b.timeouts <= allowedTimeouts || float64(b.burned) <= b.share*float64(b.window) {
		return false
	}
	b.failures = nil
	b.parked.Store(true)
	return true
}
