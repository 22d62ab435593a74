package proxy

import (
	"sync/atomic"
	"time"
)

// retryWindow is the span over which retries are compared with exchanges.
const retryWindow = 10 * time.Second

// retryBudget bounds the retries of the whole process to a share of recent
// exchanges plus a floor, so that a failing fleet is not also hit by its own
// retries. The window moves in whole steps: one step old counts count half.
// Safe for concurrent use.
type retryBudget struct {
	step      atomic.Int64 // number of the current window since the epoch
	exchanges atomic.Int64
	retries   atomic.Int64
}

// exchange counts one exchange towards the budget.
func (b *retryBudget) exchange(now time.Time) {
	b.roll(now)
	b.exchanges.Add(1)
}

// allow takes one retry from the budget; false means that it is used up.
func (b *retryBudget) allow(now time.Time, share float64, floor int) bool {
	b.roll(now)
	limit := int64(share*float64(b.exchanges.Load())) + int64(floor)
	if b.retries.Add(1) > limit {
		b.retries.Add(-1)
		return false
	}
	return true
}

func (b *retryBudget) roll(now time.Time) {
	step := now.UnixNano() / int64(retryWindow)
	old := b.step.Load()
	if step == old || !b.step.CompareAndSwap(old, step) {
		return
	}
	keep := int64(2)
	if step-old > 1 { // nothing happened for a whole window
		keep = 0
	}
	halve(&b.exchanges, keep)
	halve(&b.retries, keep)
}

func halve(c *atomic.Int64, keep int64) {
	v := c.Load()
	if keep == 0 {
		c.Add(-v)
		return
	}
	c.Add(-v + v/keep)
}
