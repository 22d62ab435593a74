package proxy

import (
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Evict implements upstream.CallControl: an engine, the leg's own or the one whose KV it
// needs, has fallen silent. The leg is left only to be tried elsewhere: where there
// is nobody else, or no try is left, or the budget has no retry, it waits for the
// engine to come back, unless that is too late for prefill's blocks (expired). The
// retry is taken from the budget here. Of the exchange it reads what no leg changes.
func (l *leg) Evict(silent any) bool {
	a := l.a
	x := a.x
	from, phase := l.target, l.Phase
	switch {
	case silent == from.Instance:
	case silent == a.p.Prefill.Instance && a.fetches(phase):
		from, phase = a.p.Prefill, abi.Prefill
	default:
		return false
	}
	if a.verdict.Load() == decodeTook { // nobody waits for prefill's answer
		return true
	}
	if x.route.Fixes(from.Instance) {
		return l.expired(silent) // the caller says where it runs
	}
	if l.try >= x.cfg.Retry.Attempts || x.s.deps.Registry.Snapshot().Peer(from, phase, nil).IsZero() {
		return l.expired(silent)
	}
	l.grant = x.s.budget.allow(time.Now(), x.cfg.Retry.Budget, x.cfg.Retry.MinBudget)
	l.starved = l.grant && from != l.target
	return l.grant || l.expired(silent)
}

// expired reports whether prefill's blocks may be gone when the silent engine, the
// leg's own, is back and reads them: it has renewed their lease for the last time.
// No answer is better than one from another request's memory.
//
// A vLLM decode renews it every sixth, each time by two thirds from then: half of it
// at least is left when decode stops, and half of that is for the probes to notice.
// Source: nixl/base_worker.py _lease_extension, nixl/base_scheduler.py.
func (l *leg) expired(silent any) bool {
	a, now := l.a, time.Now()
	if a.readBy.IsZero() || silent != l.target.Instance {
		return false
	}
	if l.mute.IsZero() {
		l.mute = now
	}
	quarter := a.handoff.Lease / 4
	return now.Sub(a.handed) >= 3*quarter && now.Sub(l.mute) >= quarter
}

// fetches reports whether the leg of a phase may be waiting for prefill's KV: a
// stream that has not begun. A whole answer says nothing of that before it is there.
func (a *attempt) fetches(phase abi.Phase) bool {
	return phase == abi.Decode && a.p.Flow == abi.FlowPrefillFirst && a.x.req.Stream && a.handoff.Pinned
}

// silentLeg is the leg that was left because its engine has fallen silent; nil: err
// tells of none.
func silentLeg(err error) *legError {
	var le *legError
	if errors.As(err, &le) && !le.silent.IsZero() {
		return le
	}
	return nil
}

// hearsOut reports whether a prefill that is left is not hung up on: its answer lets
// its blocks be freed, or it is to write what a decode waits for, which holds its own
// blocks until then.
func hearsOut(c connector.Connector) bool {
	d, ok := c.(connector.Deferrer)
	return c.Reclaims() || ok && d.Defers()
}

var _ upstream.CallControl = (*leg)(nil)
