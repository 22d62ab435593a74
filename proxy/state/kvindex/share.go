package kvindex

import "time"

// Each engine with a feed has a share of the index: MaxEntries divided by the number of these
// engines. Its ranks divide it. The share is a right, not a limit: an engine may hold more while
// there is room. When the index is full, and an engine has less than its share, the target that
// exceeds its share most loses all its blocks. From then on this target may not exceed its
// share. So each target loses its blocks at most once, and one engine that reports more blocks
// than fit cannot exclude the blocks of another engine.

// excess is how far a target must exceed its share, as a fraction, before it may lose its blocks
// for another engine: by 1/excess. Otherwise a new engine would clear engines whose holdings are
// about equal.
const excess = 2

// divide computes the share. The caller holds x.mu.
func (x *Index) divide() {
	engines := 0.0
	for _, tg := range x.targets {
		if tg != nil && tg.fed {
			engines += 1 / float64(tg.ranks)
		}
	}
	x.share.Store(int64(float64(x.maxEntries) / max(engines, 1)))
}

// part returns a target's part of the share of its engine.
func (x *Index) part(tg *target) int64 { return x.share.Load() / max(tg.ranks, 1) }

// held returns the pairs of a target that the counts have already.
func (x *Index) held(tg *target) int64 {
	if tg.gone || tg.id == noHolder {
		return 0
	}
	return x.roster.Load().holders[tg.id].entries.Load()
}

// below returns how many pairs a target lacks to its part of the share. The caller holds tg.mu.
func (x *Index) below(tg *target) int64 { return x.part(tg) - x.held(tg) }

// reclaim frees the pairs of a target that exceeds its share, if tg has less than its own. It
// returns how many pairs may be added. The caller holds tg.mu.
func (x *Index) reclaim(tg *target) int64 {
	if x.below(tg) <= 0 {
		return 0
	}
	victim := x.greediest(tg)
	if victim == nil || !lockSoon(victim) {
		return 0
	}
	defer victim.mu.Unlock()
	if n := x.held(victim); !victim.gone && n > 0 {
		x.clear(victim)
		victim.capped = true
		if x.reclaimed != nil {
			x.reclaimed(victim.slot, int(n))
		}
	}
	x.sweeping.Lock()
	x.sweep()
	x.sweeping.Unlock()
	return x.maxEntries - x.entries.Load()
}

// greediest returns the target that exceeds its part of the share most, nil if none exceeds it
// by enough. tg has less than its part. The caller holds tg.mu.
func (x *Index) greediest(tg *target) (victim *target) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !tg.fed {
		return nil
	}
	r, most := x.roster.Load(), int64(0)
	for slot, other := range x.targets {
		if other == nil || other == tg || !other.fed || r.holder[slot] < 0 {
			continue
		}
		part := x.part(other)
		if over := r.holders[r.holder[slot]].entries.Load() - part; over > part/excess && over > most {
			victim, most = other, over
		}
	}
	return victim
}

// The wait for a target's mutex. A goroutine that holds it may wait for the mutex of another
// target, so the wait has an end.
const (
	lockTries = 1000
	lockPause = 20 * time.Microsecond
)

// lockSoon locks a target's mutex. It returns false if the mutex is not free within about 20 ms.
func lockSoon(tg *target) bool {
	for range lockTries {
		if tg.mu.TryLock() {
			return true
		}
		time.Sleep(lockPause)
	}
	return false
}
