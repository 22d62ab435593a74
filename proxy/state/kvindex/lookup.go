package kvindex

import "unsafe"

// lookUp looks the blocks up in chunks, and calls over for each chunk. at is the number
// of the chunk's first block. While the words of one chunk are looked up, the memory of
// the next chunk's words is being fetched; the same holds for the records.
func (x *Index) lookUp(w *walk, blocks []Hash, over func(at int, found *looked)) {
	x.aim(blocks, &w.found[0])
	for n, at := 0, 0; at < len(blocks)+chunk && w.alive > 0; n, at = n+1, at+chunk {
		if at+chunk < len(blocks) {
			x.aim(blocks[at+chunk:], &w.found[(n+1)%stages])
		}
		if at < len(blocks) {
			x.look(blocks[at:], &w.found[n%stages])
		}
		if at >= chunk {
			over(at-chunk, &w.found[(n-1)%stages])
		}
	}
}

// looked holds, for a chunk of blocks, the tables and buckets, seq before each read,
// the words, and the records of words that have one.
type looked struct {
	seqs    [chunk]uint32
	tables  [chunk]*table
	homes   [chunk]uint64
	words   [chunk]uint64
	records [chunk][]uint64
}

// aim computes the buckets of at most chunk blocks and prefetches their memory.
func (x *Index) aim(blocks []Hash, found *looked) {
	var at lines
	n := 0
	for i, h := range blocks[:min(chunk, len(blocks))] {
		s := &x.segments[h>>segmentShift]
		found.seqs[i] = s.seq.Load()
		t := s.table.Load()
		if found.tables[i] = t; t != nil {
			home := t.home(keyOf(h))
			found.homes[i] = home
			at[n] = unsafe.Pointer(&t.slots[home])
			n++
		}
	}
	prefetch(&at, n)
}

// look looks up at most chunk blocks and prefetches their records. It uses the table
// that is current after the read of the word, because an earlier one may lack the
// record.
func (x *Index) look(blocks []Hash, found *looked) {
	var at lines
	n := 0
	for i, h := range blocks[:min(chunk, len(blocks))] {
		found.words[i], found.records[i] = 0, nil
		t := found.tables[i]
		if t == nil {
			continue
		}
		word, _ := t.findFrom(found.homes[i], keyOf(h))
		found.words[i] = word
		if formOf(word) != 0 {
			if rec := x.segments[h>>segmentShift].table.Load().record(word); rec != nil {
				found.records[i] = rec
				at[n] = unsafe.Pointer(&rec[0])
				n++
			}
		}
	}
	if n > 0 {
		prefetch(&at, n)
	}
}
