package kvindex

import "slices"

// A target that holds a block of a prompt also holds the blocks before it, because
// engines evict the end of a prompt before its beginning. So for a long prompt Match
// looks only at the last block of each group. If its holders and their flags are those
// of the previous group, Match assumes that the blocks between are the same. It walks
// block by block over groups in which something changes.
//
// If an engine has evicted the middle of a prompt, or its events were lost, there is a
// hole that a leap may skip. Match would then count the blocks after the hole. So a
// fraction of the matches is repeated without leaps. If the results differ, the following
// matches are all made without leaps.
const (
	// stride is the number of blocks in a group.
	stride = 8
	// leapFrom is the minimum number of blocks of a prompt for which leaps save more time
	// than they cost.
	leapFrom = 128
	// checkEvery: one match of so many is repeated in full.
	checkEvery = 64
	// waryFor is the number of full matches after a hole was found.
	waryFor = 4096
)

// wary reports whether a hole was found recently, so that this match must make no leaps.
// It also counts the match.
func (x *Index) wary() bool { return x.cautious.Load() > 0 && x.cautious.Add(-1) >= 0 }

// matchLeaping is Match with a look at one block of each group.
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

// leap continues the walk over at most chunk groups whose last blocks were looked up.
// at is the number of the first group.
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

// unchanged reports whether block, which was looked up as number i, has the same
// holders as the block before its group.
func (x *Index) unchanged(w *walk, block Hash, found *looked, i int) bool {
	if rest := found.words[i] & (1<<restBits - 1); rest == w.same && rest != 0 {
		return true
	}
	seq, rec := found.seqs[i], found.records[i]
	return rec != nil && w.again(rec) && seq&1 == 0 && x.segments[block>>segmentShift].seq.Load() == seq
}

// lookForHoles repeats the match in full. If it differs from two leaping matches, there
// is a hole. A concurrent change does not count.
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
