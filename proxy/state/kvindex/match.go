package kvindex

import (
	"math/bits"
	"runtime"
	"sync/atomic"
)

// Match is what one target holds of a prompt: of the leading blocks that it
// holds in any tier, how many have which tier as their best. A block that is
// only expected counts as GPU.
type Match struct{ GPU, CPU, Disk uint32 }

// Blocks is the length of the matched prefix in blocks.
func (m Match) Blocks() uint32 { return m.GPU + m.CPU + m.Disk }

const (
	// chunk is how many blocks are looked up at once, so that the processor
	// fetches their memory at once.
	chunk = 32
	// stackWidth is the width of bit sets, in words, up to which Match does
	// without the heap: 1,024 holders.
	stackWidth = 16
	// patience is how often a reader looks again before it waits for the
	// writers of a segment.
	patience = 64
)

// Match fills out[t], for every slot t < len(out), with what t holds of the
// prompt whose blocks are given. It allocates nothing up to 1,024 targets.
func (x *Index) Match(blocks []Hash, out []Match) {
	clear(out)
	r := x.roster.Load()
	var room [4 * stackWidth]uint64
	var copied [flagBits * stackWidth]uint64
	w := walk{roster: r, out: out, sets: room[:], copied: copied[:]}
	w.begin()
	for at := 0; at < len(blocks) && w.alive > 0; at += chunk {
		x.step(&w, blocks[at:min(at+chunk, len(blocks))], uint32(at))
	}
	w.end(uint32(len(blocks)))
	if now := x.roster.Load(); now != r {
		w.recheck(now)
	}
}

// step walks on over at most chunk blocks, of which the first is number at.
func (x *Index) step(w *walk, blocks []Hash, at uint32) {
	var words [chunk]uint64
	var seqs [chunk]uint32
	x.touch(blocks)
	for i, h := range blocks {
		s := &x.segments[h>>segmentShift]
		seqs[i] = s.seq.Load()
		words[i], _ = s.table.Load().find(tagOf(h))
		if form := formOf(words[i]); form != 0 {
			if rec := s.sets.Load().record(words[i]); rec != nil {
				atomic.LoadUint64(&rec[0])
			}
		}
	}
	for i, h := range blocks {
		s, word := &x.segments[h>>segmentShift], words[i]
		rec := w.read(s, word)
		if seqs[i]&1 != 0 || s.seq.Load() != seqs[i] || formOf(word) != 0 && rec == nil {
			word, rec = w.settle(s, tagOf(h))
		}
		n := at + uint32(i)
		switch form := formOf(word); {
		case word == 0:
			w.end(n)
		case form == 0:
			w.single(holderOf(word), word&flagMask, n)
		case form < formSet:
			w.list(rec, n)
		default:
			w.set(rec, n)
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
	alive  int // holders that have all blocks so far
	sets   []uint64
	live   []uint64 // which these are
	// in has for each tier which of them had it as their best for the last
	// block.
	in     [tiers][]uint64
	copied []uint64 // room for a record
}

// begin makes all targets live that out has room for.
func (w *walk) begin() {
	n := len(w.roster.alive)
	if 4*n > len(w.sets) {
		w.sets = make([]uint64, 4*n)
	}
	w.live = w.sets[:n]
	for k := range w.in {
		w.in[k] = w.sets[(k+1)*n : (k+2)*n]
	}
	for i, word := range w.roster.alive {
		w.live[i] = word
		for m := word; m != 0; m &= m - 1 {
			if int(w.roster.target[i*64+bits.TrailingZeros64(m)]) >= len(w.out) {
				w.live[i] &^= m & -m
			}
		}
		w.alive += bits.OnesCount64(w.live[i])
	}
}

// end takes all holders out of the walk before block n.
func (w *walk) end(n uint32) {
	for i := range w.live {
		w.lose(i, w.live[i], n)
	}
}

// lose takes the holders with the bits m of word i out of the walk before
// block n.
func (w *walk) lose(i int, m uint64, n uint32) {
	w.alive -= bits.OnesCount64(m)
	w.live[i] &^= m
	for ; m != 0; m &= m - 1 {
		w.turn(uint64(i*64+bits.TrailingZeros64(m)), tiers, n)
	}
}

// turn notes that from block n on the best tier of a holder is another. What
// a tier has is added up as the numbers of the blocks at which runs in it end,
// less those at which they begin.
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

// best is the best tier of a holder with these flags.
func best(flags uint64) Tier {
	switch {
	case flags&(flagGPU|flagGuess) != 0:
		return GPU
	case flags&(1<<CPU) != 0:
		return CPU
	}
	return Disk
}

// keep says that a live holder has block n, with these flags.
func (w *walk) keep(h, flags uint64, n uint32) {
	if tier := best(flags); !has(w.in[tier], h) {
		w.turn(h, tier, n)
	}
}

// single goes on with block n, which has one holder.
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
}

// list goes on with block n, whose holders are in a list.
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

// set goes on with block n, whose holders are a bit set.
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

// read copies the record of a word, if it has one. It is nil if a writer
// overtook the reader.
func (w *walk) read(s *segment, word uint64) []uint64 {
	if formOf(word) == 0 {
		return nil
	}
	rec := s.sets.Load().record(word)
	if rec == nil {
		return nil
	}
	if len(rec) > len(w.copied) {
		w.copied = make([]uint64, len(rec))
	}
	for i := range rec {
		w.copied[i] = atomic.LoadUint64(&rec[i])
	}
	return w.copied[:len(rec)]
}

// settle reads a word and its record again until no writer comes between.
func (w *walk) settle(s *segment, tag uint64) (word uint64, rec []uint64) {
	for range patience {
		seq := s.seq.Load()
		if seq&1 != 0 {
			runtime.Gosched()
			continue
		}
		word, _ = s.table.Load().find(tag)
		rec = w.read(s, word)
		if s.seq.Load() == seq && (formOf(word) == 0 || rec != nil) {
			return word, rec
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	word, _ = s.table.Load().find(tag)
	return word, w.read(s, word)
}

// recheck takes back what was found for targets that restarted or left during
// the walk: their holder numbers may be another's by now.
func (w *walk) recheck(now *roster) {
	for t := range w.out {
		if t >= len(now.holder) || t >= len(w.roster.holder) || now.holder[t] != w.roster.holder[t] {
			w.out[t] = Match{}
		}
	}
}
