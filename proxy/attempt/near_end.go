package attempt

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// speedDoubt is the factor by which a prefill may be faster than the measured speed.
const speedDoubt = 2

// Lingers implements upstream.CallControl. It reports whether the proxy waits for the answer
// of a prefill leg after the client has left, after the decode leg has failed, or if no
// decode engine can use the KV any more. The proxy waits only if prefill may be near its end, and
// not if decode has ended: the answer names blocks that no engine could free for a long time,
// whereas most prefills that are aborted leave none. Otherwise it closes the connection at once.
// Lingers reads only fields that do not change while the leg runs.
func (l *leg) Lingers() bool {
	if l.Phase == abi.Prefill && l.needed.decodeEnded() {
		return false
	}
	return nearEnd(time.Since(l.Start), l.watched.compute, l.target.Load[l.target.Rank].Prefill.PerToken())
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

// needs are the questions of a prefill leg to its attempt. Other goroutines ask them too, so the
// attempt reads only fields that do not change while prefill runs.
type needs interface {
	decodeWaits() bool
	decodeLost() bool
	decodeEnded() bool
}

// Wanted implements upstream.CallControl. It returns false for a prefill leg that has waited for
// a connection, if no decode engine can use the KV any more. The leg is then not sent.
func (l *leg) Wanted() bool { return l.Phase != abi.Prefill || l.needed.decodeWaits() }

// Useless implements upstream.CallControl. It returns true for a running prefill leg if no decode
// engine can use the KV, and the attempt's decode engine has ended or has an open circuit. Lingers
// then decides whether the proxy waits for the answer. A decode engine whose probes only timed out
// does not make a leg useless, because this host itself may have been cut off. The proxy would then
// close the connection, prefill would finish unseen, and its blocks would stay until their lease
// ends.
func (l *leg) Useless() bool { return l.Phase == abi.Prefill && l.needed.decodeLost() }

// decodeWaits reports whether a decode engine can use the KV that prefill computes. For
// concurrent legs it returns true: if decode fails, its leg ends the prefill leg.
func (a *attempt) decodeWaits() bool {
	now, t := time.Now(), a.p.Decode
	if a.isConcurrent() || takesKV(t, now) || a.began.forced && up(t) || newHere(t) {
		return true
	}
	if connector.PinsDecode(a.conn) {
		return false
	}
	known := a.env.Registry.Snapshot()
	for tried := []engine.Target{t}; ; tried = append(tried, t) {
		if t = known.Peer(a.p.Decode, abi.Decode, tried); t.IsZero() || slices.Contains(tried, t) {
			return false
		}
		if takesKV(t, now) {
			return true
		}
	}
}

// decodeLost reports whether no decode engine can use the KV that prefill computes, and the
// attempt's decode engine has ended or has an open circuit.
func (a *attempt) decodeLost() bool {
	t := a.p.Decode
	return (t.Ended() || t.Breaker.Circuit(time.Now()) == circuit.Open) && !a.decodeWaits()
}

// decodeEnded reports whether no decode engine can use the KV that prefill computes, and the process
// of the attempt's decode engine has ended.
func (a *attempt) decodeEnded() bool { return a.p.Decode.Ended() && !a.decodeWaits() }

// newHere reports whether the coordinator of a fleet has placed a leg on an engine whose first
// state has not reached this process yet. The coordinator places legs only on ready engines.
func newHere(t engine.Target) bool { return t.State() == engine.Down }

// takesKV reports whether a decode target can receive KV at the time now.
func takesKV(t engine.Target, now time.Time) bool {
	return up(t) && !(t.Breaker.Failing.Load() && t.Breaker.Circuit(now) == circuit.Open)
}

// up reports whether the probes have not found the engine to be unreachable.
func up(t engine.Target) bool {
	s := t.State()
	return s == engine.Ready || s == engine.Draining
}
