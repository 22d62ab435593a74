package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
)

// within returns what is left of a limit in this attempt, and whether the limit of the plan
// policy is the shorter one.
func (a *attempt) within(limit time.Duration) (time.Duration, bool) {
	if a.deadline.IsZero() {
		return limit, false
	}
	if left := max(time.Until(a.deadline), time.Millisecond); left < limit {
		return left, true
	}
	return limit, false
}

// kvLimit is how long decode may take, from the moment when prefill has answered, until it
// has the KV of the prompt and begins its stream. A whole answer begins when all of it is
// there, which tells nothing of the KV: only timeouts.first_byte limits it.
func (a *attempt) kvLimit() time.Duration {
	t := &a.env.Config.Timeouts
	limit := t.Transfer
	if a.fresh {
		limit += t.Handshake
	}
	if d, ok := a.conn.(connector.Deferrer); ok && d.Defers() {
		limit += t.DeferredWrite
	}
	return time.Duration(limit)
}

// awaitKV ends a concurrent decode, by cancel, if it has not got the KV in time. Prefill has
// answered, and its goroutine calls. The timer, which may be nil, must be stopped.
func (a *attempt) awaitKV(cancel context.CancelCauseFunc) *time.Timer {
	if !a.env.Request.Stream {
		return nil
	}
	return time.AfterFunc(a.kvLimit(), func() {
		if a.both.winner.CompareAndSwap(0, kvLate) {
			cancel(errKVLate)
		}
	})
}

// readBy returns the time by which decode must have its leg to find the blocks of prefill;
// zero: any time. Half of prefill's lease is decode's, to connect to prefill and to renew the
// lease.
func (a *attempt) readBy() time.Time {
	if lease := a.prefill.handoff.Lease; lease > 0 && !a.prefill.handed.IsZero() {
		return a.prefill.handed.Add(lease / 2)
	}
	return time.Time{}
}

// leaseOver reports whether it is too late to send decode to the blocks of prefill.
func (a *attempt) leaseOver() bool {
	by := a.readBy()
	return !by.IsZero() && !time.Now().Before(by)
}
