package proxy

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
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

// firstError prefers the failure of a leg over «no other target is left».
func firstError(ctx context.Context, leg, place error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if leg != nil {
		return leg
	}
	return place
}

// mayRetry reports whether a failed leg may be tried again elsewhere, takes it
// from the budget and counts it.
func (x *exchange) mayRetry(err error, hook hookAnswer) bool {
	var le *legError
	if x.client.Begun() || x.ctx.Err() != nil || !errors.As(err, &le) || downstream.OwnFault(err) {
		return false
	}
	if le.permanent && hook.decision == abi.LegPass || hook.decision == abi.LegGiveUp {
		return false
	}
	if x.route.CallerCoordinates() && maybeSent(err) { // the blocks it names may have been read, and be free
		return false
	}
	if x.denied == le || x.tries[le.phase] >= x.cfg.Retry.Attempts {
		return false
	}
	if !le.reserved && !x.s.budget.allow(time.Now(), x.cfg.Retry.Budget, x.cfg.Retry.MinBudget) {
		x.journal.Fallback("retry", "budget")
		x.denied = le
		return false
	}
	x.journal.Retry(le.phase, le.target.Name(), le.reason)
	return true
}

// exclude keeps the target of a failed leg from the next placement of this
// exchange, as long as there are others, unless the leg hook wants the same
// again. Where the pair failed, either side may be at fault.
func (x *exchange) exclude(err error, hook hookAnswer) {
	var le *legError
	if !errors.As(err, &le) {
		return
	}
	if x.ask.Same = hook.same; hook.decision == abi.LegRetry {
		x.ask.Excluded = slices.DeleteFunc(x.ask.Excluded, func(t engine.Target) bool {
			return t == hook.same.Prefill || t == hook.same.Decode
		})
		return
	}
	failed := le.target
	if !le.unresponsive.IsZero() { // it may be the engine whose KV the target needed
		failed = le.unresponsive
	}
	x.ask.Excluded = append(x.ask.Excluded, failed)
	if le.pair != nil {
		x.ask.Excluded = append(x.ask.Excluded, le.pair.Prefill)
	}
}
