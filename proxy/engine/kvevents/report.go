package kvevents

import (
	"log/slog"
	"sync/atomic"
	"time"
)

// Why a feed was cleared.
const (
	ResyncGap        = "gap"        // batches or events were lost, and no replay had them
	ResyncRestart    = "restart"    // the engine counts from the start again, or is not there
	ResyncReconnect  = "reconnect"  // the connection was lost, and maybe batches with it
	ResyncUnreadable = "unreadable" // a batch or an event may have removed blocks, but could not be read
	ResyncTold       = "told"       // Manager.Restarted
)

// How a replay ended.
const (
	ReplayComplete = "complete" // the end marker came
	ReplayFailed   = "failed"   // it did not, or nobody answered
)

// Hooks are called as things happen, from the goroutine that they happen in;
// they must not block. A nil one is not called.
type Hooks struct {
	// Applied counts blocks that were stored, removed or moved by events.
	Applied func(engine string, blocks int)
	// Gap counts jumps in the numbers of batches or events.
	Gap func(engine string)
	// Replay counts replays that were asked for, by how they ended.
	Replay func(engine, outcome string)
	// Resync counts feeds that were cleared, by the reason.
	Resync func(engine, reason string)
	// BlockTokens tells the length of an engine's blocks when it is learned from
	// the events, and when it turns out to be another.
	BlockTokens func(engine string, tokens int)
	// Malformed counts messages, batches and events that could not be read.
	Malformed func(engine string, n int)
}

// State is what is known of the events of one rank.
type State struct {
	// Connected says that the engine's publisher is connected, or answered the
	// last poll.
	Connected bool
	// Error is why it is not, if that is known.
	Error string
	// Last is when events came last; zero if never.
	Last time.Time
	// BlockTokens is the length of the engine's blocks as learned from its
	// events; 0 before.
	BlockTokens int
	// Resyncs counts how often the feed was cleared for want of knowledge.
	Resyncs uint64
}

// rank reports on one rank's events, to the hooks, the log and whoever asks for
// the state.
type rank struct {
	engine string
	n      int
	hooks  *Hooks
	log    *slog.Logger

	link        atomic.Uint32 // one of the link states
	failure     atomic.Pointer[string]
	last        atomic.Int64 // Unix time in ns
	blockTokens atomic.Int64
	resyncs     atomic.Uint64
}

func (r *rank) state() State {
	s := State{Connected: r.link.Load() == linkUp, BlockTokens: int(r.blockTokens.Load()), Resyncs: r.resyncs.Load()}
	if why := r.failure.Load(); why != nil && !s.Connected {
		s.Error = *why
	}
	if ns := r.last.Load(); ns != 0 {
		s.Last = time.Unix(0, ns)
	}
	return s
}

// applied notes what events did.
func (r *rank) applied(blocks, malformed, blockTokens int) {
	r.last.Store(time.Now().UnixNano())
	if r.blockTokens.Swap(int64(blockTokens)) != int64(blockTokens) && blockTokens > 0 && r.hooks.BlockTokens != nil {
		r.hooks.BlockTokens(r.engine, blockTokens)
	}
	if r.hooks.Applied != nil && blocks > 0 {
		r.hooks.Applied(r.engine, blocks)
	}
	r.malformed(malformed)
}

func (r *rank) malformed(n int) {
	if n == 0 {
		return
	}
	r.log.Debug("KV events cannot be read", "engine", r.engine, "rank", r.n, "count", n)
	if r.hooks.Malformed != nil {
		r.hooks.Malformed(r.engine, n)
	}
}

func (r *rank) gap() {
	if r.hooks.Gap != nil {
		r.hooks.Gap(r.engine)
	}
}

func (r *rank) replayed(outcome string) {
	if r.hooks.Replay != nil {
		r.hooks.Replay(r.engine, outcome)
	}
}

func (r *rank) resync(reason string) {
	r.resyncs.Add(1)
	r.log.Debug("KV index cleared", "engine", r.engine, "rank", r.n, "reason", reason)
	if r.hooks.Resync != nil {
		r.hooks.Resync(r.engine, reason)
	}
}

// The link states.
const (
	linkUntried uint32 = iota
	linkUp
	linkDown
)

// connect notes that events can come, or cannot and why.
func (r *rank) connect(err error) {
	now := linkUp
	if err != nil {
		now = linkDown
		why := err.Error()
		r.failure.Store(&why)
	}
	switch {
	case r.link.Swap(now) == now:
	case err == nil:
		r.log.Info("KV events come in", "engine", r.engine, "rank", r.n)
	default:
		r.log.Warn("KV events do not come in", "engine", r.engine, "rank", r.n, "error", err)
	}
}
