package conversation

import "math/bits"

// index is a hash table of fixed size with open addressing. A cell has the upper half of
// a spread hash, which also determines its place, and a number above 0: the number of an
// entry, or a count. If two hashes have the same upper half, their entries show the
// difference. Counts of two such hashes are added, which costs an unnecessary search.
// There are at least twice as many cells as numbers.
type index struct {
	cells []uint64 // one empty cell until the first number is added
	shift uint     // of a spread hash down to the number of its cell
	width int      // 1<<width cells are needed for all that may ever be added
}

// newIndex returns an index for up to most numbers. The cells are allocated when the first
// number is added, because a proxy may never need some of its indexes.
func newIndex(most int) index {
	return index{cells: make([]uint64, 1), shift: 64, width: max(bits.Len(uint(2*most-1)), 1)}
}

// allocate makes all cells if they are missing.
func (x *index) allocate() {
	if len(x.cells) == 1 {
		x.cells, x.shift = make([]uint64, 1<<x.width), uint(64-x.width)
	}
}

// spread makes numbers differ in their upper bits.
func spread(hash uint64) uint64 { return hash * 0x9E3779B97F4A7C15 }

func (x *index) step(i uint64) uint64 { return (i + 1) & uint64(len(x.cells)-1) }

// put adds a number.
func (x *index) put(hash uint64, n uint32) {
	x.allocate()
	h := spread(hash)
	i := h >> x.shift
	for x.cells[i] != 0 {
		i = x.step(i)
	}
	x.cells[i] = h>>32<<32 | uint64(n)
}

// remove removes the number n that was put with hash.
func (x *index) remove(hash uint64, n uint32) {
	h := spread(hash)
	i, cell := h>>x.shift, h>>32<<32|uint64(n)
	for x.cells[i] != cell {
		i = x.step(i)
	}
	x.clear(i)
}

// count returns the cell of a count, or the empty cell for it.
func (x *index) count(hash uint64) uint64 {
	h := spread(hash)
	i := h >> x.shift
	for x.cells[i] != 0 && x.cells[i]>>32 != h>>32 {
		i = x.step(i)
	}
	return i
}

// has reports whether a count is above 0.
func (x *index) has(hash uint64) bool { return x.cells[x.count(hash)] != 0 }

// times returns a count.
func (x *index) times(hash uint64) uint32 { return uint32(x.cells[x.count(hash)]) }

func (x *index) add(hash uint64) {
	x.allocate()
	i := x.count(hash)
	if x.cells[i] == 0 {
		x.cells[i] = spread(hash) >> 32 << 32
	}
	x.cells[i]++
}

func (x *index) sub(hash uint64) {
	i := x.count(hash)
	if x.cells[i]--; uint32(x.cells[i]) == 0 {
		x.clear(i)
	}
}

// clear empties a cell. find stops at an empty cell, so clear moves later numbers into
// the gap if find could not reach them any more.
func (x *index) clear(gap uint64) {
	mask := uint64(len(x.cells) - 1)
	for i := x.step(gap); x.cells[i] != 0; i = x.step(i) {
		home := x.cells[i] >> x.shift
		if (i-home)&mask >= (i-gap)&mask {
			x.cells[gap], gap = x.cells[i], i
		}
	}
	x.cells[gap] = 0
}

// find returns the number of the entry of a hash, 0 if there is none.
func (t *Table) find(hash uint64, byID bool) uint32 {
	x := &t.index
	h := spread(hash)
	for i := h >> x.shift; x.cells[i] != 0; i = x.step(i) {
		if x.cells[i]>>32 == h>>32 {
			n := uint32(x.cells[i])
			if e := &t.entries[n]; e.hash == hash && e.byID == byID {
				return n
			}
		}
	}
	return 0
}
