package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// watch sets the fields of a leg that Evict, Lingers and Wanted read.
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
		// An answer that is no stream shows nothing of the KV before it is complete.
		l.watched.fetches = a.env.Request.Stream && h.Pinned
		l.watched.handed, l.watched.readBy, l.watched.lease = a.prefill.handed, a.readBy(), h.Lease
	}
}

// Evict implements upstream.CallControl. An engine does not respond: the engine of the leg, or
// the engine whose KV the leg needs. Evict gives the leg up only if a retry on another engine
// is possible, and takes that retry from the budget. If there is no other engine, or the tries
// or the budget are used up, the leg waits until the engine responds again, unless that is too
// late for prefill's blocks (expired).
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
	if w.winner != nil && w.winner.Load() == decodeTook { // nothing waits for prefill's answer any more
		return true
	}
	if w.route.Fixes(from.Instance) {
		return l.expired(unresponsive) // the caller has chosen the engine
	}
	if l.try >= retry.Attempts || w.services.Registry.Snapshot().Peer(from, phase, nil).IsZero() {
		return l.expired(unresponsive)
	}
	l.reserved = w.services.Budget.Allow(time.Now(), retry.Budget, retry.MinBudget)
	l.starved = l.reserved && from != l.target
	return l.reserved || l.expired(unresponsive)
}

// expired reports whether prefill may have freed its blocks before the engine of the leg, which
// does not respond, reads them. An engine that does not respond does not renew the lease of the
// blocks. If decode read freed blocks, its answer would contain data of another request; an
// error is better.
//
// A vLLM decode renews the lease after each sixth of the lease, each time by two thirds from
// then on. So at least half of the lease is left when decode stops. Half of that time is for
// the probes to notice.
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

// waitsForLateAnswer reports whether the proxy keeps the connection of a prefill leg that it
// gives up. The late answer is useful if the proxy needs it to free the blocks of prefill, or
// if prefill still writes the KV: decode holds its own blocks until then.
func waitsForLateAnswer(c connector.Connector) bool {
	d, ok := c.(connector.Deferrer)
	return c.Reclaims() || ok && d.Defers()
}

var _ upstream.CallControl = (*leg)(nil)
