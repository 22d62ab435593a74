package kvindex

import "slices"

// Whoever holds a block of a prompt holds those before it: engines give up the
// end of a prompt before its beginning. So of a long prompt Match looks at the
// last block of each group, and where its holders are those of the group before,
// with the same flags, takes it that the blocks between are no different. The
// groups in which something changes are walked over block by block.
//
// An engine that gives up the middle of a prompt, or whose events were lost, leaves
// a hole that a leap may cross, and what is behind it would count. So one match in
// some is made again in full. If that differs, the next matches all are.
const (
	// stride is how many blocks a group has.
	stride = 8
	// leapFrom is how many blocks a prompt has at least that leaps are worth
	// it for.
	leapFrom = 128
	// checkEvery is how many matches there are to one that is made again in full.
	checkEvery = 64
	// waryFor is how many matches are made in full after a hole.
	waryFor = 4096
)

// wary reports whether a hole was found lately, and counts the match.
func (x *Index) wary() bool { return x.cautious.Load() > 0 && x.cautious.Add(-1) >= 0 }

// matchLeaping is Match that looks at one block of each group.
func (x *Index) matchLeaping(blocks []Hash, out []Match) {
	w := x.beginWalk(out)
	w.ends = w.ends[:0]
	for at := stride - 1; at < len(blocks); at += stride {
		w.ends = append(w.ends, blocks[at])
	}
	if len(blocks)%stride != 0 {
		w.ends = append(w.ends, blocks[len(blocks)-1])
	}
	x.lookUp(w, w.ends, func(at int, found *looked) { x.leap(w, blocks, at, found) })
	x.endWalk(w, len(blocks))
}

// leap walks on over at most chunk groups whose last blocks were looked up, of
// which the first is number at.
func (x *Index) leap(w *walk, blocks []Hash, at int, found *looked) {
	for i := range min(chunk, len(w.ends)-at) {
		if x.unchanged(w, w.ends[at+i], found, i) {
			continue
		}
		first := (at + i) * stride
		group := blocks[first:min(first+stride, len(blocks))]
		x.aim(group, &w.group)
		x.look(group, &w.group)
		x.step(w, group, &w.group, uint32(first))
		if w.alive == 0 {
			return
		}
	}
}

// unchanged reports whether the block that was looked up as number i has the
// holders of the block before the group.
func (x *Index) unchanged(w *walk, block Hash, found *looked, i int) bool {
	if rest := found.words[i] & (1<<restBits - 1); rest == w.same && rest != 0 {
		return true
	}
	seq, rec := found.seqs[i], found.records[i]
	return rec != nil && w.again(rec) && seq&1 == 0 && x.segments[block>>segmentShift].seq.Load() == seq
}

// lookForHoles makes the match again in full. One that differs from two that
// leapt tells of a hole; what changed meanwhile does not.
func (x *Index) lookForHoles(blocks []Hash, out []Match) {
	w := x.walks.Get().(*walk)
	defer x.walks.Put(w)
	for i := range w.compared {
		w.compared[i] = slices.Grow(w.compared[i][:0], len(out))[:len(out)]
	}
	full, again := w.compared[0], w.compared[1]
	if x.matchAll(blocks, full); slices.Equal(full, out) {
		return
	}
	if x.matchLeaping(blocks, again); slices.Equal(again, out) {
		x.cautious.Store(waryFor)
	}
	copy(out, full)
}
