package kvindex

import "unsafe"

// Tables are far larger than a processor's caches: a look-up mostly waits for
// memory. So whoever looks many blocks up asks for their memory first, all at
// once, and then has other work to do while it comes: twice as fast as to look
// them up one after the other.

// lines are addresses to fetch.
type lines [chunk]unsafe.Pointer

// fetch asks for the table memory of at most chunk blocks.
func (x *Index) fetch(blocks []Hash) {
	var at lines
	n := 0
	for _, h := range blocks[:min(chunk, len(blocks))] {
		if t := x.segments[h>>segmentShift].table.Load(); t != nil {
			at[n] = unsafe.Pointer(&t.slots[t.home(keyOf(h))])
			n++
		}
	}
	prefetch(&at, n)
}

// fetch asks for the memory of at most chunk keys.
func (m *hashMap) fetch(keys []uint64) {
	if m.n == 0 {
		return
	}
	var at lines
	n := 0
	for _, key := range keys[:min(chunk, len(keys))] {
		if p, b := m.spot(key); len(p.pairs) > 0 {
			at[n] = unsafe.Pointer(&p.pairs[b*line])
			n++
		}
	}
	prefetch(&at, n)
}
