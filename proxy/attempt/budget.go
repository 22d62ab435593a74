package attempt

import (
	"sync/atomic"
	"time"
)

// retryWindow is the length of the window in which Budget counts requests and retries.
const retryWindow = 10 * time.Second

// Budget limits the retries of the process to a share of the recent requests plus a minimum, so
// that retries do not overload a fleet that is already failing. The counts of the previous
// window count half, older counts not at all. The zero value is ready. Budget is safe for
// concurrent use.
type Budget struct {
	step      atomic.Int64 // number of the current window since the epoch
	exchanges atomic.Int64
	retries   atomic.Int64
}

// Request counts one request.
func (b *Budget) Request(now time.Time) {
	if step := now.UnixNano() / int64(retryWindow); step != b.step.Load() {
		b.roll(step)
	}
	b.exchanges.Add(1)
}

// Allow takes one retry from the budget. It returns false if the budget is used up.
func (b *Budget) Allow(now time.Time, share float64, floor int) bool {
	b.roll(now.UnixNano() / int64(retryWindow))
	limit := int64(share*float64(b.exchanges.Load())) + int64(floor)
	if b.retries.Add(1) > limit {
		b.retries.Add(-1)
		return false
	}
	return true
}

// roll begins the window step, if it has not begun.
func (b *Budget) roll(step int64) {
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
