package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// watch readies a leg for the goroutines that may give it up.
func (a *attempt) watch(l *leg) {
	h := &a.prefill.handoff
	first := a.p.Flow == abi.FlowPrefillFirst && l.Phase == abi.Decode
	l.needed = a
	l.watched = watched{
		services: a.env.Services, config: a.env.Config, route: a.env.Route, prefill: a.p.Prefill,
		compute: a.env.Ask.Request.PromptTokens - max(0, a.p.Matched),
	}
	if a.both.runs() {
		l.watched.winner = &a.both.winner
	}
	if first {
		// A whole answer tells nothing of the KV before all of it is there.
		l.watched.fetches = a.env.Request.Stream && h.Pinned
		l.watched.handed, l.watched.readBy, l.watched.lease = a.prefill.handed, a.readBy(), h.Lease
	}
}

// Evict implements upstream.CallControl. An engine does not respond: the leg's own, or the one
// whose KV the leg needs. The leg is given up only to be tried elsewhere. If no other engine
// is there, or no try is left, or the budget has no retry, it waits until the engine responds
// again, unless that is too late for prefill's blocks (expired). The retry is taken from the
// budget here.
func (l *leg) Evict(unresponsive any) bool {
	w, retry := &l.watched, &l.watched.config.Retry
	from, phase := l.target, l.Phase
	switch {
	case unresponsive == from.Instance:
	case unresponsive == w.prefill.Instance && w.fetches:
		from, phase = w.prefill, abi.Prefill
	default:
		return false
	}
	if w.winner != nil && w.winner.Load() == decodeTook { // nobody waits for prefill's answer
		return true
	}
	if w.route.Fixes(from.Instance) {
		return l.expired(unresponsive) // the caller says where it runs
	}
	if l.try >= retry.Attempts || w.services.Registry.Snapshot().Peer(from, phase, nil).IsZero() {
		return l.expired(unresponsive)
	}
	l.reserved = w.services.Budget.Allow(time.Now(), retry.Budget, retry.MinBudget)
	l.starved = l.reserved && from != l.target
	return l.reserved || l.expired(unresponsive)
}

// expired reports whether prefill's blocks may be gone when the unresponsive engine, the leg's
// own, responds again and reads them: it has renewed their lease for the last time. No answer
// is better than one from the memory of another request.
//
// A vLLM decode renews the lease every sixth of it, each time by two thirds from then. At
// least half of the lease is left when decode stops, and half of that is for the probes to
// notice.
// Source: nixl/base_worker.py _lease_extension, nixl/base_scheduler.py.
func (l *leg) expired(unresponsive any) bool {
	w, now := &l.watched, time.Now()
	if w.readBy.IsZero() || unresponsive != l.target.Instance {
		return false
	}
	if l.silence.IsZero() {
		l.silence = now
	}
	quarter := w.lease / 4
	return now.Sub(w.handed) >= 3*quarter && now.Sub(l.silence) >= quarter
}

// waitsForLateAnswer reports whether the proxy keeps the connection of a prefill that is given
// up: its answer lets its blocks be freed, or prefill is going to write what a decode waits
// for, which holds its own blocks until then.
func waitsForLateAnswer(c connector.Connector) bool {
	d, ok := c.(connector.Deferrer)
	return c.Reclaims() || ok && d.Defers()
}

var _ upstream.CallControl = (*leg)(nil)
