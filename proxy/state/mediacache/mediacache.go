// Package mediacache remembers which media each engine was lately sent. An engine keeps the encoded
// form of the images, sounds and videos of recent prompts, and announces none of them.
//
// The decisions behind this package are in docs/design/placement.md.
package mediacache

import (
	"container/list"
	"sync"
)

// Capacity is the number of media that a Cache remembers. It is the default of llm-d's router: 4 GiB
// for encoded media of 2 MiB each.
const Capacity = 2048

// MaxMedia bounds the media of one request that are looked up and remembered.
const MaxMedia = 16

// Hash identifies a medium.
type Hash uint64

// Cache has the media that one target was sent last. The zero value is ready. Safe for concurrent use.
type Cache struct {
	mu    sync.Mutex
	items map[Hash]*list.Element // of a Hash; guarded by mu
	order list.List              // the most recently sent first; guarded by mu
}

// Sent notes that the target was sent these media.
func (c *Cache) Sent(media []Hash) {
	if len(media) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.items == nil {
		c.items = make(map[Hash]*list.Element)
	}
	for _, h := range media {
		if e := c.items[h]; e != nil {
			c.order.MoveToFront(e)
			continue
		}
		if c.order.Len() == Capacity {
			delete(c.items, c.order.Remove(c.order.Back()).(Hash))
		}
		c.items[h] = c.order.PushFront(h)
	}
}

// Count returns how many of these media the target was lately sent.
func (c *Cache) Count(media []Hash) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range media {
		if c.items[h] != nil {
			n++
		}
	}
	return n
}

// Forget drops all media, for an engine that has restarted.
func (c *Cache) Forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.items = nil
	c.order.Init()
}
