package kvindex

import (
	"sync/atomic"
	"unsafe"
)

// Stats are the figures of an Index, all targets together.
type Stats struct {
	Blocks  int   // different blocks in the tables, those not yet swept out included
	Entries int   // (block, target) pairs of targets in place
	Guesses int   // of them, those known from Expect only
	Bytes   int64 // memory of tables, feeds and guesses
	Counts        // targets that left included
}

// Counts are what happened since a target was added.
type Counts struct {
	Stored   uint64 // blocks that came into a tier by events
	Removed  uint64 // blocks that left a tier by events
	Orphans  uint64 // stored blocks whose parent, or which themselves, are not known
	Ignored  uint64 // stored blocks that cannot be placed: partial, of another length, fewer hashes than blocks
	Replaced uint64 // engine hashes stored again for other tokens
	Strays   uint64 // removed blocks that were not known
	Refused  uint64 // blocks for which Options.MaxEntries left no room
	Evicted  uint64 // guesses that left for want of room
	Expired  uint64 // guesses whose time ran out
}

// The numbers of Counts' fields in counts.
const (
	countStored = iota
	countRemoved
	countOrphans
	countIgnored
	countReplaced
	countStrays
	countRefused
	countEvicted
	countExpired
	countKinds
)

// counts is Counts while they grow. It is safe for concurrent use.
type counts [countKinds]atomic.Uint64

// count adds n to one of the counts.
func (c *counts) count(kind, n int) {
	if n > 0 {
		c[kind].Add(uint64(n))
	}
}

func (c *counts) read() Counts {
	return Counts{
		Stored:   c[countStored].Load(),
		Removed:  c[countRemoved].Load(),
		Orphans:  c[countOrphans].Load(),
		Ignored:  c[countIgnored].Load(),
		Replaced: c[countReplaced].Load(),
		Strays:   c[countStrays].Load(),
		Refused:  c[countRefused].Load(),
		Evicted:  c[countEvicted].Load(),
		Expired:  c[countExpired].Load(),
	}
}

func (c *Counts) add(d Counts) {
	c.Stored += d.Stored
	c.Removed += d.Removed
	c.Orphans += d.Orphans
	c.Ignored += d.Ignored
	c.Replaced += d.Replaced
	c.Strays += d.Strays
	c.Refused += d.Refused
	c.Evicted += d.Evicted
	c.Expired += d.Expired
}

// Stats returns the figures of now. It walks over all tables: for metrics, not
// for requests.
func (x *Index) Stats() Stats {
	var s Stats
	bytes := len(x.segments) * int(unsafe.Sizeof(segment{}))
	for i := range x.segments {
		seg := &x.segments[i]
		seg.mu.Lock()
		s.Blocks += int(seg.used)
		bytes += seg.bytes()
		seg.mu.Unlock()
	}
	x.mu.Lock()
	targets := append([]*target(nil), x.targets...)
	s.Counts = x.past
	x.mu.Unlock()
	for _, tg := range targets {
		if tg == nil {
			continue
		}
		s.Counts.add(tg.counts.read())
		s.Guesses += tg.guesses.len()
		tg.mu.Lock()
		bytes += tg.engine.bytes() + tg.guesses.bytes()
		tg.mu.Unlock()
	}
	s.Entries = int(x.entries.Load() - x.dead.Load())
	s.Bytes = int64(bytes)
	return s
}

// bytes is the memory of a segment's tables. The caller holds mu.
func (s *segment) bytes() int {
	n := 0
	if t := s.table.Load(); t != nil {
		n += int(unsafe.Sizeof(*t)) + 8*(cap(t.slots)+cap(t.records))
	}
	if s.places != nil {
		n += int(unsafe.Sizeof(*s.places))
	}
	return n
}

func (g *guesses) bytes() int {
	return cap(g.nodes)*int(unsafe.Sizeof(guess{})) + 4*cap(g.places)
}

// Held is the number of blocks that t holds, guesses included.
func (x *Index) Held(t Target) int {
	r := x.roster.Load()
	if int(t) >= len(r.holder) || r.holder[t] < 0 {
		return 0
	}
	return int(r.holders[r.holder[t]].entries.Load())
}

// Counts returns what happened at t since it was added.
func (x *Index) Counts(t Target) Counts {
	if tg := x.at(t); tg != nil {
		return tg.counts.read()
	}
	return Counts{}
}
