package replay

// cache is the KV memory of one rank, counted in blocks. A block is either
// pinned by the requests that use it, or idle: cached until its room is needed,
// when the least recently used one is evicted first. Blocks that a request has
// reserved and not filled, and those of its answer, have no id and cannot be
// found.
type cache struct {
	capacity int
	reserved int // blocks without an id
	blocks   map[uint64]int32
	slots    []slot // the first is the head of the ring of idle blocks
	free     []int32
	idle     int
	evicted  []uint64 // whole blocks evicted since the last call of taken
}

type slot struct {
	id           uint64
	pins         int32
	older, newer int32 // in the ring, if pins is 0
	whole        bool  // not the partial last block of a prompt
}

func newCache(capacity int) *cache {
	return &cache{capacity: capacity, blocks: make(map[uint64]int32), slots: make([]slot, 1)}
}

// pinned is the number of blocks that cannot be evicted.
func (c *cache) pinned() int { return c.reserved + len(c.blocks) - c.idle }

// match returns how many of the leading ids are held.
func (c *cache) match(ids []uint64) int {
	for i, id := range ids {
		if _, ok := c.blocks[id]; !ok {
			return i
		}
	}
	return len(ids)
}

// take pins the held blocks of a prompt, and reserves room for its other blocks
// and for extra ones. It returns the number of leading blocks that are held.
// When there is no room, ok is false and nothing has changed.
func (c *cache) take(ids []uint64, extra int) (held int, ok bool) {
	held = c.match(ids)
	need := len(ids) - held + extra
	idle := c.idle
	for _, id := range ids[:held] {
		if c.slots[c.blocks[id]].pins == 0 {
			idle--
		}
	}
	if c.reserved+len(c.blocks)-idle+need > c.capacity {
		return 0, false
	}
	for _, id := range ids[:held] {
		c.pin(c.blocks[id])
	}
	c.reserved += need
	for c.reserved+len(c.blocks) > c.capacity {
		c.evict()
	}
	return held, true
}

// fill gives the ids to the blocks that take reserved for them: they hold KV
// now. The first whole of the ids are whole blocks.
func (c *cache) fill(ids []uint64, held, whole int) {
	for i := held; i < len(ids); i++ {
		id := ids[i]
		c.reserved--
		n, ok := c.blocks[id]
		if !ok {
			n = c.add(id, i < whole)
		}
		c.pin(n)
	}
}

// release unpins the blocks of a prompt that was filled, and releases the extra
// ones. The end of a prompt is evicted before its beginning.
func (c *cache) release(ids []uint64, extra int) {
	c.reserved -= extra
	for i := len(ids) - 1; i >= 0; i-- {
		n := c.blocks[ids[i]]
		s := &c.slots[n]
		if s.pins--; s.pins == 0 {
			newest := c.slots[0].older
			s.older, s.newer = newest, 0
			c.slots[newest].newer = n
			c.slots[0].older = n
			c.idle++
		}
	}
}

// taken returns the whole blocks that were evicted since the last call. The
// slice is valid until the next eviction.
func (c *cache) taken() []uint64 {
	e := c.evicted
	c.evicted = c.evicted[:0]
	return e
}

func (c *cache) add(id uint64, whole bool) int32 {
	n := int32(len(c.slots))
	if last := len(c.free) - 1; last >= 0 {
		n, c.free = c.free[last], c.free[:last]
	} else {
		c.slots = append(c.slots, slot{})
	}
	// The slot is idle, but not in the ring. pin takes it from there.
	c.slots[n] = slot{id: id, whole: whole, older: n, newer: n}
	c.blocks[id] = n
	c.idle++
	return n
}

func (c *cache) pin(n int32) {
	s := &c.slots[n]
	if s.pins == 0 {
		c.unlink(n)
	}
	s.pins++
}

func (c *cache) unlink(n int32) {
	s := &c.slots[n]
	c.slots[s.older].newer, c.slots[s.newer].older = s.newer, s.older
	c.idle--
}

func (c *cache) evict() {
	n := c.slots[0].newer
	c.unlink(n)
	delete(c.blocks, c.slots[n].id)
	c.free = append(c.free, n)
	if c.slots[n].whole {
		c.evicted = append(c.evicted, c.slots[n].id)
	}
}
