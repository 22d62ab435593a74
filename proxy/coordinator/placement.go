package coordinator

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Placement is a committed decision. The caller calls Lease.Release exactly once; the
// other fields stay valid after that.
type Placement struct {
	Flow    abi.Flow
	Prefill engine.Target // zero when aggregated
	Decode  engine.Target
	ID      uint64            // the disagg id; 0 when aggregated
	Policy  string            // the place policy that decided, "native" for the fallback
	Turn    conversation.Turn // zero if no policy needs conversations
	// Matched is how many prompt tokens the engine that computes the prompt holds
	// according to its events; -1: unknown.
	Matched int64
	// FirstByte is the plan policy's limit for the time until the client's first byte; 0:
	// the configured limit holds.
	FirstByte time.Duration
	// Fallbacks are the fallbacks of this placement, as labels what/reason.
	Fallbacks []Fallback
	Notes     []string // notes of the plan and the place policy, for explain
	// Facts is the table that the place policy saw, for explain. If another process
	// decided, only the request, the flow, the rows and Scored are set.
	Facts   abi.PlaceFacts
	Targets []engine.Target // row i of Facts.Candidates
	Lease   *Lease

	table *table
}

// Recycle returns the memory of Facts.Candidates, Facts.Scores and Targets to a pool and sets them to
// nil. It is called at most once, after the last use of them. Without it the garbage
// collector frees the memory.
func (p *Placement) Recycle() {
	if t := p.table; t != nil {
		t.place.Candidates, t.place.Scores, t.targets = p.Facts.Candidates, p.Facts.Scores, p.Targets
		clear(t.targets) // so that the pool of tables keeps no instance alive
		for i := range t.matched {
			t.matched[i].Chain = Chain{} // do not retain the memory of the request
		}
		t.matched = nil
		t.tables.Put(t)
	}
	p.table, p.Facts.Candidates, p.Facts.Scores, p.Targets = nil, nil, nil, nil
}

// Fallback is one counted deviation from the configuration.
type Fallback struct{ What, Reason string }

// fallback notes that the native rule decided, and why.
func (p *Placement) fallback(what, reason string) {
	switch reason {
	case ReasonAbsent:
		return
	case "":
		reason = ReasonFailed
	}
	p.Fallbacks = append(p.Fallbacks, Fallback{What: what, Reason: reason})
}

// committed is a placement and its lease in one allocation.
type committed struct {
	Placement
	lease Lease
}

// leases is what the open leases of a Local occupy together. Safe for concurrent use.
type leases struct {
	live  disaggid.Live
	open  atomic.Int64
	index *kvindex.Index
}

// Lease holds the resources of a placement: load on its targets, the disagg id, and
// expected blocks in the index. A worker's lease holds these at the coordinator, and load
// in the worker. Safe for concurrent use. Only the first call of each method has an
// effect.
type Lease struct {
	of     *leases
	remote remote // nil: the lease exists only in this process
	id     uint64
	charge Charge // constant after the placement
	times  *times // nil: no policy needs predictions; guarded by mu

	mu       sync.Mutex
	prompt   load.Hold     // load of the target that computes the prompt; guarded by mu
	computer *load.Counter // counter of prompt; nil if no prompt is computed
	since    time.Time
	pinned   *engine.Instance // prefill until decode has the KV; guarded by mu
	decode   load.Hold        // guarded by mu
	expected [2]expectation   // at the target that computes the prompt, and at decode; guarded by mu
	computed bool             // guarded by mu
	answered bool             // guarded by mu
	released bool             // guarded by mu
}

// Charge is the load that a placement puts on its targets, in tokens.
type Charge struct {
	Prompt int64 // tokens of the prompt
	Queued int64 // prompt tokens that are yet to be computed; -1: another target computes them, or they are computed
	Tokens int64 // on decode: the prompt and the expected output
}

// remote is the same lease at a coordinator in another process. All methods but
// Forget are called with the lease's mutex held.
type remote interface {
	SetOrphanCleanup(cleanup []byte)
	RegisterOrphanCleanup(cleanup []byte)
	PrefillDone(took time.Duration)
	Answered(took time.Duration)
	Computed(r CacheReport)
	Release()
	Forget() // after Release, without the mutex
}

// Attach makes the lease report each of its steps to r. It is called before anything else uses the
// lease.
func (l *Lease) Attach(r remote) { l.remote = r }

// Charge returns the load that the placement put on its targets.
func (l *Lease) Charge() Charge { return l.charge }

// Locked calls f with the lease's mutex held. open is false after Release; the
// Queued of left is -1 once the prompt is computed.
func (l *Lease) Locked(f func(open bool, left Charge)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.charge
	if l.computed {
		left.Queued = -1
	}
	f(!l.released, left)
}

// carry puts the charge on the targets. At most one of them is the zero target.
func (l *Lease) carry(prefill, decode engine.Target, c Charge, now time.Time) {
	l.charge, l.since = c, now
	switch {
	case c.Queued < 0:
	case prefill.Instance != nil:
		l.computer = &prefill.Load[prefill.Rank]
		l.prompt = l.computer.HoldPrefill(c.Prompt, c.Queued)
	case decode.Instance != nil:
		l.computer = &decode.Load[decode.Rank]
		l.prompt = l.computer.HoldQueued(c.Queued)
	}
	if decode.Instance != nil {
		l.decode = decode.Load[decode.Rank].Hold(c.Tokens)
	}
	if l.pinned = prefill.Instance; l.pinned != nil {
		l.pinned.Pin()
	}
}

// WantsOrphanCleanup reports whether the coordinator, in another process, would run a clean-up if this
// process died.
func (l *Lease) WantsOrphanCleanup() bool { return l.remote != nil }

// SetOrphanCleanup sets, before PrefillDone, the clean-up that frees prefill's blocks; nil: there is
// none. The coordinator gets it with PrefillDone, and passes it to ServerOptions.OnOrphan if this
// process dies before the answer begins. The lease keeps cleanup.
func (l *Lease) SetOrphanCleanup(cleanup []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remote != nil {
		l.remote.SetOrphanCleanup(cleanup)
	}
}

// RegisterOrphanCleanup is SetOrphanCleanup for a clean-up that the coordinator needs while prefill
// computes. The coordinator gets it at once. If it is not needed after PrefillDone, call
// SetOrphanCleanup(nil) before.
func (l *Lease) RegisterOrphanCleanup(cleanup []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remote != nil && !l.released {
		l.remote.RegisterOrphanCleanup(cleanup)
	}
}

// PrefillDone removes prefill's load, because the engine has computed the prompt.
func (l *Lease) PrefillDone() { l.PrefillDoneAfter(time.Since(l.since)) }

// PrefillDoneAfter is PrefillDone for a prompt that took so long by the clock of
// another process; 0: unknown.
func (l *Lease) PrefillDoneAfter(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done(took) && l.remote != nil {
		l.remote.PrefillDone(took)
	}
}

// Answered reports that the leg that answers the client has the prompt's KV. first: the first part
// of the answer has arrived, so the time since the placement measures the work on the prompt.
func (l *Lease) Answered(first bool) {
	var took time.Duration
	if first {
		took = time.Since(l.since)
	}
	l.AnsweredAfter(took)
}

// AnsweredAfter is Answered for a prompt that took so long by the clock of another
// process; 0: unknown.
func (l *Lease) AnsweredAfter(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done(took)
	if !l.answered && !l.released {
		if l.times != nil {
			l.times.answered(took)
		}
		if l.remote != nil {
			l.remote.Answered(took)
		}
	}
	l.answered = true
	if l.pinned != nil {
		l.pinned.Unpin()
		l.pinned = nil
	}
}

// done removes the load of the prompt and measures took unless it is 0. It returns false
// if it was called before. l.mu is held.
func (l *Lease) done(took time.Duration) bool {
	if l.computed || l.released {
		return false
	}
	l.computed = true
	if l.times != nil {
		l.times.computed(l.since, took)
	}
	if l.computer != nil && took > 0 {
		l.computer.Prefill.Measure(l.prompt.Work, took)
	}
	l.prompt.Drop()
	return true
}

// Computed sends an engine's report about its cache to the coordinator, if the
// coordinator is in another process.
func (l *Lease) Computed(r CacheReport) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remote != nil && !l.released {
		l.remote.Computed(r)
	}
}

// Release removes everything that the lease still occupies. Blocks that a leg did not
// produce are no longer expected.
func (l *Lease) Release() {
	l.mu.Lock()
	if l.released {
		l.mu.Unlock()
		return
	}
	l.released = true
	if l.times != nil {
		l.times.drop()
	}
	l.prompt.Drop()
	l.decode.Drop()
	if l.pinned != nil { // no leg has the KV
		l.pinned.Unpin()
		l.pinned = nil
	}
	if l.remote != nil {
		l.remote.Release()
	}
	if l.of != nil {
		for i, came := range [...]bool{l.computed, l.answered} {
			if e := &l.expected[i]; e.blocks != nil {
				e.end(l.of.index, came)
			}
		}
		if l.id != 0 {
			l.of.live.Drop(l.id)
		}
		l.of.open.Add(-1)
	}
	l.mu.Unlock()
	if l.remote != nil {
		l.remote.Forget()
	}
}
