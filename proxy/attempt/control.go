package attempt

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// A leg decides while it runs whether it is still needed. The goroutines that probe engines and end
// calls ask the leg too, so these methods read only fields of the attempt that do not change while
// the leg runs.
var _ upstream.CallControl = (*leg)(nil)

// speedDoubt is the factor by which a prefill may be faster than the measured speed.
const speedDoubt = 2

// Wanted implements upstream.CallControl. It returns false for a prefill leg that has waited for
// a connection, if no decode engine can use the KV any more. The leg is then not sent.
func (l *leg) Wanted() bool { return l.Phase != abi.Prefill || l.attempt.decodeWaits() }

// decodeWaits reports whether a decode engine can use the KV that prefill computes. For
// concurrent legs it returns true: if decode fails, its leg ends the prefill leg.
func (a *attempt) decodeWaits() bool {
	now, t := time.Now(), a.p.Decode
	// The coordinator of a fleet places legs only on ready engines. If this process has no state of
	// the engine (Down), the first state has not arrived yet.
	if a.concurrent || takesKV(t, now, a.began.forced) || t.State() == engine.Down {
		return true
	}
	known := a.env.Registry.Snapshot()
	for tried := []engine.Target{t}; ; tried = append(tried, t) {
		if t = known.Peer(a.p.Decode, abi.Decode, tried); t.IsZero() || slices.Contains(tried, t) {
			return false
		}
		if takesKV(t, now, false) {
			return true
		}
	}
}

// takesKV reports whether a decode target can receive KV at the time now: the probes have not found
// the engine to be unreachable, and its circuit is not open. forced: the circuit does not count.
func takesKV(t engine.Target, now time.Time, forced bool) bool {
	s := t.State()
	return (s == engine.Ready || s == engine.Draining) && (forced || t.Breaker.Circuit(now) != circuit.Open)
}

// Useless implements upstream.CallControl. It returns true for a running prefill leg if no decode
// engine can use the KV, and the attempt's decode engine has ended or has an open circuit. Lingers
// then decides whether the proxy waits for the answer. A decode engine whose probes only timed out
// does not make a leg useless, because this host itself may have been cut off. The proxy would then
// close the connection, prefill would finish unseen, and its blocks would stay until their lease
// ends.
func (l *leg) Useless() bool {
	if l.Phase != abi.Prefill {
		return false
	}
	t := l.attempt.p.Decode
	return (t.Ended() || t.Breaker.Circuit(time.Now()) == circuit.Open) && !l.attempt.decodeWaits()
}

// Lingers implements upstream.CallControl. It reports whether the proxy waits for the answer
// of a prefill leg after the client has left, after the decode leg has failed, or if no
// decode engine can use the KV any more. The proxy waits only if prefill may be near its end, and
// not if decode has ended: the answer names blocks that no engine could free for a long time,
// whereas most prefills that are aborted leave none. Otherwise it closes the connection at once.
func (l *leg) Lingers() bool {
	a := l.attempt
	if l.Phase == abi.Prefill && a.p.Decode.Ended() && !a.decodeWaits() {
		return false
	}
	computes := a.env.Ask.Request.PromptTokens - max(0, a.p.Matched)
	return nearEnd(time.Since(l.Start), computes, l.target.Load[l.target.Rank].Prefill.PerToken())
}

// nearEnd reports whether a prefill of so many tokens that began so long ago may end
// within cleanup.PrefillLinger. Micros is the measured time per token in µs; 0 means that the
// time is not known. If prefill ends later, no answer comes within cleanup.PrefillLinger. The
// proxy then closes the connection, and the engine frees the blocks itself: an engine
// keeps the blocks only of a prefill that finishes. Other requests in the queue only
// delay the end of prefill, so their tokens do not count.
//
// Source: vLLM, v1/core/sched/scheduler.py finish_requests, and request_finished in
// distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py and
// mooncake/mooncake_connector.py: blocks are kept only of a request that has stopped
// or has come to its limit of tokens, never of one that was aborted.
func nearEnd(elapsed time.Duration, tokens int64, micros float32) bool {
	if micros <= 0 {
		return true
	}
	least := float64(tokens) * float64(micros) / speedDoubt * float64(time.Microsecond)
	return least <= float64(elapsed+cleanup.PrefillLinger)
}

// Evict implements upstream.CallControl. An engine does not respond: the engine of the leg, or
// the engine whose KV the leg needs. Evict gives the leg up only if a retry on another engine
// is possible, and takes that retry from the budget. If there is no other engine, or the tries
// or the budget are used up, the leg waits until the engine responds again, unless that is too
// late for prefill's blocks (expired). The leg of an open stream is given up only if another engine
// can continue the stream. For engine.Moving, the engine responds: see move.
func (l *leg) Evict(unresponsive any) bool {
	if m, ok := unresponsive.(*engine.Moving); ok {
		return l.move(m)
	}
	a, from, phase := l.attempt, l.target, l.Phase
	retry := &a.env.Config.Retry
	if phase == abi.Decode && a.env.Kept.opened() {
		l.reserved = unresponsive == from.Instance && a.env.Kept.movable() && !a.env.Registry.Snapshot().Peer(from, phase, nil).IsZero() &&
			(!a.env.Kept.Continued() || a.env.Budget.Allow(time.Now(), retry.Budget, retry.MinBudget))
		return l.reserved
	}
	switch {
	case unresponsive == from.Instance:
	case unresponsive == a.p.Prefill.Instance && l.fetches():
		from, phase = a.p.Prefill, abi.Prefill
	default:
		return false
	}
	if a.concurrent && a.both.winner.Load() == decodeTook { // nothing waits for prefill's answer any more
		return true
	}
	if a.env.Route.Fixes(from.Instance) {
		return l.expired(unresponsive) // the caller has chosen the engine
	}
	if l.try-a.env.before[phase] >= retry.Attempts || a.env.Registry.Snapshot().Peer(from, phase, nil).IsZero() {
		return l.expired(unresponsive)
	}
	l.reserved = a.env.Budget.Allow(time.Now(), retry.Budget, retry.MinBudget)
	l.starved = l.reserved && from != l.target
	return l.reserved || l.expired(unresponsive)
}

// move decides whether the open stream of the leg moves to another engine now, because its own
// engine drains or leaves. A stream that no other engine can surely take stays. The retry that
// follows is not taken from the budget, because no engine is at fault.
func (l *leg) move(m *engine.Moving) bool {
	if m.Left == 0 || l.Phase != abi.Decode || m.Instance != l.target.Instance || !l.attempt.env.Kept.tailed() {
		return false
	}
	if r := l.attempt.env.Route; r.Restricted && (r.CallerCoordinates() || r.Fixes(m.Instance)) || !l.othersTake() {
		return false
	}
	m.Left--
	l.moved, l.reserved = true, true
	return true
}

// othersTake reports whether other engines can take the stream of the leg: there is a prefill
// engine if the leg has one, and a decode engine in which, as far as is known, no request waits. An
// engine that reports its load thus gets only as many streams between two reports as it has room for.
func (l *leg) othersTake() bool {
	known, now := l.attempt.env.Registry.Snapshot(), time.Now()
	if p := l.attempt.p.Prefill; !p.IsZero() && p.State() != engine.Ready && known.Peer(p, abi.Prefill, nil).IsZero() {
		return false
	}
	for tried := []engine.Target{l.target}; ; {
		t := known.Peer(l.target, abi.Decode, tried)
		if t.IsZero() {
			return false
		}
		if waiting, _, _ := t.Load[t.Rank].Waiting(now); waiting == 0 && takesKV(t, now, false) {
			return true
		}
		tried = append(tried, t)
	}
}

// fetches reports whether the leg may be waiting for prefill's KV. An answer that is no stream shows
// nothing of the KV before it is complete.
func (l *leg) fetches() bool {
	a := l.attempt
	return l.Phase == abi.Decode && a.p.Flow == abi.FlowPrefillFirst && a.env.Request.Stream && a.prefill.handoff.Pinned
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
	if unresponsive != l.target.Instance || l.Phase != abi.Decode || l.attempt.concurrent || l.attempt.prefill.readBy.IsZero() {
		return false
	}
	now := time.Now()
	if l.silence.IsZero() {
		l.silence = now
	}
	quarter := l.attempt.prefill.handoff.Lease / 4
	return now.Sub(l.attempt.prefill.handed) >= 3*quarter && now.Sub(l.silence) >= quarter
}
