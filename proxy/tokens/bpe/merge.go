package bpe

import "math"

// part is one symbol of a word that is being merged.
type part struct {
	id         uint32
	rank       uint32 // rank of the merge with the next part; none if there is no merge
	merged     uint32 // id of that merge
	prev, next int32  // -1: none
	gone       bool   // merged into the previous part
}

const none = math.MaxUint32

// scanMost is the largest length of a word for which a scan of all parts finds the best
// merge. Longer words, mostly runs of one character, use a queue.
const scanMost = 48

// merge appends the ids of a word. Starting with its bytes, it merges the pair of the
// lowest rank, the leftmost of equal ones first, until no pair has a rank.
func (e *encoder) merge(w string) {
	e.start(w)
	if len(w) <= scanMost {
		e.mergeByScan()
	} else {
		e.mergeByQueue()
	}
	e.finish()
}

// start makes each byte of a word a part.
func (e *encoder) start(w string) {
	e.parts = e.parts[:0]
	for i := range len(w) {
		e.parts = append(e.parts, part{id: e.t.bytes[w[i]], prev: int32(i - 1), next: int32(i + 1)})
	}
	e.parts[len(w)-1].next = -1
	for i := range e.parts {
		e.rank(int32(i))
	}
}

// finish appends the ids of the remaining parts.
func (e *encoder) finish() {
	for i := int32(0); i >= 0; i = e.parts[i].next {
		e.dst = append(e.dst, e.parts[i].id)
	}
}

// rank looks up the merge of a part with the next one.
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

// join merges a part with the next one.
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
		e.offer(int32(i))
	}
	for len(e.queue) > 0 {
		c := e.queue.pop()
		if p := &e.parts[c.at]; p.gone || p.rank != c.rank {
			continue // changed in the meantime
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
		e.queue.push(candidate{r, i})
	}
}

// candidate is a merge that was possible when it was queued.
type candidate struct {
	rank uint32
	at   int32
}

// before orders candidates: the lowest rank, then the leftmost.
func (c candidate) before(d candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.at < d.at
}

// queue is a heap of candidates. container/heap would allocate for each of them.
type queue []candidate

func (q *queue) push(c candidate) {
	h := append(*q, c)
	i := len(h) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !c.before(h[parent]) {
			break
		}
		h[i], i = h[parent], parent
	}
	h[i] = c
	*q = h
}

func (q *queue) pop() candidate {
	h := *q
	top, last := h[0], h[len(h)-1]
	h = h[:len(h)-1]
	for i := 0; len(h) > 0; {
		child := 2*i + 1
		if child+1 < len(h) && h[child+1].before(h[child]) {
			child++
		}
		if child >= len(h) || !h[child].before(last) {
			h[i] = last
			break
		}
		h[i], i = h[child], child
	}
	*q = h
	return top
}
