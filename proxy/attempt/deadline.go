package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
)

// within returns the shorter of limit and the time that is left until the plan policy's
// deadline, at least 1 ms, and whether that deadline is the shorter one.
func (a *attempt) within(limit time.Duration) (time.Duration, bool) {
	if a.deadline.IsZero() {
		return limit, false
	}
	if left := max(time.Until(a.deadline), time.Millisecond); left < limit {
		return left, true
	}
	return limit, false
}

// kvLimit limits the time from prefill's answer until decode has the KV of the prompt and begins
// its stream. It does not apply to an answer that is no stream: such an answer begins when all
// of it is ready, so its first byte does not show when the KV arrived. Only
// timeouts.first_byte limits it. The KV must come before the end of a lease that decode does
// not renew, because decode would read other data afterwards.
func (a *attempt) kvLimit() time.Duration {
	t := &a.env.Config.Timeouts
	limit := t.Transfer
	if a.fresh {
		limit += t.Handshake
	}
	if d, ok := a.conn.(connector.Deferrer); ok && d.Defers() {
		limit += t.DeferredWrite
	}
	if h := &a.prefill.handoff; h.Lease > 0 && !h.Renews {
		return min(time.Duration(limit), max(h.Lease-time.Since(a.prefill.handed), time.Millisecond))
	}
	return time.Duration(limit)
}

// awaitKV starts a timer that cancels a concurrent decode leg if decode does not get the KV in
// time. The goroutine of prefill calls awaitKV after prefill has answered. The caller must stop
// the timer, which may be nil.
func (a *attempt) awaitKV(cancel context.CancelCauseFunc) *time.Timer {
	if !a.env.Request.Stream {
		return nil
	}
	return time.AfterFunc(a.kvLimit(), func() {
		if !a.both.opened.Load() && a.both.winner.CompareAndSwap(0, kvLate) {
			cancel(errKVLate)
		}
	})
}

// readBy returns the time by which the proxy must send the decode leg, or decode may not find
// the blocks of prefill. A zero time means that there is no such limit. The second half of
// prefill's lease is left for decode, which must connect to prefill and renew the lease.
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
