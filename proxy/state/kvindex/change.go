package kvindex

import (
	"math/bits"
	"sync/atomic"
)

// change describes a change of the flags that one holder has at a block.
type change struct {
	set, clear uint64
	unless     uint64 // no change if the holder has one of these
	known      bool   // no change if the holder does not have the block
}

// change applies c to a holder's flags at a block. It returns the flags before and
// after.
func (x *Index) change(holder uint64, h Hash, c change) (before, after uint64) {
	s := &x.segments[h>>segmentShift]
	s.mu.Lock()
	before, after = s.change(x, keyOf(h), holder, c)
	s.mu.Unlock()
	return before, after
}

// change is Index.change in one segment. The caller holds mu.
func (s *segment) change(x *Index, key, holder uint64, c change) (before, after uint64) {
	w, slot := s.table.Load().find(key)
	if w == 0 {
		if c.set == 0 || c.known {
			return 0, 0
		}
		s.insert(key>>markBits<<restBits|holder<<flagBits|c.set, markOf(key))
		return 0, c.set
	}
	form := formOf(w)
	if form != 0 {
		before = flagsIn(form, s.table.Load().record(w), holder)
	} else if holderOf(w) == holder {
		before = w & flagMask
	}
	if before&c.unless != 0 || before == 0 && (c.set == 0 || c.known) {
		return before, before
	}
	after = (before | c.set) &^ c.clear
	if after == before {
		return before, after
	}
	switch {
	case form != 0:
		if !s.changeRecord(x, w, slot, holder, before, after) {
			return before, before
		}
	case before == 0:
		if !s.changeOwner(x, w, slot, holder, after) {
			return before, before
		}
	case after == 0:
		s.erase(slot)
	default:
		s.put(slot, w&^flagMask|after)
	}
	return before, after
}

// put replaces the word in a slot.
func (s *segment) put(slot int, w uint64) {
	// Tag and mark of the old word stay.
	atomic.StoreUint64(&s.table.Load().slots[slot], w)
}

// changeOwner adds a second holder to a block with one holder, or replaces a holder
// that was dropped.
func (s *segment) changeOwner(x *Index, w uint64, slot int, holder, flags uint64) bool {
	tag := w >> restBits << restBits
	entry := holder<<flagBits | flags
	// The roster is read after the word. So a holder that is not in the roster was
	// dropped.
	if r := x.roster.Load(); !r.live(holderOf(w)) {
		r.holders[holderOf(w)].leave(x, 1)
		s.put(slot, tag|entry)
		return true
	}
	rec, rest := s.take(formList)
	if rec == nil {
		return false
	}
	atomic.StoreUint64(&rec[0], w&entryMask|entry<<entryBits)
	s.put(slot, tag|rest)
	return true
}

// changeRecord changes a holder's flags in a record. The record may move to another
// form, or be replaced by a single holder.
func (s *segment) changeRecord(x *Index, w uint64, slot int, holder, before, after uint64) bool {
	form := formOf(w)
	rec := s.table.Load().record(w)
	if setIn(form, rec, holder, before, after) {
		if after == 0 {
			s.narrow(w, slot)
		}
		return true
	}
	wide := wider(form, x.roster.Load().width())
	into, rest := s.take(wide)
	if into == nil {
		return false
	}
	widen(form, rec, wide, into)
	setIn(wide, into, holder, before, after)
	s.begin()
	s.put(slot, w>>restBits<<restBits|rest)
	s.give(w)
	s.end()
	return true
}

// narrow moves a block with few remaining holders to the smallest form, or erases its
// word if no holder remains. It reports whether it erased the word.
func (s *segment) narrow(w uint64, slot int) bool {
	form := formOf(w)
	entries, n := few(form, s.table.Load().record(w))
	if n > perWord || n > 1 && form == formList {
		return false
	}
	tag := w >> restBits << restBits
	switch n {
	case 0:
		s.erase(slot)
		s.begin()
		s.give(w)
		s.end()
		return true
	case 1:
		s.begin()
		s.put(slot, tag|entries[0])
		s.give(w)
		s.end()
	default:
		rec, rest := s.take(formList)
		if rec == nil {
			return false
		}
		for i, e := range entries[:n] {
			atomic.StoreUint64(&rec[0], rec[0]|e<<(i*entryBits))
		}
		s.begin()
		s.put(slot, tag|rest)
		s.give(w)
		s.end()
	}
	return false
}

// sweep removes the holders in gone from a segment, adds the number of removed entries
// of each to left, and frees memory that is no longer needed.
func (s *segment) sweep(gone []uint64, left []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return
	}
	for slot := 0; slot < len(t.slots); {
		// Erasing may move another word into this slot.
		if slot%bucket == 0 || !s.sweepSlot(t.slots[slot], slot, gone, left) {
			slot++
		}
	}
	switch {
	case s.used == 0:
		s.table.Store(nil)
		s.places = nil
	case int(s.used) < t.room()/3:
		s.resize(int(s.used) * 9 / 8)
	}
}

// sweepSlot is sweep for the word in one slot. It reports whether the word was erased.
func (s *segment) sweepSlot(w uint64, slot int, gone []uint64, left []int) bool {
	if w == 0 {
		return false
	}
	form := formOf(w)
	if form == 0 {
		h := holderOf(w)
		if !has(gone, h) {
			return false
		}
		left[h]++
		s.erase(slot)
		return true
	}
	rec, found := s.table.Load().record(w), false
	drop := func(h, flags uint64) {
		if flags != 0 && has(gone, h) {
			setIn(form, rec, h, flags, 0)
			left[h]++
			found = true
		}
	}
	if form < formSet {
		for _, w := range rec {
			for ; w != 0; w >>= entryBits {
				drop(holderOf(w), w&flagMask)
			}
		}
	} else {
		for i := range min(len(gone), len(rec)/flagBits) {
			for m := gone[i]; m != 0; m &= m - 1 {
				h := uint64(i*64 + bits.TrailingZeros64(m))
				drop(h, flagsIn(form, rec, h))
			}
		}
	}
	return found && s.narrow(w, slot)
}

// has reports whether a bit set has a bit.
func has(set []uint64, bit uint64) bool {
	return bit/64 < uint64(len(set)) && set[bit/64]>>(bit%64)&1 != 0
}
