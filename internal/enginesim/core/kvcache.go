package core

import (
	"encoding/binary"
	"hash/fnv"
	"time"
)

// BlockID is a block's index in its rank's cache.
type BlockID int

// BlockHash names a full block by its tokens, all tokens before it and the
// cache salt. 0 means none.
type BlockHash uint64

// block is one KV block. It is in exactly one of three places: referenced
// (refs > 0), idle with a hash (kept for prefix hits, least recently used
// first) or idle without one.
type block struct {
	Refs int
	// Pins counts the pinned sets among refs.
	Pins int
	Hash BlockHash
	Name BlockName // with the hash, when the cache has a log
	Data []Kv
	// Prev and next link idle blocks; -1 ends the list.
	Prev, Next BlockID
	Idle       bool
}

// Link is the end of a prefix chain: a full block and all before it, or the root
// of a cache salt's chains.
type Link struct {
	hash BlockHash
	name BlockName // when the cache has a log
	salt string
}

// pin is a finished prefill's set of blocks, held until a transfer has read it
// or its lease ends.
type pin struct {
	key    string
	blocks []BlockID
	timer  *time.Timer
	ends   time.Time
}

// KVCache is the block accounting of one rank. All methods are called with the
// rank's mutex held.
type KVCache struct {
	Size    int // tokens in a block
	Blocks  []block
	Free    int     // idle blocks, cached or not
	Head    BlockID // idle list: the next block to use
	tail    BlockID
	ByHash  map[BlockHash]BlockID
	Pins    map[string]*pin
	expired map[string]bool // keys of pinned sets whose lease has ended
	noise   uint64          // source of the content of unused blocks
	Log     *KVLog          // changes of ByHash; nil: no log
}

func NewKVCache(blocks, size int, noise uint64) *KVCache {
	c := &KVCache{
		Size: size, Blocks: make([]block, blocks), Head: -1, tail: -1, noise: Mix(noise),
		ByHash: make(map[BlockHash]BlockID), Pins: make(map[string]*pin), expired: make(map[string]bool),
	}
	words := make([]Kv, blocks*size)
	for i := range c.Blocks {
		b := &c.Blocks[i]
		b.Data = words[i*size : (i+1)*size : (i+1)*size]
		c.scramble(b)
		c.pushIdle(BlockID(i), false)
	}
	return c
}

// BlocksFor is the number of blocks that tokens need.
func (c *KVCache) BlocksFor(tokens int) int { return (tokens + c.Size - 1) / c.Size }

// scramble overwrites a block's content, as reuse by another request would.
func (c *KVCache) scramble(b *block) {
	for i := range b.Data {
		c.noise += 0x9e3779b97f4a7c15
		b.Data[i] = Kv(Mix(c.noise))
	}
}

// pushIdle appends a block to the idle list, or puts it first so that it is
// used next.
func (c *KVCache) pushIdle(id BlockID, first bool) {
	b := &c.Blocks[id]
	b.Idle, b.Prev, b.Next = true, -1, -1
	c.Free++
	switch {
	case c.Head < 0:
		c.Head, c.tail = id, id
	case first:
		b.Next = c.Head
		c.Blocks[c.Head].Prev = id
		c.Head = id
	default:
		b.Prev = c.tail
		c.Blocks[c.tail].Next = id
		c.tail = id
	}
}

// takeIdle unlinks an idle block.
func (c *KVCache) takeIdle(id BlockID) {
	b := &c.Blocks[id]
	if b.Prev >= 0 {
		c.Blocks[b.Prev].Next = b.Next
	} else {
		c.Head = b.Next
	}
	if b.Next >= 0 {
		c.Blocks[b.Next].Prev = b.Prev
	} else {
		c.tail = b.Prev
	}
	b.Idle = false
	c.Free--
}

// Chain is the hash of a full block after parent.
func (c *KVCache) Chain(parent BlockHash, tokens []Token) BlockHash {
	h := uint64(parent)
	for _, t := range tokens {
		h = Mix(h ^ (uint64(t) + 0x9e3779b97f4a7c15))
	}
	return BlockHash(h | 1)
}

// RootHash separates the prefix chains of different cache salts.
func (c *KVCache) RootHash(salt string) BlockHash {
	if salt == "" {
		return 0
	}
	h := fnv.New64a()
	h.Write([]byte(salt))
	return BlockHash(h.Sum64() | 1)
}

// Root is the link before the first block.
func (c *KVCache) Root(salt string) Link {
	l := Link{hash: c.RootHash(salt), salt: salt}
	if c.Log != nil {
		l.name = c.Log.Root(salt)
	}
	return l
}

// Match returns the cached blocks of the longest prefix of tokens in whole
// blocks. At least one token always remains to be computed. It takes no
// reference.
func (c *KVCache) Match(salt string, tokens []Token) []BlockID {
	var hit []BlockID
	parent := c.RootHash(salt)
	for n := 0; n+c.Size < len(tokens); n += c.Size {
		parent = c.Chain(parent, tokens[n:n+c.Size])
		id, ok := c.ByHash[parent]
		if !ok {
			break
		}
		hit = append(hit, id)
	}
	return hit
}

// Fits reports whether want blocks, of which the hit ones are cached, can be
// referenced now.
func (c *KVCache) Fits(hit []BlockID, want int) bool {
	idleHits := 0
	for _, id := range hit {
		if c.Blocks[id].Idle {
			idleHits++
		}
	}
	return want-len(hit) <= c.Free-idleHits
}

// Take references the hit blocks and enough new ones to make want blocks. The
// caller has checked fits.
func (c *KVCache) Take(hit []BlockID, want int) []BlockID {
	ids := make([]BlockID, 0, want)
	for _, id := range hit {
		if c.Blocks[id].Idle {
			c.takeIdle(id)
		}
		c.Blocks[id].Refs++
		ids = append(ids, id)
	}
	for len(ids) < want {
		id := c.Head
		b := &c.Blocks[id]
		c.takeIdle(id)
		c.forget(id)
		c.scramble(b)
		b.Refs = 1
		ids = append(ids, id)
	}
	return ids
}

// forget removes a block from the prefix cache.
func (c *KVCache) forget(id BlockID) {
	b := &c.Blocks[id]
	if b.Hash != 0 {
		delete(c.ByHash, b.Hash)
		b.Hash = 0
		if c.Log != nil {
			c.Log.removed(b.Name)
		}
	}
}

// Clear empties the whole prefix cache, unless blocks are in use.
func (c *KVCache) Clear() bool {
	if c.Free < len(c.Blocks) {
		return false
	}
	clear(c.ByHash)
	for i := range c.Blocks {
		c.Blocks[i].Hash = 0
		c.scramble(&c.Blocks[i])
	}
	if c.Log != nil {
		c.Log.Events = append(c.Log.Events, KVEvent{Kind: KVCleared})
	}
	return true
}

// Drop releases one reference of each block. Blocks without references become
// idle: those with a hash stay readable for prefix hits, the others are
// scrambled. Later blocks are reused before earlier ones.
func (c *KVCache) Drop(ids []BlockID) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &c.Blocks[ids[i]]
		if b.Refs <= 0 {
			panic("enginesim: kv block dropped twice")
		}
		if b.Refs--; b.Refs > 0 {
			continue
		}
		if b.Hash == 0 {
			c.scramble(b)
		}
		c.pushIdle(ids[i], b.Hash == 0)
	}
}

// Publish makes the full blocks of tokens, whose KV is in ids, available for
// prefix hits. from is the number of leading blocks that are already published,
// and parent is the last of them; publish returns both for the next call. If
// parent was another sequence's copy that has been evicted, publish enters this
// sequence's copies.
func (c *KVCache) Publish(ids []BlockID, tokens []Token, from int, parent Link) (int, Link) {
	if _, there := c.ByHash[parent.hash]; from > 0 && !there {
		from, parent = 0, c.Root(parent.salt)
	}
	for ; (from+1)*c.Size <= len(tokens); from++ {
		parent = c.enter(ids[from], parent, from == 0, tokens[from*c.Size:(from+1)*c.Size])
	}
	return from, parent
}

// PublishTail enters the block after the full ones, which holds the rest of
// tokens. It never gives a prefix hit.
func (c *KVCache) PublishTail(ids []BlockID, tokens []Token, from int, parent Link) {
	from, parent = c.Publish(ids, tokens, from, parent)
	if rest := tokens[from*c.Size:]; len(rest) > 0 {
		c.enter(ids[from], parent, from == 0, rest)
	}
}

// enter makes a block available under its hash, unless a block with the same
// hash already is, and returns its link.
func (c *KVCache) enter(id BlockID, parent Link, first bool, tokens []Token) Link {
	l := Link{hash: c.Chain(parent.hash, tokens), salt: parent.salt}
	if c.Log != nil {
		l.name = c.Log.Next(parent.name, first, parent.salt, tokens, l.hash)
	}
	_, known := c.ByHash[l.hash]
	fresh := !known && c.Blocks[id].Hash == 0
	if fresh {
		c.ByHash[l.hash] = id
		c.Blocks[id].Hash, c.Blocks[id].Name = l.hash, l.name
	}
	if c.Log != nil && (fresh || c.Log.Hits && known) {
		c.Log.stored(parent, l, first, tokens)
	}
	return l
}

// At returns the KV of token i of a sequence that holds ids.
func (c *KVCache) At(ids []BlockID, i int) *Kv { return &c.Blocks[ids[i/c.Size]].Data[i%c.Size] }

// Read returns the content of ids as bytes, for a transfer. Blocks without
// references read as noise; if live is false, all blocks do.
func (c *KVCache) Read(ids []BlockID, live bool) []byte {
	out := make([]byte, 0, len(ids)*c.Size*BytesPerKV)
	for _, id := range ids {
		ok := live && c.Blocks[id].Refs > 0
		for i := range c.Size {
			var v Kv
			if ok {
				v = c.Blocks[id].Data[i]
			} else {
				c.noise += 0x9e3779b97f4a7c15
				v = Kv(Mix(c.noise))
			}
			out = binary.LittleEndian.AppendUint64(out, uint64(v))
		}
	}
	return out
}

// Write stores transferred bytes into ids, block by block.
func (c *KVCache) Write(ids []BlockID, data []byte) {
	for _, id := range ids {
		for i := range c.Size {
			if len(data) < BytesPerKV {
				return
			}
			c.Blocks[id].Data[i] = Kv(binary.LittleEndian.Uint64(data))
			data = data[BytesPerKV:]
		}
	}
}

// Usage counts blocks: referenced ones, and those of pinned sets.
func (c *KVCache) Usage() (used, pinned int) {
	for i := range c.Blocks {
		if c.Blocks[i].Pins > 0 {
			pinned++
		}
	}
	return len(c.Blocks) - c.Free, pinned
}

// Noise returns the content of unwritten memory.
func (r *Rank) Noise(ids []BlockID) []byte {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	return r.Cache.Read(ids, false)
}

// StoreTail stores a finished sequence's last, incomplete block. Unlike the
// other engines, TensorRT-LLM keeps it (releaseBlocks in kvCacheManager.cpp,
// with allowPartial). The last token has no KV.
func (r *Rank) StoreTail(s *Sequence) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if s.Blocks != nil && s.Finish != "" {
		r.Cache.PublishTail(s.Blocks, s.tokens()[:s.Computed], s.published, s.parent)
		r.announce()
	}
}
