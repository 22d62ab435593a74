package kvevents

import (
	"log/slog"
	"sync/atomic"
	"time"
)

// The reasons why a feed is cleared.
const (
	ResyncGap        = "gap"        // batches or events were lost, and no replay returned them
	ResyncRestart    = "restart"    // the engine's numbers start again, or the engine has left
	ResyncReconnect  = "reconnect"  // the connection was lost, and perhaps batches with it
	ResyncUnreadable = "unreadable" // an unreadable batch or event may have removed blocks
	ResyncTold       = "told"       // Manager.Restarted
	ResyncShare      = "share"      // the index was full, and the engine held more than its share; the index reports it
)

// The results of a replay.
const (
	ReplayComplete = "complete" // the end marker arrived
	ReplayFailed   = "failed"   // the end marker did not arrive, or there was no answer
)

// Hooks are called by the goroutine in which the event happens. They must not block. A
// nil hook is not called.
type Hooks struct {
	// Applied counts blocks that events have stored, removed or moved.
	Applied func(engine string, blocks int)
	// Refused counts stored or moved blocks for which the index had no room.
	Refused func(engine string, blocks int)
	// Gap counts jumps in the numbers of batches or events.
	Gap func(engine string)
	// Replay counts requested replays by result.
	Replay func(engine, outcome string)
	// Resync counts cleared feeds by reason.
	Resync func(engine, reason string)
	// BlockTokens reports the length of an engine's blocks in tokens when it is learned
	// from events, and when it changes.
	BlockTokens func(engine string, tokens int)
	// Malformed counts unreadable messages, batches and events.
	Malformed func(engine string, n int)
}

// State is the state of one rank's events.
type State struct {
	// Connected: the engine's publisher is connected, or the engine answered the last
	// poll.
	Connected bool
	// Error is the reason if Connected is false, if known.
	Error string
	// Last is the time of the last events; zero if there were none.
	Last time.Time
	// BlockTokens is the length of the engine's blocks, in tokens, as learned from its
	// events; 0 if unknown.
	BlockTokens int
	// Resyncs counts how often the feed was cleared because events were missing.
	Resyncs uint64
}

// rank reports one rank's events to the hooks, to the log and to States.
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

// heard notes that events have arrived, and the length of a block that they have shown.
func (r *rank) heard(blockTokens int) {
	r.last.Store(time.Now().UnixNano())
	if r.blockTokens.Swap(int64(blockTokens)) != int64(blockTokens) && blockTokens > 0 && r.hooks.BlockTokens != nil {
		r.hooks.BlockTokens(r.engine, blockTokens)
	}
}

// count reports the results of events.
func (r *rank) count(blocks, refused, malformed int) {
	if r.hooks.Applied != nil && blocks > 0 {
		r.hooks.Applied(r.engine, blocks)
	}
	if r.hooks.Refused != nil && refused > 0 {
		r.hooks.Refused(r.engine, refused)
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

// connect notes that events can arrive, or by err why they cannot.
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
		r.log.Info("KV events arrive", "engine", r.engine, "rank", r.n)
	default:
		r.log.Warn("KV events do not arrive", "engine", r.engine, "rank", r.n, "error", err)
	}
}
