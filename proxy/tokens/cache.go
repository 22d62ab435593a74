package tokens

import (
	"container/list"
	"sync"

	"github.com/zeebo/xxh3"
)

// cache keeps the ids of answered tokenize requests up to a total number of ids, and
// drops the least recently used ones. Keys are 128-bit hashes: an accidental collision
// only causes a bad route.
type cache struct {
	limit int

	mu      sync.Mutex
	held    int                            // ids; guarded by mu
	entries map[xxh3.Uint128]*list.Element // guarded by mu
	order   list.List                      // of cached, most recent first; guarded by mu
}

type cached struct {
	key xxh3.Uint128
	ids []uint32
}

// overhead is the memory of an entry without its ids, expressed as a number of ids. It
// counts against the limit, so that many tiny prompts cannot fill the memory.
const overhead = 48

// key returns the key of a tokenize request. Two engines of one model answer it alike;
// two models need not.
func key(w way, model string, body []byte) xxh3.Uint128 {
	k := xxh3.Hash128Seed(body, uint64(w))
	m := xxh3.HashStringSeed(model, uint64(len(body)))
	return xxh3.Uint128{Hi: k.Hi ^ m, Lo: k.Lo}
}

// get returns the ids of a key, or nil.
func (c *cache) get(k xxh3.Uint128) []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[k]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).ids
}

// put stores ids, unless they alone would fill an eighth of the cache.
func (c *cache) put(k xxh3.Uint128, ids []uint32) {
	cost := len(ids) + overhead
	if cost > c.limit/8 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries[k] != nil {
		return
	}
	if c.entries == nil {
		c.entries = make(map[xxh3.Uint128]*list.Element)
	}
	c.entries[k] = c.order.PushFront(&cached{k, ids})
	c.held += cost
	for c.held > c.limit {
		last := c.order.Remove(c.order.Back()).(*cached)
		delete(c.entries, last.key)
		c.held -= len(last.ids) + overhead
	}
}

func (c *cache) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.entries)
	c.order.Init()
	c.held = 0
}
