package coordinator

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Lease is what a placement holds of its targets: load on both, the disagg id,
// and blocks that are expected to come to be there; of a Client the same at the
// coordinator, and the load here. Its methods may be called any number of times,
// by any goroutine: each hold is dropped once.
type Lease struct {
	local *Local
	wire  *wireLease // nil: there is no other process
	id    uint64
	burden

	mu       sync.Mutex
	prompt   load.Hold     // of the target that computes the prompt; guarded by mu
	computer *load.Counter // the counter of prompt; nil when no prompt is computed
	since    time.Time
	pinned   *engine.Instance // prefill, until decode has its KV; guarded by mu
	decode   load.Hold        // guarded by mu
	expected [2]job           // at the target that computes the prompt, and at decode; guarded by mu
	computed bool             // guarded by mu
	answered bool             // guarded by mu
	released bool             // guarded by mu
}

// burden is what a placement loads its targets with, in tokens.
type burden struct {
	prompt int64
	queued int64 // of the prompt, what is yet to be computed; -1: the prompt is computed elsewhere, or has been
	tokens int64 // of decode: the prompt and what it is expected to produce
}

// carry loads the targets.
func (l *Lease) carry(prefill, decode engine.Target, b burden, now time.Time) {
	l.burden, l.since = b, now
	if b.queued >= 0 {
		if l.computer = counter(prefill); l.computer != nil {
			l.prompt = l.computer.HoldPrefill(b.prompt, b.queued)
		} else if l.computer = counter(decode); l.computer != nil {
			l.prompt = l.computer.HoldQueued(b.queued)
		}
	}
	if c := counter(decode); c != nil {
		l.decode = c.Hold(b.tokens)
	}
	if l.pinned = prefill.Instance; l.pinned != nil {
		l.pinned.Pin()
	}
}

// unpin lets prefill go; l.mu is held.
func (l *Lease) unpin() {
	if l.pinned != nil {
		l.pinned.Unpin()
		l.pinned = nil
	}
}

// counter is the load of a target; nil of none.
func counter(t engine.Target) *load.Counter {
	if t.IsZero() {
		return nil
	}
	return &t.Load[t.Rank]
}

// Owes reports whether there is a coordinator that would do what Owe is told if
// this process died.
func (l *Lease) Owes() bool { return l.wire != nil }

// Owe says, ahead of PrefillDone, what frees the blocks that prefill then holds
// until the leg that answers has them: a text that means something to whoever
// gets it from ServerOptions.OnOrphan. It is kept.
func (l *Lease) Owe(cleanup []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wire != nil {
		l.wire.owed = cleanup
	}
}

// PrefillDone drops prefill's load: the engine has computed the prompt.
func (l *Lease) PrefillDone() { l.prefillDone(time.Since(l.since)) }

func (l *Lease) prefillDone(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done(took) && l.wire != nil {
		l.wire.prefillDone(took)
	}
}

// Answered says that the leg that answers the client has the prompt's KV. first
// says that it has only begun: the time until now was the prompt's.
func (l *Lease) Answered(first bool) {
	var took time.Duration
	if first {
		took = time.Since(l.since)
	}
	l.answer(took)
}

func (l *Lease) answer(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done(took)
	if !l.answered && !l.released && l.wire != nil {
		l.wire.answered(took)
	}
	l.answered = true
	l.unpin()
}

// done drops the load of the prompt, and notes how long it took unless that is
// 0, which is not known. False: that has been done. l.mu is held.
func (l *Lease) done(took time.Duration) bool {
	if l.computed || l.released {
		return false
	}
	l.computed = true
	if l.computer != nil && took > 0 {
		l.computer.Prefill.Measure(l.prompt.Work(), took)
	}
	l.prompt.Drop()
	return true
}

// Release drops whatever the lease still holds. What was expected of legs that
// did not come to it is no longer.
func (l *Lease) Release() {
	if l.release() && l.wire != nil {
		l.wire.client.forget(l)
	}
}

// release is Release; false: that has been done.
func (l *Lease) release() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return false
	}
	l.released = true
	l.prompt.Drop()
	l.decode.Drop()
	l.unpin()
	if l.wire != nil {
		l.wire.release()
	}
	if l.local != nil {
		l.leave()
	}
	return true
}

// leave takes the lease off its coordinator's books; l.mu is held.
func (l *Lease) leave() {
	for i, well := range [...]bool{l.computed, l.answered} {
		how := failed
		if well {
			how = came
		}
		l.local.background.end(l.expected[i], how)
		l.expected[i] = job{}
	}
	if l.id != 0 {
		l.local.live.Drop(l.id)
	}
	l.local.open.Add(-1)
}
