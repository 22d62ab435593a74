package kvindex

import (
	"math/bits"
	"sync/atomic"
)

// The records of a segment: the holders of blocks that have several. Forms 1
// to 4 are lists of 1, 2, 4 and 8 words with three entries each, an entry
// being holder 16 | flags 4 as in a word, 0 if free. Forms 5 to 15 are bit
// sets, 64 holders wide for form 5 and twice as wide for each one after it:
// four planes of width/64 words, one for each flag.
const (
	formList  = 1
	formLists = 4
	formSet   = 5
	forms     = 16
	entryBits = 20
	entryMask = 1<<entryBits - 1
	perWord   = 3
	maxRecord = 4 << (forms - 1 - formSet)
)

// recordWords is the length of a record of a form in words.
func recordWords(form uint64) int {
	if form < formSet {
		return 1 << (form - formList)
	}
	return 4 << (form - formSet)
}

// sets are the records of one segment, by form.
type sets [forms]slab

// slab holds the records of one form. Its places are used again.
type slab struct {
	words atomic.Pointer[[]uint64]
	used  uint32 // places ever taken; guarded by the segment's mu
	free  uint32 // first free place plus 1; its first word has the next
}

// record returns the words of the record that a word refers to, to change
// under the segment's mu or to read between two looks at seq. It is nil if
// the reader was overtaken.
func (s *sets) record(w uint64) []uint64 {
	form, n := formOf(w), recordWords(formOf(w))
	all := s[form].words.Load()
	at := int(w&refMask) * n
	if all == nil || at+n > len(*all) {
		return nil
	}
	return (*all)[at : at+n : at+n]
}

// take returns a cleared record of a form and the rest of a word that refers
// to it, or nil if the form has no place left.
func (s *sets) take(form uint64) (rec []uint64, rest uint64) {
	b, n := &s[form], recordWords(form)
	var all []uint64
	if p := b.words.Load(); p != nil {
		all = *p
	}
	place := b.used
	switch {
	case b.free != 0:
		place = b.free - 1
		b.free = uint32(all[int(place)*n])
	case place > refMask:
		return nil, 0
	case int(place+1)*n > len(all):
		grown := append([]uint64(nil), make([]uint64, (int(place)+int(place)/4+1)*n)...)
		grown = grown[:cap(grown)/n*n]
		clear(grown[copy(grown, all):])
		all = grown
		b.words.Store(&grown)
		b.used++
	default:
		b.used++
	}
	at := int(place) * n
	rec = all[at : at+n : at+n]
	for i := range rec {
		atomic.StoreUint64(&rec[i], 0)
	}
	return rec, form<<formShift | uint64(place)
}

// give takes back the record that a word refers to. A reader may still look at
// it: the caller encloses this and the change of the word by begin and end.
func (s *sets) give(w uint64) {
	b := &s[formOf(w)]
	rec := s.record(w)
	atomic.StoreUint64(&rec[0], uint64(b.free))
	b.free = uint32(w&refMask) + 1
}

// flagsIn returns the flags of a holder in a record of a form.
func flagsIn(form uint64, rec []uint64, holder uint64) uint64 {
	if form >= formSet {
		n := uint64(len(rec) / flagBits)
		if holder/64 >= n {
			return 0
		}
		var flags uint64
		for k := range uint64(flagBits) {
			flags |= rec[k*n+holder/64] >> (holder % 64) & 1 << k
		}
		return flags
	}
	for _, w := range rec {
		for ; w != 0; w >>= entryBits {
			if w>>flagBits&0xffff == holder && w&flagMask != 0 {
				return w & flagMask
			}
		}
	}
	return 0
}

// setIn sets the flags of a holder in a record; it returns false if the record
// has no room for it.
func setIn(form uint64, rec []uint64, holder, before, after uint64) bool {
	if form >= formSet {
		n := uint64(len(rec) / flagBits)
		if holder/64 >= n {
			return false
		}
		for k := range uint64(flagBits) {
			w := &rec[k*n+holder/64]
			if bit := uint64(1) << (holder % 64); (before^after)>>k&1 != 0 {
				atomic.StoreUint64(w, *w^bit)
			}
		}
		return true
	}
	old, entry := uint64(0), uint64(0)
	if before != 0 {
		old = holder<<flagBits | before
	}
	if after != 0 {
		entry = holder<<flagBits | after
	}
	for i, w := range rec {
		for at := uint(0); at < perWord*entryBits; at += entryBits {
			if w>>at&entryMask == old {
				atomic.StoreUint64(&rec[i], w&^(entryMask<<at)|entry<<at)
				return true
			}
		}
	}
	return false
}

// few returns the entries of a record if there are at most three, and how many
// there are.
func few(form uint64, rec []uint64) (entries [perWord]uint64, n int) {
	put := func(e uint64) {
		if n < perWord {
			entries[n] = e
		}
		n++
	}
	if form < formSet {
		for _, w := range rec {
			for ; w != 0; w >>= entryBits {
				if e := w & entryMask; e != 0 {
					put(e)
				}
			}
		}
		return entries, n
	}
	width := len(rec) / flagBits
	for i := range width {
		for m := rec[i] | rec[width+i] | rec[2*width+i] | rec[3*width+i]; m != 0; m &= m - 1 {
			holder := uint64(i*64 + bits.TrailingZeros64(m))
			put(holder<<flagBits | flagsIn(form, rec, holder))
			if n > perWord {
				return entries, n
			}
		}
	}
	return entries, n
}

// wider is the form for a record of form that has no room for a holder: the
// next list while that is smaller than a bit set of width words, else that.
func wider(form uint64, width int) uint64 {
	if form < formLists && recordWords(form+1) < flagBits*width {
		return form + 1
	}
	return formSet + uint64(bits.Len(uint(width-1)))
}

// widen copies a record into a roomier one.
func widen(form uint64, rec []uint64, wide uint64, into []uint64) {
	switch {
	case wide < formSet:
		for i, w := range rec {
			atomic.StoreUint64(&into[i], w)
		}
	case form < formSet:
		for _, w := range rec {
			for ; w != 0; w >>= entryBits {
				if e := w & entryMask; e != 0 {
					setIn(wide, into, holderOf(e), 0, e&flagMask)
				}
			}
		}
	default:
		n, m := len(rec)/flagBits, len(into)/flagBits
		for k := range flagBits {
			for i := range n {
				atomic.StoreUint64(&into[k*m+i], rec[k*n+i])
			}
		}
	}
}
