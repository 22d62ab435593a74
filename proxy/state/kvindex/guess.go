package kvindex

import (
	"sync/atomic"
	"time"
)

// Limits bounds the expected blocks of one target.
type Limits struct {
	// TTL is how long an expected block counts as held without an event; 0 keeps
	// Options.GuessTTL. It applies to later calls of Expect.
	TTL time.Duration
	// Silent replaces TTL for blocks that were expected after the target's last event: an
	// engine that computed a prompt and sent no event sends none at all. It has no effect if it is
	// shorter than TTL.
	Silent time.Duration
	// Blocks is the capacity of a target without events. If there are more expected
	// blocks, the least recently expected ones are removed, of one prompt the last
	// blocks first. 0 means no limit.
	Blocks int
}

// Limit sets the limits of t's expected blocks.
func (x *Index) Limit(t Target, l Limits) {
	tg := x.at(t)
	if tg == nil {
		return
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	if tg.guesses.ttl = l.TTL; l.TTL <= 0 {
		tg.guesses.ttl = x.guessTTL
	}
	tg.guesses.silent = max(l.Silent, tg.guesses.ttl)
	tg.guesses.capacity = max(l.Blocks, 0)
}

// Expect notes that a request with these blocks was sent to t at now, so that t will
// hold them soon. They count as held in the GPU until the target's TTL has passed
// without another Expect, or until an event reports them. Blocks that events have
// already reported are not changed.
func (x *Index) Expect(t Target, blocks []Hash, now time.Time) {
	tg := x.at(t)
	if tg == nil {
		return
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	x.expire(tg, now)
	g, b := &tg.guesses, x.batch(tg)
	due := now.Add(g.ttl).UnixMilli()
	// The last block is stored first, so that it is removed first, as in engines.
	for len(blocks) > 0 {
		part := blocks[max(len(blocks)-chunk, 0):]
		blocks = blocks[:len(blocks)-len(part)]
		x.fetch(part)
		g.fetch(part)
		for i := len(part) - 1; i >= 0; i-- {
			switch before, after := b.change(part[i], change{set: flagGuess, unless: flagGPU}); {
			case after&flagGPU != 0:
			case after&flagGuess == 0:
				tg.count(countRefused, 1)
			case before&flagGuess != 0:
				g.renew(part[i], due)
			default:
				g.add(part[i], due)
			}
		}
	}
	b.end()
	if n := g.len() - g.capacity; g.capacity > 0 && n > 0 {
		x.evict(tg, n)
	}
}

// Unexpect undoes one Expect of the same blocks, because the leg failed or its answer
// contradicts it. Blocks of an event or of another Expect stay.
func (x *Index) Unexpect(t Target, blocks []Hash) {
	tg := x.at(t)
	if tg == nil {
		return
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	b := x.batch(tg)
	for _, h := range blocks {
		if tg.guesses.take(h) {
			b.change(h, change{clear: flagGuess})
		}
	}
	b.end()
}

// Tend removes guesses whose time has passed at now, and frees the memory of blocks of
// dropped targets. The owner calls it about once a second.
func (x *Index) Tend(now time.Time) {
	for t := range Target(x.Targets()) {
		if tg := x.at(t); tg != nil {
			tg.mu.Lock()
			x.expire(tg, now)
			tg.mu.Unlock()
		}
	}
	x.sweeping.Lock()
	defer x.sweeping.Unlock()
	x.sweep()
}

// expire removes the guesses of a target that are due at now. The caller holds tg.mu.
func (x *Index) expire(tg *target, now time.Time) {
	g := &tg.guesses
	g.now = max(g.now, now.UnixMilli())
	n := g.due(g.limit())
	x.forget(tg, n)
	tg.count(countExpired, n)
}

// Silent returns the number of blocks that t is still expected to have although the time of Limits.TTL
// has passed, because t has sent no event since they were expected.
func (x *Index) Silent(t Target, now time.Time) int {
	tg := x.at(t)
	if tg == nil {
		return 0
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	x.expire(tg, now)
	return tg.guesses.due(tg.guesses.now)
}

// evict removes the n least recently expected guesses of a target. The caller holds
// tg.mu.
func (x *Index) evict(tg *target, n int) {
	n = min(n, tg.guesses.len())
	x.forget(tg, n)
	tg.count(countEvicted, n)
}

// forget removes the n guesses at the end of a target's list, which has at least n.
func (x *Index) forget(tg *target, n int) {
	g, b := &tg.guesses, x.batch(tg)
	var oldest [chunk]Hash
	for n > 0 {
		part := oldest[:min(chunk, n)]
		n -= len(part)
		g.oldest(part)
		x.fetch(part)
		g.fetch(part)
		for _, h := range part {
			g.remove(h)
			b.change(h, change{clear: flagGuess})
		}
	}
	b.end()
}

// guess is a block that is expected at a target, in a ring ordered by last use.
type guess struct {
	hash       Hash
	next, last uint32 // the node used before this one, and the one used after it
	due        int64  // Unix milliseconds << expectBits | number of expectations
}

const (
	expectBits = 8
	expectMax  = 1<<expectBits - 1
)

// place is a slot of the table of guesses, 0 if empty: key 32 | node 32. The key is a part of
// the block's hash. So a search reads the nodes of few other blocks, and no entry needs its
// node to find its preferred slot.
type place uint64

const placeBits = 32 // of the key, and of the node

// keyOfGuess returns the key of a block's place.
func keyOfGuess(h Hash) uint64 { return uint64(h) * mixer >> placeBits }

func (p place) key() uint64  { return uint64(p) >> placeBits }
func (p place) node() uint32 { return uint32(p) }

// guesses holds the guesses of one target: exactly the blocks with flagGuess. The nodes
// form a list from the most to the least recently expected one, with nodes[0] as its
// anchor. places maps a slot, given by a block's key, to its node. Guarded by the
// target's mu.
type guesses struct {
	ttl      time.Duration
	silent   time.Duration // see Limits; at least ttl
	now      int64         // the latest time that the owner has passed, in Unix milliseconds
	heard    int64         // now at the last event that stored blocks
	capacity int
	nodes    []guess
	free     uint32 // first free node, 0 if none; linked by next
	places   []place
	count    atomic.Int32 // number of guesses; may be read without mu
}

func (g *guesses) len() int { return int(g.count.Load()) }

func (g *guesses) clear() {
	g.nodes, g.places, g.free = nil, nil, 0
	g.count.Store(0)
}

// home returns the preferred slot of a key in places.
func (g *guesses) home(key uint64) int {
	return int(key * uint64(len(g.places)) >> placeBits)
}

// after returns the slot after a slot.
func (g *guesses) after(slot int) int {
	if slot++; slot == len(g.places) {
		return 0
	}
	return slot
}

// find returns the node of a block, or 0, and its slot, or the slot where it would be.
func (g *guesses) find(h Hash) (node uint32, slot int) {
	if len(g.places) == 0 {
		return 0, 0
	}
	key := keyOfGuess(h)
	for slot = g.home(key); ; slot = g.after(slot) {
		p := g.places[slot]
		if p == 0 || p.key() == key && g.nodes[p.node()].hash == h {
			return p.node(), slot
		}
	}
}

// add adds a block that has no guess yet.
func (g *guesses) add(h Hash, due int64) {
	n := g.len()
	if n*5 >= len(g.places)*4 {
		g.grow(n + n/4 + 8)
	}
	node := g.free
	if node != 0 {
		g.free = g.nodes[node].next
	} else {
		node = uint32(len(g.nodes))
		g.nodes = append(g.nodes, guess{})
	}
	g.nodes[node] = guess{hash: h, due: due<<expectBits | 1}
	g.put(place(keyOfGuess(h)<<placeBits | uint64(node)))
	g.link(node)
	g.count.Add(1)
}

// grow makes room for n guesses.
func (g *guesses) grow(n int) {
	if g.nodes == nil {
		g.nodes = make([]guess, 1, n) // the anchor
	}
	old := g.places
	g.places = make([]place, n*5/4+1)
	for _, p := range old {
		if p != 0 {
			g.put(p)
		}
	}
}

// put stores a place whose block is not in places, which have room.
func (g *guesses) put(p place) {
	slot := g.home(p.key())
	for g.places[slot] != 0 {
		slot = g.after(slot)
	}
	g.places[slot] = p
}

// renew makes a block the most recently expected one.
func (g *guesses) renew(h Hash, due int64) {
	node, _ := g.find(h)
	n := &g.nodes[node]
	n.due = due<<expectBits | min(n.due&expectMax+1, expectMax)
	g.unlink(node)
	g.link(node)
}

// take undoes one expectation of a block. It reports whether that was the last one:
// then the block is no longer a guess.
func (g *guesses) take(h Hash) bool {
	node, _ := g.find(h)
	if node == 0 {
		return false
	}
	switch n := &g.nodes[node]; n.due & expectMax {
	case 1:
		g.remove(h)
		return true
	case expectMax: // the count is saturated: only time removes the guess
	default:
		n.due--
	}
	return false
}

// remove drops a block's guess.
func (g *guesses) remove(h Hash) {
	node, slot := g.find(h)
	if node == 0 {
		return
	}
	g.unlink(node)
	g.nodes[node] = guess{next: g.free}
	g.free = node
	g.count.Add(-1)
	// Move up entries that a search would not find past an empty slot.
	for at := g.after(slot); g.places[at] != 0; at = g.after(at) {
		if home := g.home(g.places[at].key()); g.distance(home, at) >= g.distance(slot, at) {
			g.places[slot] = g.places[at]
			slot = at
		}
	}
	g.places[slot] = 0
}

// distance returns the number of steps from one slot to another.
func (g *guesses) distance(from, to int) int {
	if to < from {
		to += len(g.places)
	}
	return to - from
}

// oldest sets into to the least recently expected blocks. The list has at least as many.
func (g *guesses) oldest(into []Hash) {
	node := g.nodes[0].last
	for i := range into {
		into[i] = g.nodes[node].hash
		node = g.nodes[node].last
	}
}

// limit returns the time until which guesses are due that are removed now.
func (g *guesses) limit() int64 {
	ttl := g.ttl.Milliseconds()
	return max(min(g.now, g.heard+ttl), g.now-g.silent.Milliseconds()+ttl)
}

// due returns the number of guesses at the end of the list whose time has passed at now.
func (g *guesses) due(now int64) int {
	n := 0
	if g.len() > 0 {
		for node := g.nodes[0].last; node != 0 && g.nodes[node].due>>expectBits <= now; node = g.nodes[node].last {
			n++
		}
	}
	return n
}

// link puts a node at the front of the list.
func (g *guesses) link(node uint32) {
	first := g.nodes[0].next
	g.nodes[node].next, g.nodes[node].last = first, 0
	g.nodes[first].last = node
	g.nodes[0].next = node
}

func (g *guesses) unlink(node uint32) {
	n := g.nodes[node]
	g.nodes[n.last].next = n.next
	g.nodes[n.next].last = n.last
}
