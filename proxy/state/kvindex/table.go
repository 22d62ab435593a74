package kvindex

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// The index is divided into segments by the first bits of a block's hash. A segment is
// an open-addressing table of words, one for each block, in buckets of one cache line:
//
//	tag 40 | form 4 | rest 20
//
// The tag is the next 40 bits of the hash. With form 0 the block has one holder, and
// rest is the holder's number (16 bits) and flags (4). With other forms rest is the
// position of a record of holders (holders.go).
//
// The first word of a bucket has a byte, the mark, for each of the seven other words: 0
// for a free word, else the next seven bits of the hash with the top bit set. Comparing
// the marks shows which word to read. So 55 bits of a hash identify a block: among 10
// million blocks, one look-up in several thousand million finds a wrong one.
//
// Writers of a segment are serialized by its mutex. Readers take no lock: reading one
// word is atomic, and a reader of more than one word compares seq before and after.
// Tables grow by a quarter, segment by segment, so that memory never doubles.
const (
	segmentBits  = 8
	segmentShift = 64 - segmentBits
	segmentCount = 1 << segmentBits
	tagBits      = 40
	markBits     = 7
	keyBits      = tagBits + markBits
	keyShift     = segmentShift - keyBits
	keyMask      = 1<<keyBits - 1
	restBits     = 64 - tagBits
	formShift    = 20
	formMask     = 15
	refMask      = 1<<formShift - 1
	bucket       = 8          // words of a bucket, including the marks
	perBucket    = bucket - 1 // blocks of a bucket
	marksTaken   = 1<<7 | 1<<15 | 1<<23 | 1<<31 | 1<<39 | 1<<47 | 1<<55
	marksOne     = marksTaken >> 7
)

// The flags of a holder: the tiers that hold the block, as 1<<Tier, and whether the
// block is only expected there.
const (
	flagGPU   = 1 << GPU
	flagGuess = 8
	flagBits  = 4
	flagMask  = 1<<flagBits - 1
)

// keyOf returns the part of a block's hash by which a segment identifies the block: tag
// 40 | mark 7.
func keyOf(h Hash) uint64 { return uint64(h) >> keyShift & keyMask }

// markOf returns the mark of a key.
func markOf(key uint64) uint64 { return key&(1<<markBits-1) | 1<<markBits }

// formOf returns the form of a word, 0 for a single holder.
func formOf(w uint64) uint64 { return w >> formShift & formMask }

// holderOf returns the holder in a word or a list entry.
func holderOf(e uint64) uint64 { return e >> flagBits & 0xffff }

// segment is one part of the index, on its own cache line.
type segment struct {
	mu     sync.Mutex            // held by writers
	seq    atomic.Uint32         // odd while words move or records change owner
	used   int32                 // words in the table; guarded by mu
	table  atomic.Pointer[table] // nil before the first block
	places *places               // nil before the first record; guarded by mu
	_      [32]byte
}

// table holds the words of a segment. A block that does not fit into its own bucket is
// in the next bucket with room: all buckets from its own to that one are full.
type table struct {
	buckets uint64
	slots   []uint64
	records []uint64 // of blocks with several holders (holders.go)
}

// newTable returns a table with room for at least the given number of words.
func newTable(words int) *table {
	n := (words*8/7/perBucket + 1) * bucket
	slots := append([]uint64(nil), make([]uint64, n)...)
	slots = slots[:cap(slots)/bucket*bucket] // use the memory that the allocator has rounded up to
	clear(slots[n:])
	return &table{buckets: uint64(len(slots) / bucket), slots: slots}
}

// room returns the maximum number of words: some stay free to end a search.
func (t *table) room() int { return int(t.buckets) * perBucket * 7 / 8 }

// home returns the first slot of a key's own bucket.
func (t *table) home(key uint64) uint64 {
	return (key >> (keyBits - 32) * t.buckets) >> 32 * bucket
}

// homeOf is home for the key of a word.
func (t *table) homeOf(w uint64) uint64 { return t.home(w >> restBits << markBits) }

// find returns the word of a key and its slot, or 0.
func (t *table) find(key uint64) (w uint64, slot int) {
	if t == nil {
		return 0, 0
	}
	return t.findFrom(t.home(key), key)
}

// findFrom is find for a key whose home is known.
func (t *table) findFrom(home, key uint64) (w uint64, slot int) {
	mark, tag := markOf(key)*marksOne, key>>markBits
	for b, turns := home, t.buckets; turns > 0; turns-- {
		line := (*[bucket]uint64)(t.slots[b:])
		marks := atomic.LoadUint64(&line[0])
		// The top bit of each equal byte is set, and possibly that of the byte above
		// it.
		x := marks ^ mark
		for m := (x - marksOne) &^ x & marksTaken; m != 0; m &= m - 1 {
			i := bits.TrailingZeros64(m)/8 + 1
			if w := atomic.LoadUint64(&line[i&(bucket-1)]); w>>restBits == tag && w != 0 {
				return w, int(b) + i
			}
		}
		if marks&marksTaken != marksTaken {
			return 0, 0
		}
		if b += bucket; b == uint64(len(t.slots)) {
			b = 0
		}
	}
	return 0, 0
}

// add adds a word of a new key to the table, which must have room.
func (t *table) add(w, mark uint64) {
	for b := t.homeOf(w); ; {
		marks := t.slots[b]
		if m := ^marks & marksTaken; m != 0 {
			t.put(int(b)+bits.TrailingZeros64(m)/8+1, w, mark)
			return
		}
		if b += bucket; b == uint64(len(t.slots)) {
			b = 0
		}
	}
}

// put sets the word and the mark of a slot. 0 and 0 empty it.
func (t *table) put(slot int, w, mark uint64) {
	if w != 0 {
		atomic.StoreUint64(&t.slots[slot], w)
	}
	at, shift := slot&^(bucket-1), uint(slot&(bucket-1)-1)*8
	if marks := t.slots[at]; marks>>shift&0xff != mark {
		atomic.StoreUint64(&t.slots[at], marks&^(0xff<<shift)|mark<<shift)
	}
	if w == 0 {
		atomic.StoreUint64(&t.slots[slot], w)
	}
}

// mark is the mark of a slot.
func (t *table) mark(slot int) uint64 {
	return t.slots[slot&^(bucket-1)] >> (uint(slot&(bucket-1)-1) * 8) & 0xff
}

// begin and end enclose a change that readers of several words must not see partially.
func (s *segment) begin() { s.seq.Add(1) }
func (s *segment) end()   { s.seq.Add(1) }

// insert adds the word of a new key. The caller holds mu.
func (s *segment) insert(w, mark uint64) {
	t := s.table.Load()
	if t == nil || int(s.used) >= t.room() {
		t = s.resize(int(s.used) + int(s.used)/4 + 1)
	}
	t.add(w, mark)
	s.used++
}

// resize moves all words to a table with room for at least the given number of words.
// Readers of the old table see the old state. The caller holds mu.
func (s *segment) resize(words int) *table {
	t := newTable(words)
	if old := s.table.Load(); old != nil {
		for slot, w := range old.slots {
			if w != 0 && slot%bucket != 0 {
				t.add(w, old.mark(slot))
			}
		}
		t.records = old.records
	}
	s.table.Store(t)
	return t
}

// erase empties a slot and moves words of later buckets up, because a search ends at
// the first bucket with a free slot. The caller holds mu.
func (s *segment) erase(slot int) {
	t := s.table.Load()
	s.used--
	hole := slot // the slot keeps its word until the end, so it counts as used
	for t.full(hole / bucket) {
		from := t.displaced(hole / bucket)
		if from < 0 {
			break
		}
		if hole == slot {
			s.begin()
		}
		t.put(hole, t.slots[from], t.mark(from))
		hole = from
	}
	t.put(hole, 0, 0)
	if hole != slot {
		s.end()
	}
}

// full reports whether a bucket has no free slot.
func (t *table) full(b int) bool { return t.slots[b*bucket]&marksTaken == marksTaken }

// displaced returns the slot of a word that is in a bucket after b and whose home is b or
// an earlier bucket; -1 if there is no such word.
func (t *table) displaced(b int) int {
	n := int(t.buckets)
	for far := 1; far < n; far++ {
		at := b + far
		if at >= n {
			at -= n
		}
		for slot := at*bucket + 1; slot < (at+1)*bucket; slot++ {
			w := t.slots[slot]
			if w == 0 {
				continue
			}
			away := at - int(t.homeOf(w)/bucket)
			if away < 0 {
				away += n
			}
			if away >= far {
				return slot
			}
		}
		if !t.full(at) {
			break
		}
	}
	return -1
}
