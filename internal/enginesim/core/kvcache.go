package enginesim

import (
	"encoding/binary"
	"hash/fnv"
	"time"
)

// blockID is a block's index in its rank's cache.
type blockID int

// blockHash names a full block by its tokens, all tokens before it and the
// cache salt. 0 means none.
type blockHash uint64

// block is one KV block. It is in exactly one of three places: referenced
// (refs > 0), idle with a hash (kept for prefix hits, least recently used
// first) or idle without one.
type block struct {
	refs int
	// pins counts the pinned sets among refs.
	pins int
	hash blockHash
	name blockName // with the hash, when the cache has a log
	data []kv
	// prev and next link idle blocks; -1 ends the list.
	prev, next blockID
	idle       bool
}

// link is the end of a prefix chain: a full block and all before it, or the root
// of a cache salt's chains.
type link struct {
	hash blockHash
	name blockName // when the cache has a log
	salt string
}

// pin is a finished prefill's set of blocks, held until a transfer has read it
// or its lease ends.
type pin struct {
	key    string
	blocks []blockID
	timer  *time.Timer
	ends   time.Time
}

// kvCache is the block accounting of one rank. All methods are called with the
// rank's mutex held.
type kvCache struct {
	size    int // tokens in a block
	blocks  []block
	free    int     // idle blocks, cached or not
	head    blockID // idle list: the next block to use
	tail    blockID
	byHash  map[blockHash]blockID
	pins    map[string]*pin
	expired map[string]bool // keys of pinned sets whose lease has ended
	noise   uint64          // source of the content of unused blocks
	log     *kvLog          // changes of byHash; nil: no log
}

func newKVCache(blocks, size int, noise uint64) *kvCache {
	c := &kvCache{
		size: size, blocks: make([]block, blocks), head: -1, tail: -1, noise: mix(noise),
		byHash: make(map[blockHash]blockID), pins: make(map[string]*pin), expired: make(map[string]bool),
	}
	words := make([]kv, blocks*size)
	for i := range c.blocks {
		b := &c.blocks[i]
		b.data = words[i*size : (i+1)*size : (i+1)*size]
		c.scramble(b)
		c.pushIdle(blockID(i), false)
	}
	return c
}

// blocksFor is the number of blocks that tokens need.
func (c *kvCache) blocksFor(tokens int) int { return (tokens + c.size - 1) / c.size }

// scramble overwrites a block's content, as reuse by another request would.
func (c *kvCache) scramble(b *block) {
	for i := range b.data {
		c.noise += 0x9e3779b97f4a7c15
		b.data[i] = kv(mix(c.noise))
	}
}

// pushIdle appends a block to the idle list, or puts it first so that it is
// used next.
func (c *kvCache) pushIdle(id blockID, first bool) {
	b := &c.blocks[id]
	b.idle, b.prev, b.next = true, -1, -1
	c.free++
	switch {
	case c.head < 0:
		c.head, c.tail = id, id
	case first:
		b.next = c.head
		c.blocks[c.head].prev = id
		c.head = id
	default:
		b.prev = c.tail
		c.blocks[c.tail].next = id
		c.tail = id
	}
}

// takeIdle unlinks an idle block.
func (c *kvCache) takeIdle(id blockID) {
	b := &c.blocks[id]
	if b.prev >= 0 {
		c.blocks[b.prev].next = b.next
	} else {
		c.head = b.next
	}
	if b.next >= 0 {
		c.blocks[b.next].prev = b.prev
	} else {
		c.tail = b.prev
	}
	b.idle = false
	c.free--
}

// chain is the hash of a full block after parent.
func (c *kvCache) chain(parent blockHash, tokens []token) blockHash {
	h := uint64(parent)
	for _, t := range tokens {
		h = mix(h ^ (uint64(t) + 0x9e3779b97f4a7c15))
	}
	return blockHash(h | 1)
}

// rootHash separates the prefix chains of different cache salts.
func (c *kvCache) rootHash(salt string) blockHash {
	if salt == "" {
		return 0
	}
	h := fnv.New64a()
	h.Write([]byte(salt))
	return blockHash(h.Sum64() | 1)
}

// root is the link before the first block.
func (c *kvCache) root(salt string) link {
	l := link{hash: c.rootHash(salt), salt: salt}
	if c.log != nil {
		l.name = c.log.root(salt)
	}
	return l
}

// match returns the cached blocks of the longest prefix of tokens in whole
// blocks. At least one token always remains to be computed. It takes no
// reference.
func (c *kvCache) match(salt string, tokens []token) []blockID {
	var hit []blockID
	parent := c.rootHash(salt)
	for n := 0; n+c.size < len(tokens); n += c.size {
		parent = c.chain(parent, tokens[n:n+c.size])
		id, ok := c.byHash[parent]
		if !ok {
			break
		}
		hit = append(hit, id)
	}
	return hit
}

// fits reports whether want blocks, of which the hit ones are cached, can be
// referenced now.
func (c *kvCache) fits(hit []blockID, want int) bool {
	idleHits := 0
	for _, id := range hit {
		if c.blocks[id].idle {
			idleHits++
		}
	}
	return want-len(hit) <= c.free-idleHits
}

// take references the hit blocks and enough new ones to make want blocks. The
// caller has checked fits.
func (c *kvCache) take(hit []blockID, want int) []blockID {
	ids := make([]blockID, 0, want)
	for _, id := range hit {
		if c.blocks[id].idle {
			c.takeIdle(id)
		}
		c.blocks[id].refs++
		ids = append(ids, id)
	}
	for len(ids) < want {
		id := c.head
		b := &c.blocks[id]
		c.takeIdle(id)
		c.forget(id)
		c.scramble(b)
		b.refs = 1
		ids = append(ids, id)
	}
	return ids
}

// forget removes a block from the prefix cache.
func (c *kvCache) forget(id blockID) {
	b := &c.blocks[id]
	if b.hash != 0 {
		delete(c.byHash, b.hash)
		b.hash = 0
		if c.log != nil {
			c.log.removed(b.name)
		}
	}
}

// clear empties the whole prefix cache, unless blocks are in use.
func (c *kvCache) clear() bool {
	if c.free < len(c.blocks) {
		return false
	}
	clear(c.byHash)
	for i := range c.blocks {
		c.blocks[i].hash = 0
		c.scramble(&c.blocks[i])
	}
	if c.log != nil {
		c.log.events = append(c.log.events, kvEvent{kind: kvCleared})
	}
	return true
}

// drop releases one reference of each block. Blocks without references become
// idle: those with a hash stay readable for prefix hits, the others are
// scrambled. Later blocks are reused before earlier ones.
func (c *kvCache) drop(ids []blockID) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &c.blocks[ids[i]]
		if b.refs <= 0 {
			panic("enginesim: kv block dropped twice")
		}
		if b.refs--; b.refs > 0 {
			continue
		}
		if b.hash == 0 {
			c.scramble(b)
		}
		c.pushIdle(ids[i], b.hash == 0)
	}
}

// publish makes the full blocks of tokens, whose KV is in ids, available for
// prefix hits. from is the number of leading blocks that are already published,
// and parent is the last of them; publish returns both for the next call. If
// parent was another sequence's copy that has been evicted, publish enters this
// sequence's copies.
func (c *kvCache) publish(ids []blockID, tokens []token, from int, parent link) (int, link) {
	if _, there := c.byHash[parent.hash]; from > 0 && !there {
		from, parent = 0, c.root(parent.salt)
	}
	for ; (from+1)*c.size <= len(tokens); from++ {
		parent = c.enter(ids[from], parent, from == 0, tokens[from*c.size:(from+1)*c.size])
	}
	return from, parent
}

// publishTail enters the block after the full ones, which holds the rest of
// tokens. It never gives a prefix hit.
func (c *kvCache) publishTail(ids []blockID, tokens []token, from int, parent link) {
	from, parent = c.publish(ids, tokens, from, parent)
	if rest := tokens[from*c.size:]; len(rest) > 0 {
		c.enter(ids[from], parent, from == 0, rest)
	}
}

// enter makes a block available under its hash, unless a block with the same
// hash already is, and returns its link.
func (c *kvCache) enter(id blockID, parent link, first bool, tokens []token) link {
	l := link{hash: c.chain(parent.hash, tokens), salt: parent.salt}
	if c.log != nil {
		l.name = c.log.next(parent.name, first, parent.salt, tokens, l.hash)
	}
	_, known := c.byHash[l.hash]
	fresh := !known && c.blocks[id].hash == 0
	if fresh {
		c.byHash[l.hash] = id
		c.blocks[id].hash, c.blocks[id].name = l.hash, l.name
	}
	if c.log != nil && (fresh || c.log.hits && known) {
		c.log.stored(parent, l, first, tokens)
	}
	return l
}

// at returns the KV of token i of a sequence that holds ids.
func (c *kvCache) at(ids []blockID, i int) *kv { return &c.blocks[ids[i/c.size]].data[i%c.size] }

// read returns the content of ids as bytes, for a transfer. Blocks without
// references read as noise; if live is false, all blocks do.
func (c *kvCache) read(ids []blockID, live bool) []byte {
	out := make([]byte, 0, len(ids)*c.size*bytesPerKV)
	for _, id := range ids {
		ok := live && c.blocks[id].refs > 0
		for i := range c.size {
			var v kv
			if ok {
				v = c.blocks[id].data[i]
			} else {
				c.noise += 0x9e3779b97f4a7c15
				v = kv(mix(c.noise))
			}
			out = binary.LittleEndian.AppendUint64(out, uint64(v))
		}
	}
	return out
}

// write stores transferred bytes into ids, block by block.
func (c *kvCache) write(ids []blockID, data []byte) {
	for _, id := range ids {
		for i := range c.size {
			if len(data) < bytesPerKV {
				return
			}
			c.blocks[id].data[i] = kv(binary.LittleEndian.Uint64(data))
			data = data[bytesPerKV:]
		}
	}
}

// usage counts blocks: referenced ones, and those of pinned sets.
func (c *kvCache) usage() (used, pinned int) {
	for i := range c.blocks {
		if c.blocks[i].pins > 0 {
			pinned++
		}
	}
	return len(c.blocks) - c.free, pinned
}

// noise returns the content of unwritten memory.
func (r *rank) noise(ids []blockID) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cache.read(ids, false)
}

// storeTail stores a finished sequence's last, incomplete block. Unlike the
// other engines, TensorRT-LLM keeps it (releaseBlocks in kvCacheManager.cpp,
// with allowPartial). The last token has no KV.
func (r *rank) storeTail(s *sequence) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.blocks != nil && s.finish != "" {
		r.cache.publishTail(s.blocks, s.tokens()[:s.computed], s.published, s.parent)
		r.announce()
	}
}
