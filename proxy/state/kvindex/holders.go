package kvindex

import (
	"math/bits"
	"sync/atomic"
)

// The records of a segment hold the holders of blocks with several holders. Forms 1 to
// 4 are lists of 1, 2, 4 and 8 words with three entries each. An entry is holder 16 |
// flags 4 as in a word, and 0 if free. Forms 5 to 15 are bit sets, 64 holders wide for
// form 5 and twice as wide for each further form: four planes of width/64 words, one
// for each flag.
const (
	formList  = 1
	formLists = 4
	formSet   = 5
	forms     = 16
	entryBits = 20
	entryMask = 1<<entryBits - 1
	perWord   = 3
)

// recordWords returns the length of a record of a form in words.
func recordWords(form uint64) int {
	if form < formSet {
		return 1 << (form - formList)
	}
	return 4 << (form - formSet)
}

// places tracks which records of a segment are in use. Guarded by the segment's mu.
type places struct {
	used uint32        // words ever used
	free [forms]uint32 // first free record of each form, plus 1; the first word of a free record has the next free record
}

// record returns the words of the record that a word refers to. They may be changed
// under the segment's mu, or read between two reads of seq. It is nil if a writer has
// changed the table in the meantime.
func (t *table) record(w uint64) []uint64 {
	from := int(w & refMask)
	to := from + recordWords(formOf(w))
	if t == nil || to > len(t.records) {
		return nil
	}
	return t.records[from:to:to]
}

// take returns a cleared record of a form, and the rest of a word that refers to the
// record. The record is nil if the segment is full. take may replace the table by a table
// with the same slots. The caller holds mu.
func (s *segment) take(form uint64) (rec []uint64, rest uint64) {
	if s.places == nil {
		s.places = new(places)
	}
	p, t, n := s.places, s.table.Load(), recordWords(form)
	align := uint32(min(n, bucket)) // a record then spans the minimum of cache lines
	from := (p.used + align - 1) &^ (align - 1)
	switch {
	case p.free[form] != 0:
		from = p.free[form] - 1
		p.free[form] = uint32(t.records[from])
	case from > refMask:
		return nil, 0
	default:
		gap := p.used
		if p.used = from + uint32(n); int(p.used) > len(t.records) {
			wider := *t
			wider.records = append([]uint64(nil), make([]uint64, p.used+p.used/4)...)
			wider.records = wider.records[:cap(wider.records)]
			clear(wider.records[copy(wider.records, t.records):])
			t = &wider
			s.table.Store(t)
		}
		for ; gap < from; gap++ { // the gap is used for the shortest lists
			t.records[gap], p.free[formList] = uint64(p.free[formList]), gap+1
		}
	}
	rec = t.records[from : int(from)+n : int(from)+n]
	for i := range rec {
		atomic.StoreUint64(&rec[i], 0)
	}
	return rec, form<<formShift | uint64(from)
}

// give frees the record that a word refers to. A reader may still be reading the record,
// so the caller encloses give and the change of the word in begin and end.
func (s *segment) give(w uint64) {
	first := &s.table.Load().record(w)[0]
	free := &s.places.free[formOf(w)]
	atomic.StoreUint64(first, uint64(*free))
	*free = uint32(w&refMask) + 1
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

// setIn sets the flags of a holder in a record. It returns false if the record has no
// room for it.
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

// few returns the entries of a record if there are at most three, and their number.
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

// wider returns the form that replaces form if it has no room for a holder: the next
// list if that is smaller than a bit set of width words, else the bit set.
func wider(form uint64, width int) uint64 {
	if form < formLists && recordWords(form+1) < flagBits*width {
		return form + 1
	}
	return formSet + uint64(bits.Len(uint(width-1)))
}

// widen copies a record into a larger one.
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
