package kvindex

import "unsafe"

// Tables are far larger than a processor's caches, so a look-up mostly waits for memory.
// Code that looks many blocks up therefore first prefetches all of their memory, and does
// other work in the meantime. That is twice as fast as separate look-ups.

// lines holds addresses to prefetch.
type lines [chunk]unsafe.Pointer

// fetch prefetches the table memory of at most chunk blocks.
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

// fetch prefetches the memory of at most chunk keys.
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

// fetch prefetches the places of at most chunk blocks.
func (g *guesses) fetch(blocks []Hash) {
	if len(g.places) == 0 {
		return
	}
	var at lines
	blocks = blocks[:min(chunk, len(blocks))]
	for i, h := range blocks {
		at[i] = unsafe.Pointer(&g.places[g.home(keyOfGuess(h))])
	}
	prefetch(&at, len(blocks))
}
