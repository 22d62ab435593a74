// Package kvindex stores which target holds which prefix blocks of the KV cache, and in
// which tier. It matches a prompt against all targets in one walk. It does no I/O and
// reads no clock.
//
// Blocks are identified by the package's own hash chains (hash.go). The index learns the
// blocks of a target in two ways: exactly, from the engine's events (feed.go), and by
// guess, from the requests that were sent to the target (guess.go).
//
// # Memory
//
// A block with one holder costs a word of 8 bytes and a mark of one byte, in tables
// that are 70 to 87 % full: 10 to 13 bytes. Each further holder of a block costs
// between 8 bytes and 4 bits. A feed stores the engine's hash with the index's hash, in
// 16 bytes at the same fullness: 18 to 23 bytes for each of its blocks. So a (block,
// target) pair from events costs 28 to 36 bytes, on average 31 at the 10 million pairs
// of BenchmarkIndex. A guess costs about 45 bytes (it has no entry in a feed).
//
// Options.MaxEntries bounds the pairs. At the bound, the index first removes the pairs of
// dropped targets. Then the target with the most guesses loses guesses, the least
// recently expected guesses first. If this is not enough, an engine that holds less than its
// share gets the room of a target that exceeds its share (share.go). Otherwise the index
// accepts no more blocks (Counts.Refused). Single blocks from events are never removed,
// because a chain with holes is useless. An engine may have several hashes for the blocks of
// one pair. These further hashes cost about 40 bytes each, and MaxEntries bounds their number
// separately, in total and by the share of each target.
//
// The decisions behind this package are in docs/design/engines.md.
package kvindex

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// Form describes how the blocks of a target are cut.
type Form struct {
	// Block is the length of a block: in tokens, or in bytes if Text is set.
	Block int
	// Text: blocks are cut from the prompt's text, not from token ids.
	Text bool
}

// Target is the slot of one target: an instance or one of its ranks.
type Target uint32

// Tier is the kind of memory that holds a block. Lower is better.
type Tier uint8

// The tiers.
const (
	GPU Tier = iota
	CPU
	Disk
	tiers = 3
)

// Options configures an Index.
type Options struct {
	// MaxEntries bounds the (block, target) pairs. The package comment describes what
	// happens at the bound. 0 means 16 Mi.
	MaxEntries int
	// GuessTTL is how long an expected block counts as held without an event, for
	// targets without their own Limits. 0 means 30 s.
	GuessTTL time.Duration
	// Reclaimed is called after a target that exceeded its share has lost all its blocks. It
	// must not block and must not call the index. nil: not called.
	Reclaimed func(t Target, blocks int)
}

const (
	defaultMaxEntries = 16 << 20
	defaultGuessTTL   = 30 * time.Second

	// noHolder is the holder number of a target for which no number was free. Such a
	// target holds no blocks. The space in a word limits the numbers.
	noHolder = 1 << 16
)

// Index is safe for concurrent use. Match takes no lock.
type Index struct {
	segments   *[segmentCount]segment
	roster     atomic.Pointer[roster]
	entries    atomic.Int64 // (block, target) pairs, including those of dropped targets
	dead       atomic.Int64 // the pairs of dropped targets
	twins      atomic.Int64 // the sum of the twins of all targets
	maxEntries int64
	guessTTL   time.Duration
	reclaimed  func(Target, int)
	share      atomic.Int64  // the pairs that each engine with events may have when the index is full
	sweeping   sync.Mutex    // held during a sweep; taken before mu
	walks      sync.Pool     // of *walk
	leaps      atomic.Uint32 // number of leaping matches
	cautious   atomic.Int64  // number of following matches that look at every block

	mu      sync.Mutex // guards the following fields, and changes of roster
	targets []*target  // by slot; nil if free
	spare   []uint64   // a bit for each free holder number
	gone    []uint64   // a bit for each holder number that must be swept
	past    Counts     // counts of dropped targets
}

// New returns an empty index.
func New(o Options) *Index {
	if o.MaxEntries <= 0 {
		o.MaxEntries = defaultMaxEntries
	}
	if o.GuessTTL <= 0 {
		o.GuessTTL = defaultGuessTTL
	}
	x := &Index{
		segments:   new([segmentCount]segment),
		maxEntries: int64(o.MaxEntries),
		guessTTL:   o.GuessTTL,
		reclaimed:  o.Reclaimed,
	}
	x.share.Store(x.maxEntries)
	x.roster.Store(&roster{})
	x.walks.New = func() any { return new(walk) }
	return x
}

// A target's blocks are not stored under its slot but under a holder number, which is
// replaced when the target restarts. That hides all its blocks at once. Entries of the
// old number are swept out later, and then the number is reused.

// roster maps holder numbers to targets and back. It is replaced, never changed.
type roster struct {
	alive   []uint64  // a bit for each holder number that a target has now
	target  []Target  // by holder number
	holder  []int32   // by slot; -1 if free
	holders []*holder // by holder number
}

// holder counts the entries of one holder number.
type holder struct{ entries atomic.Int64 }

// leave subtracts n entries of a dropped holder from the counts.
func (h *holder) leave(x *Index, n int) {
	h.entries.Add(-int64(n))
	x.entries.Add(-int64(n))
	x.dead.Add(-int64(n))
}

// live reports whether a target has the holder number now.
func (r *roster) live(h uint64) bool { return has(r.alive, h) }

// width returns the number of words, a power of two, that have a bit for each holder
// number.
func (r *roster) width() int { return 1 << bits.Len(uint(len(r.alive)-1)) }

// target is one target. Its mutex is locked before that of a segment, and serializes
// the writers of one target.
type target struct {
	slot   Target
	ranks  int64 // of the engine, which share its part of the index
	fed    bool  // has a feed; guarded by Index.mu
	mu     sync.Mutex
	gone   bool // dropped: stores nothing more
	capped bool // has exceeded its share of a full index: may hold its share only, until it is dropped
	id     uint64
	counts
	guesses guesses
	engine  hashMap           // engine's hash -> the index's hash and its tiers, for the feed
	twins   map[uint64]uint32 // the index's hash and a tier -> number of additional engine hashes with it
	further int64             // the sum of twins
	tokens  atomic.Int64      // length of the engine's blocks in tokens, 0 before the first event
}

// Add returns a new target with no blocks. It takes the lowest free slot.
func (x *Index) Add() Target { return x.add(1) }

// AddRanks returns n new targets with no blocks: the ranks of one engine.
func (x *Index) AddRanks(n int) []Target {
	ranks := make([]Target, n)
	for i := range ranks {
		ranks[i] = x.add(n)
	}
	return ranks
}

// add adds one of the ranks of an engine.
func (x *Index) add(ranks int) Target {
	x.tidy()
	x.mu.Lock()
	defer x.mu.Unlock()
	slot := 0
	for slot < len(x.targets) && x.targets[slot] != nil {
		slot++
	}
	if slot == len(x.targets) {
		x.targets = append(x.targets, nil)
	}
	t := &target{slot: Target(slot), ranks: int64(ranks)}
	t.guesses.ttl, t.guesses.silent = x.guessTTL, x.guessTTL
	x.targets[slot] = t
	x.enrol(t)
	return t.slot
}

// Drop removes a target and all its blocks at once. A later Add reuses its slot. Feeds
// of the old target then do nothing.
func (x *Index) Drop(t Target) {
	tg := x.at(t)
	if tg == nil {
		return
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	if tg.gone {
		return
	}
	tg.gone = true
	x.mu.Lock()
	defer x.mu.Unlock()
	x.expel(tg)
	x.targets[t] = nil
	for n := len(x.targets); n > 0 && x.targets[n-1] == nil; n-- {
		x.targets = x.targets[:n-1]
	}
	x.past.add(tg.counts.read())
	x.publish()
	x.divide()
	x.forgetFeed(tg)
}

// Clear removes all blocks of a target at once, because it restarted or reported that
// it is empty. No Match that starts afterwards finds them.
func (x *Index) Clear(t Target) {
	if tg := x.at(t); tg != nil {
		tg.mu.Lock()
		x.clear(tg)
		tg.mu.Unlock()
	}
}

// clear is Clear. The caller holds tg.mu.
func (x *Index) clear(tg *target) {
	if tg.gone {
		return
	}
	x.tidy()
	x.mu.Lock()
	x.expel(tg)
	x.enrol(tg)
	x.mu.Unlock()
	x.forgetFeed(tg)
}

// forgetFeed frees the memory that a target without blocks does not need. The caller holds tg.mu.
func (x *Index) forgetFeed(tg *target) {
	x.twins.Add(-tg.further)
	tg.engine = hashMap{}
	tg.twins, tg.further = nil, 0
	tg.guesses.clear()
}

// expel removes a target's holder number, if it has one. The caller holds both mutexes.
func (x *Index) expel(tg *target) {
	if tg.id == noHolder {
		return
	}
	h := x.roster.Load().holders[tg.id]
	if n := h.entries.Load(); n > 0 {
		x.dead.Add(n)
		x.gone[tg.id/64] |= 1 << (tg.id % 64)
		return
	}
	x.spare[tg.id/64] |= 1 << (tg.id % 64)
}

// tidy sweeps if too many holder numbers wait for it, because each makes bit sets
// wider.
func (x *Index) tidy() {
	x.mu.Lock()
	many := len(x.roster.Load().holders) >= 2*len(x.targets)+64 && !nonzero(x.spare)
	x.mu.Unlock()
	if many {
		x.sweeping.Lock()
		x.sweep()
		x.sweeping.Unlock()
	}
}

// enrol assigns a free holder number to a target and publishes the roster. The caller
// holds both mutexes, or the target is new.
func (x *Index) enrol(tg *target) {
	tg.id = noHolder
	for i, w := range x.spare {
		if w != 0 {
			tg.id = uint64(i*64 + bits.TrailingZeros64(w))
			x.spare[i] &= w - 1
			break
		}
	}
	r := x.roster.Load()
	if n := uint64(len(r.holders)); tg.id == noHolder && n < noHolder {
		tg.id = n
		if n%64 == 0 {
			x.spare = append(x.spare, 0)
			x.gone = append(x.gone, 0)
		}
	}
	x.publish()
}

// publish publishes a new roster. The caller holds x.mu.
func (x *Index) publish() {
	old := x.roster.Load()
	r := &roster{
		alive:   make([]uint64, len(x.spare)),
		target:  make([]Target, len(x.spare)*64),
		holder:  make([]int32, len(x.targets)),
		holders: old.holders,
	}
	for slot, tg := range x.targets {
		r.holder[slot] = -1
		if tg == nil || tg.id == noHolder {
			continue
		}
		if tg.id == uint64(len(r.holders)) {
			// The array may be shared with the old roster, which is shorter.
			r.holders = append(r.holders, new(holder))
		}
		r.holder[slot] = int32(tg.id)
		r.target[tg.id] = Target(slot)
		r.alive[tg.id/64] |= 1 << (tg.id % 64)
	}
	x.roster.Store(r)
}

// at returns the target in a slot, or nil.
func (x *Index) at(t Target) *target {
	x.mu.Lock()
	defer x.mu.Unlock()
	if int(t) >= len(x.targets) {
		return nil
	}
	return x.targets[t]
}

// Targets returns the number of slots in use: the length that Match's out needs.
func (x *Index) Targets() int { return len(x.roster.Load().holder) }

// Store notes that t holds the blocks in a tier.
func (x *Index) Store(t Target, tier Tier, blocks []Hash) {
	tg := x.at(t)
	if tg == nil || tier >= tiers {
		return
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	b := x.batch(tg)
	for _, h := range blocks {
		b.store(h, 1<<tier)
	}
	b.end()
}

// Remove notes that t no longer holds the blocks in a tier.
func (x *Index) Remove(t Target, tier Tier, blocks []Hash) {
	tg := x.at(t)
	if tg == nil || tier >= tiers {
		return
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	b := x.batch(tg)
	for _, h := range blocks {
		b.remove(h, 1<<tier)
	}
	b.end()
}
