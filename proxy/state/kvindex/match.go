package kvindex

import (
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"
)

// Match counts the leading blocks of a prompt that one target holds in any tier, by the
// best tier of each block. A block that is only expected counts as GPU.
type Match struct{ GPU, CPU, Disk uint32 }

// Blocks returns the length of the matched prefix in blocks.
func (m Match) Blocks() uint32 { return m.GPU + m.CPU + m.Disk }

const (
	// chunk is the number of blocks that are looked up together, so that the processor
	// fetches their memory in parallel.
	chunk = 32
	// stages is the number of chunks in progress: one aimed at, one looked up, one
	// walked over.
	stages = 3
	// patience is how often a reader retries before it waits for the writers of a
	// segment.
	patience = 64
)

// Match sets out[t], for every slot t < len(out), to the counts of the given blocks that
// t holds. It takes no lock and, in the steady state, allocates nothing. For a long
// prompt it does not look at every block (leap.go).
func (x *Index) Match(blocks []Hash, out []Match) {
	if len(blocks) < leapFrom || x.wary() {
		x.matchAll(blocks, out)
		return
	}
	x.matchLeaping(blocks, out)
	if x.leaps.Add(1)%checkEvery == 0 {
		x.lookForHoles(blocks, out)
	}
}

// matchAll is Match with a look at every block.
func (x *Index) matchAll(blocks []Hash, out []Match) {
	w := x.beginWalk(out)
	x.lookUp(w, blocks, func(at int, found *looked) { x.step(w, blocks[at:], found, uint32(at)) })
	x.endWalk(w, len(blocks))
}

func (x *Index) beginWalk(out []Match) *walk {
	clear(out)
	w := x.walks.Get().(*walk)
	w.begin(x.roster.Load(), out)
	return w
}

// endWalk ends a walk over n blocks.
func (x *Index) endWalk(w *walk, n int) {
	w.end(uint32(n))
	if now := x.roster.Load(); now != w.roster {
		w.recheck(now)
	}
	w.roster, w.out = nil, nil
	x.walks.Put(w)
}

// step continues the walk over at most chunk blocks that were looked up. at is the
// number of the first one.
func (x *Index) step(w *walk, blocks []Hash, found *looked, at uint32) {
	for i, h := range blocks[:min(chunk, len(blocks))] {
		word, n := found.words[i], at+uint32(i)
		if rest := word & (1<<restBits - 1); rest == w.same && rest != 0 {
			continue
		}
		s, seq := &x.segments[h>>segmentShift], found.seqs[i]
		rec := found.records[i]
		again := rec != nil && w.again(rec)
		if !again {
			rec = w.copy(rec)
		}
		if seq&1 != 0 || s.seq.Load() != seq || formOf(word) != 0 && rec == nil {
			word, rec = w.settle(s, keyOf(h))
			again = rec != nil && slices.Equal(rec, w.last)
		}
		if again {
			continue
		}
		w.same, w.last = 0, w.last[:0]
		switch form := formOf(word); {
		case word == 0:
			w.end(n)
		case form == 0:
			w.single(holderOf(word), word&flagMask, n)
		case form < formSet:
			w.list(rec, n)
			w.last, w.copied = rec, w.last
		default:
			w.set(rec, n)
			w.last, w.copied = rec, w.last
		}
		if w.alive == 0 {
			return
		}
	}
}

// walk is the state of one Match.
type walk struct {
	roster *roster
	out    []Match
	alive  int // number of holders that have all blocks so far
	// A block with the same holders as the previous block changes nothing. For the
	// previous block, same is the rest of its word if it has one holder, else 0, and
	// last is its record, else empty.
	same uint64
	last []uint64
	// Bit sets by holder number: the holders that are still alive, and for each tier
	// those whose best tier was that one for the previous block.
	live   []uint64
	in     [tiers][]uint64
	copied []uint64 // memory for a copied record
	found  [stages]looked

	// For leaping walks: the last block of each group, the group that is being walked
	// over, and memory for comparisons.
	ends     []Hash
	group    looked
	compared [2][]Match
}

// begin marks all targets for which out has room as live.
func (w *walk) begin(r *roster, out []Match) {
	w.roster, w.out, w.alive = r, out, 0
	w.same, w.last = 0, w.last[:0]
	n := len(r.alive)
	w.live = sized(w.live, n)
	for k := range w.in {
		w.in[k] = sized(w.in[k], n)
		clear(w.in[k])
	}
	copy(w.live, r.alive)
	for i := range w.live {
		if len(out) < len(r.holder) {
			for m := w.live[i]; m != 0; m &= m - 1 {
				if int(r.target[i*64+bits.TrailingZeros64(m)]) >= len(out) {
					w.live[i] &^= m & -m
				}
			}
		}
		w.alive += bits.OnesCount64(w.live[i])
	}
}

// sized returns a slice of n words, reusing s if it is large enough.
func sized(s []uint64, n int) []uint64 {
	if n > cap(s) {
		return make([]uint64, n)
	}
	return s[:n]
}

// end removes all holders from the walk before block n.
func (w *walk) end(n uint32) {
	for i := range w.live {
		w.lose(i, w.live[i], n)
	}
}

// lose removes the holders with the bits m of word i from the walk before block n.
func (w *walk) lose(i int, m uint64, n uint32) {
	w.alive -= bits.OnesCount64(m)
	w.live[i] &^= m
	for ; m != 0; m &= m - 1 {
		w.turn(uint64(i*64+bits.TrailingZeros64(m)), tiers, n)
	}
}

// turn notes that the best tier of a holder changes at block n. The count of a tier is
// the sum of the block numbers at which runs in it end, minus the sum of those at which
// they begin.
func (w *walk) turn(h uint64, tier Tier, n uint32) {
	m := &w.out[w.roster.target[h]]
	counts := [tiers]*uint32{&m.GPU, &m.CPU, &m.Disk}
	i, bit := h/64, uint64(1)<<(h%64)
	for k, c := range counts {
		if w.in[k][i]&bit != 0 {
			*c += n
			w.in[k][i] &^= bit
		}
	}
	if tier < tiers {
		*counts[tier] -= n
		w.in[tier][i] |= bit
	}
}

// best returns the best tier of a holder with these flags.
func best(flags uint64) Tier {
	switch {
	case flags&(flagGPU|flagGuess) != 0:
		return GPU
	case flags&(1<<CPU) != 0:
		return CPU
	}
	return Disk
}

// keep notes that a live holder has block n, with these flags.
func (w *walk) keep(h, flags uint64, n uint32) {
	if tier := best(flags); !has(w.in[tier], h) {
		w.turn(h, tier, n)
	}
}

// single continues with block n, which has one holder.
func (w *walk) single(h, flags uint64, n uint32) {
	if !has(w.live, h) {
		w.end(n)
		return
	}
	if w.alive > 1 {
		for i := range w.live {
			m := w.live[i]
			if uint64(i) == h/64 {
				m &^= 1 << (h % 64)
			}
			w.lose(i, m, n)
		}
	}
	w.keep(h, flags, n)
	w.same = h<<flagBits | flags
}

// list continues with block n, whose holders are in a list.
func (w *walk) list(rec []uint64, n uint32) {
	found := 0
	for _, e := range rec {
		for ; e != 0; e >>= entryBits {
			if e&flagMask != 0 && has(w.live, holderOf(e)) {
				w.keep(holderOf(e), e&flagMask, n)
				found++
			}
		}
	}
	if found == w.alive {
		return
	}
	for i := range w.live {
		m := w.live[i]
		for _, e := range rec {
			for ; e != 0; e >>= entryBits {
				if h := holderOf(e); e&flagMask != 0 && h/64 == uint64(i) {
					m &^= 1 << (h % 64)
				}
			}
		}
		w.lose(i, m, n)
	}
}

// set continues with block n, whose holders are a bit set.
func (w *walk) set(rec []uint64, n uint32) {
	width := len(rec) / flagBits
	for i, live := range w.live {
		if live == 0 {
			continue
		}
		var in [tiers]uint64
		if i < width {
			in[GPU] = (rec[i] | rec[3*width+i]) & live
			in[CPU] = rec[width+i] & live &^ in[GPU]
			in[Disk] = rec[2*width+i] & live &^ in[GPU] &^ in[CPU]
		}
		if m := live &^ (in[GPU] | in[CPU] | in[Disk]); m != 0 {
			w.lose(i, m, n)
		}
		for k := range Tier(tiers) {
			for m := in[k] &^ w.in[k][i]; m != 0; m &= m - 1 {
				w.turn(uint64(i*64+bits.TrailingZeros64(m)), k, n)
			}
		}
	}
}

// again reports whether a record is equal to the last one.
func (w *walk) again(rec []uint64) bool {
	if len(rec) != len(w.last) {
		return false
	}
	for i := range rec {
		if atomic.LoadUint64(&rec[i]) != w.last[i] {
			return false
		}
	}
	return true
}

// read copies the record of a word, if it has one. It returns nil if a writer has
// changed the table in the meantime.
func (w *walk) read(s *segment, word uint64) []uint64 {
	if formOf(word) == 0 {
		return nil
	}
	return w.copy(s.table.Load().record(word))
}

// copy copies a record, which a writer may be changing.
func (w *walk) copy(rec []uint64) []uint64 {
	if rec == nil {
		return nil
	}
	w.copied = sized(w.copied, len(rec))
	for i := range rec {
		w.copied[i] = atomic.LoadUint64(&rec[i])
	}
	return w.copied
}

// settle reads a word and its record until no writer has interfered.
func (w *walk) settle(s *segment, key uint64) (word uint64, rec []uint64) {
	for tries := range patience {
		seq := s.seq.Load()
		if seq&1 != 0 {
			if tries > patience/2 {
				runtime.Gosched() // the writer may need this processor
			}
			continue
		}
		word, _ = s.table.Load().find(key)
		rec = w.read(s, word)
		if s.seq.Load() == seq && (formOf(word) == 0 || rec != nil) {
			return word, rec
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	word, _ = s.table.Load().find(key)
	return word, w.read(s, word)
}

// recheck clears the results of targets that restarted or were dropped during the walk:
// their holder numbers may belong to other targets now.
func (w *walk) recheck(now *roster) {
	for t := range w.out {
		if t >= len(now.holder) || t >= len(w.roster.holder) || now.holder[t] != w.roster.holder[t] {
			w.out[t] = Match{}
		}
	}
}
