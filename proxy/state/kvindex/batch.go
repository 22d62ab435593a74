package kvindex

// batch is a run of changes of one target. The target's mutex is held from batch to
// end.
type batch struct {
	x     *Index
	tg    *target
	room  int64 // pairs that may still be added
	added int64 // pairs added since the last count, minus removed ones
	tried bool  // makeRoom was called already
}

// batch begins a run of changes. The caller holds tg.mu until after end.
func (x *Index) batch(tg *target) batch {
	b := batch{x: x, tg: tg, room: x.maxEntries - x.entries.Load()}
	if tg.capped {
		b.room = min(b.room, x.below(tg))
	}
	if tg.gone || tg.id == noHolder {
		b.room, b.tried = 0, true // the target holds nothing and must store nothing
	}
	return b
}

// end adds the batch's changes to the counts.
func (b *batch) end() {
	if b.added != 0 {
		b.x.entries.Add(b.added)
		b.x.roster.Load().holders[b.tg.id].entries.Add(b.added)
		b.added = 0
	}
}

// change is Index.change for the target. It adds a new pair only if there is room.
func (b *batch) change(h Hash, c change) (before, after uint64) {
	if b.tg.gone || b.tg.id == noHolder {
		return 0, 0
	}
	c.known = b.room <= 0
	before, after = b.x.change(b.tg.id, h, c)
	if before == 0 && c.set != 0 && c.known && !b.tried {
		b.tried = true
		b.end()
		if b.room = b.x.makeRoom(b.tg, c.set != flagGuess); b.room > 0 {
			return b.change(h, c)
		}
	}
	switch {
	case before == 0 && after != 0:
		b.added++
		b.room--
	case before != 0 && after == 0:
		b.added--
		b.room++
	}
	return before, after
}

// store sets the flag of a tier. It returns the flags before, and whether the block is
// held now.
func (b *batch) store(h Hash, flag uint64) (before uint64, ok bool) {
	c := change{set: flag}
	if flag == flagGPU {
		c.clear = flagGuess
	}
	before, after := b.change(h, c)
	if before&flagGuess > after&flagGuess {
		b.tg.guesses.remove(h)
	}
	if after&flag == 0 {
		b.tg.count(countRefused, 1)
		return before, false
	}
	if before&flag == 0 {
		b.tg.count(countStored, 1)
	}
	return before, true
}

// remove clears the flag of a tier.
func (b *batch) remove(h Hash, flag uint64) {
	if before, _ := b.change(h, change{clear: flag}); before&flag != 0 {
		b.tg.count(countRemoved, 1)
	}
}

// makeRoom frees entries at the bound as the package comment describes, and returns how
// many pairs may be added. exact: the new pairs are from events. The caller holds tg.mu.
func (x *Index) makeRoom(tg *target, exact bool) int64 {
	if !tg.capped {
		return x.free(tg, exact)
	}
	if own := x.below(tg); own > 0 {
		return min(own, x.free(tg, exact))
	}
	return 0
}

// free is makeRoom for a target that may have all free pairs.
func (x *Index) free(tg *target, exact bool) int64 {
	if x.dead.Load() > 0 && x.sweeping.TryLock() {
		x.sweep()
		x.sweeping.Unlock()
	}
	if x.entries.Load() < x.maxEntries {
		return x.maxEntries - x.entries.Load()
	}
	x.mu.Lock()
	most := tg
	for _, other := range x.targets {
		if other != nil && other.guesses.count.Load() > most.guesses.count.Load() {
			most = other
		}
	}
	x.mu.Unlock()
	if most == tg {
		x.evict(tg, tg.guesses.len()/16+1)
	} else if most.mu.TryLock() { // without waiting: a goroutine that holds most.mu may wait for tg.mu
		x.evict(most, most.guesses.len()/16+1)
		most.mu.Unlock()
	}
	if room := x.maxEntries - x.entries.Load(); room > 0 || !exact {
		return room
	}
	return x.reclaim(tg)
}

// sweep removes the entries of dropped targets from all segments. The caller holds
// x.sweeping.
func (x *Index) sweep() {
	x.mu.Lock()
	gone := append([]uint64(nil), x.gone...)
	x.mu.Unlock()
	if !nonzero(gone) {
		return
	}
	left := make([]int, 64*len(gone))
	for i := range x.segments {
		x.segments[i].sweep(gone, left)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	holders := x.roster.Load().holders
	for id, n := range left {
		if n > 0 {
			holders[id].leave(x, n)
		}
	}
	for i, w := range gone {
		x.gone[i] &^= w
		x.spare[i] |= w
	}
}

// nonzero reports whether a bit set has a bit.
func nonzero(set []uint64) bool {
	for _, w := range set {
		if w != 0 {
			return true
		}
	}
	return false
}
