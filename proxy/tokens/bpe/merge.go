package bpe

import (
	"container/heap"
	"math"
)

// part is one symbol of a word that is being merged.
type part struct {
	id         uint32
	rank       uint32 // of the merge with the part behind it; none: there is none
	merged     uint32 // id of that merge
	prev, next int32  // -1: none
	gone       bool   // merged into the part before it
}

const none = math.MaxUint32

// scanMost is the longest word whose best merge is looked for by going over all
// parts; longer ones, runs of one character mostly, keep a queue.
const scanMost = 48

// merge appends the ids of a word: from its bytes on, the pair of the lowest
// rank is merged, the leftmost of equal ones first, until no pair has a rank.
func (e *encoder) merge(w string) {
	e.parts = e.parts[:0]
	for i := range len(w) {
		e.parts = append(e.parts, part{id: e.t.bytes[w[i]], prev: int32(i - 1), next: int32(i + 1)})
	}
	e.parts[len(w)-1].next = -1
	for i := range e.parts {
		e.rank(int32(i))
	}
	if len(w) <= scanMost {
		e.mergeByScan()
	} else {
		e.mergeByQueue()
	}
	for i := int32(0); i >= 0; i = e.parts[i].next {
		e.dst = append(e.dst, e.parts[i].id)
	}
}

// rank looks up the merge of a part with the one behind it.
func (e *encoder) rank(i int32) {
	p := &e.parts[i]
	p.rank = none
	if p.next < 0 {
		return
	}
	if m, ok := e.t.merges[pair{p.id, e.parts[p.next].id}]; ok {
		p.rank, p.merged = m.rank, m.id
	}
}

// join merges a part with the one behind it.
func (e *encoder) join(i int32) {
	p := &e.parts[i]
	right := &e.parts[p.next]
	p.id = p.merged
	right.gone = true
	p.next = right.next
	if p.next >= 0 {
		e.parts[p.next].prev = i
	}
	e.rank(i)
	if p.prev >= 0 {
		e.rank(p.prev)
	}
}

func (e *encoder) mergeByScan() {
	for {
		best, at := uint32(none), int32(-1)
		for i := int32(0); i >= 0; i = e.parts[i].next {
			if e.parts[i].rank < best {
				best, at = e.parts[i].rank, i
			}
		}
		if at < 0 {
			return
		}
		e.join(at)
	}
}

func (e *encoder) mergeByQueue() {
	e.queue = e.queue[:0]
	for i := range e.parts {
		if r := e.parts[i].rank; r != none {
			e.queue = append(e.queue, candidate{r, int32(i)})
		}
	}
	heap.Init(&e.queue)
	for len(e.queue) > 0 {
		c := heap.Pop(&e.queue).(candidate)
		if p := &e.parts[c.at]; p.gone || p.rank != c.rank {
			continue // it changed since
		}
		e.join(c.at)
		e.offer(c.at)
		if prev := e.parts[c.at].prev; prev >= 0 {
			e.offer(prev)
		}
	}
}

func (e *encoder) offer(i int32) {
	if r := e.parts[i].rank; r != none {
		heap.Push(&e.queue, candidate{r, i})
	}
}

// candidate is a merge that was possible when it was queued.
type candidate struct {
	rank uint32
	at   int32
}

// queue is a heap of candidates, the lowest rank and then the leftmost first.
type queue []candidate

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].rank < q[j].rank || q[i].rank == q[j].rank && q[i].at < q[j].at
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(candidate)) }
func (q *queue) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}
