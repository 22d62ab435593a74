package kvindex

import (
	"sync/atomic"
	"unsafe"
)

// Stats holds the figures of an Index, for all targets together.
type Stats struct {
	Blocks  int   // different blocks in the tables, including those not yet swept out
	Entries int   // (block, target) pairs of present targets
	Guesses int   // the pairs known only from Expect
	Bytes   int64 // memory of tables, feeds and guesses
	Counts        // including dropped targets
}

// Counts counts events since a target was added.
type Counts struct {
	Stored   uint64 // blocks that events have added to a tier
	Removed  uint64 // blocks that events have removed from a tier
	Orphans  uint64 // stored blocks that are unknown themselves, or whose parent is unknown
	Ignored  uint64 // stored blocks that cannot be placed: partial, of another length, or fewer hashes than blocks
	Replaced uint64 // engine hashes that were stored again for other tokens
	Strays   uint64 // removed blocks that were unknown
	Refused  uint64 // blocks for which Options.MaxEntries left no room
	Evicted  uint64 // guesses removed for lack of room
	Expired  uint64 // guesses whose time has passed
}

// Indexes in counts of the fields of Counts.
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

// counts is Counts while the fields grow. It is safe for concurrent use.
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

// Stats returns the present figures. It walks over all tables: use it for metrics, not
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

// bytes returns the memory of a segment's tables. The caller holds mu.
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
	return cap(g.nodes)*int(unsafe.Sizeof(guess{})) + 8*cap(g.places)
}

// Held returns the number of blocks that t holds, including guesses.
func (x *Index) Held(t Target) int {
	r := x.roster.Load()
	if int(t) >= len(r.holder) || r.holder[t] < 0 {
		return 0
	}
	return int(r.holders[r.holder[t]].entries.Load())
}

// Counts returns the counts of t since it was added.
func (x *Index) Counts(t Target) Counts {
	if tg := x.at(t); tg != nil {
		return tg.counts.read()
	}
	return Counts{}
}
