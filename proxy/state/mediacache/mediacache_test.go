package mediacache

import (
	"sync"
	"testing"
)

// TestCache: a cache counts the media that were sent last, at most Capacity, and forgets them all.
func TestCache(t *testing.T) {
	c := new(Cache)
	if n := c.Count([]Hash{1}); n != 0 {
		t.Errorf("an empty cache has %d media", n)
	}
	c.Sent(nil)
	c.Sent([]Hash{1, 2})
	if n := c.Count([]Hash{2, 3, 1}); n != 2 {
		t.Errorf("2 media were sent, and %d count", n)
	}
	for h := Hash(10); h < 10+Capacity-2; h++ {
		c.Sent([]Hash{h})
	}
	c.Sent([]Hash{1}) // now 2 is the oldest
	c.Sent([]Hash{5000})
	for h, want := range map[Hash]int{1: 1, 2: 0, 10: 1, 5000: 1} {
		if n := c.Count([]Hash{h}); n != want {
			t.Errorf("%d counts %d times, want %d", h, n, want)
		}
	}
	if len(c.items) != Capacity || c.order.Len() != Capacity {
		t.Errorf("%d and %d media, want %d", len(c.items), c.order.Len(), Capacity)
	}
	c.Forget()
	if n := c.Count([]Hash{1, 5000}); n != 0 || c.order.Len() != 0 {
		t.Errorf("%d media after Forget, and %d in order", n, c.order.Len())
	}
	c.Sent([]Hash{1})
	if n := c.Count([]Hash{1}); n != 1 {
		t.Error("nothing is remembered after Forget")
	}
}

// TestCacheConcurrently: requests for the same target look up and note media at the same time.
func TestCacheConcurrently(t *testing.T) {
	c, running := new(Cache), sync.WaitGroup{}
	for i := range 8 {
		running.Go(func() {
			for h := range Hash(1000) {
				c.Sent([]Hash{h, h + Hash(i)*1000})
				if n := c.Count([]Hash{h, h + 1e6}); n > 1 {
					t.Errorf("%d of one medium", n)
				}
				if h == 500 && i == 0 {
					c.Forget()
				}
			}
		})
	}
	running.Wait()
	if n := c.order.Len(); n != len(c.items) || n > Capacity {
		t.Errorf("%d and %d media", n, len(c.items))
	}
}
