package replay

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// takeAll takes a prompt and fills it at once, as an engine that computes
// without delay.
func takeAll(t *testing.T, c *cache, ids ...uint64) (held int) {
	t.Helper()
	held, ok := c.take(ids, 0)
	if !ok {
		t.Fatalf("no room for %v", ids)
	}
	c.fill(ids, held, len(ids))
	return held
}

func TestCacheEvictsTheEndOfWhatWasUsedLongestAgo(t *testing.T) {
	c := newCache(6)
	takeAll(t, c, 1, 2, 3)
	c.release([]uint64{1, 2, 3}, 0)
	takeAll(t, c, 7, 8, 9)
	c.release([]uint64{7, 8, 9}, 0)
	if held := takeAll(t, c, 1, 2, 4); held != 2 { // 3 is evicted
		t.Errorf("held %d", held)
	}
	if e := c.taken(); !slices.Equal(e, []uint64{3}) {
		t.Errorf("evicted %v", e)
	}
	takeAll(t, c, 7, 5) // 9 is evicted, 8 stays idle
	if e := c.taken(); !slices.Equal(e, []uint64{9}) {
		t.Errorf("evicted %v", e)
	}
	if c.pinned() != 5 || c.match([]uint64{7, 8, 9}) != 2 {
		t.Errorf("%d pinned, match %d", c.pinned(), c.match([]uint64{7, 8, 9}))
	}
	if _, ok := c.take([]uint64{20, 21}, 0); ok {
		t.Error("two blocks fit where one is idle")
	}
	if _, ok := c.take([]uint64{7, 8}, 1); ok {
		t.Error("take returned the block that the request itself holds")
	}
	if _, ok := c.take([]uint64{20}, 0); !ok {
		t.Error("take fails although one block is idle")
	}
}

// Two requests with the same blocks that are filled at the same time hold them
// once.
func TestCacheFillsTwice(t *testing.T) {
	c := newCache(4)
	ids := []uint64{1, 2}
	for range 2 {
		if held, ok := c.take(ids, 0); held != 0 || !ok {
			t.Fatal(held, ok)
		}
	}
	c.fill(ids, 0, 1)
	c.fill(ids, 0, 1)
	if c.pinned() != 2 {
		t.Errorf("%d pinned", c.pinned())
	}
	c.release(ids, 0)
	if c.pinned() != 2 {
		t.Errorf("%d pinned", c.pinned())
	}
	c.release(ids, 0)
	if c.pinned() != 0 || c.idle != 2 {
		t.Errorf("%d pinned, %d idle", c.pinned(), c.idle)
	}
	if _, ok := c.take([]uint64{5, 6, 7, 8}, 0); !ok {
		t.Error("idle blocks are in the way")
	}
	if e := c.taken(); !slices.Equal(e, []uint64{1}) { // 2 was a partial block
		t.Errorf("evicted %v", e)
	}
}

// After any operations, a cache holds at most its size, counts correctly, and
// releases everything.
func TestCacheAccounts(t *testing.T) {
	type request struct {
		ids         []uint64
		held, extra int
		filled      bool
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		c := newCache(1 + rnd.IntN(40))
		var live []request
		for range 300 {
			switch i := rnd.IntN(len(live) + 1); {
			case i == len(live):
				q := request{extra: rnd.IntN(3)}
				for id := uint64(rnd.IntN(4)) * 100; len(q.ids) < rnd.IntN(12); id++ {
					q.ids = append(q.ids, id)
				}
				var ok bool
				want := c.match(q.ids)
				if q.held, ok = c.take(q.ids, q.extra); ok {
					if q.held != want {
						t.Fatalf("held %d of %d", q.held, want)
					}
					live = append(live, q)
				}
			case !live[i].filled:
				live[i].filled = true
				c.fill(live[i].ids, live[i].held, len(live[i].ids))
			default:
				c.release(live[i].ids, live[i].extra)
				live = slices.Delete(live, i, i+1)
			}
			pins := map[uint64]int32{}
			reserved := 0
			for _, q := range live {
				n := q.held
				if q.filled {
					n = len(q.ids)
				}
				for _, id := range q.ids[:n] {
					pins[id]++
				}
				reserved += len(q.ids) - n + q.extra
			}
			if c.reserved != reserved || c.reserved+len(c.blocks) > c.capacity || c.pinned() != reserved+len(pins) {
				t.Fatalf("%d reserved of %d, %d pinned of %d, %d blocks of %d", c.reserved, reserved, c.pinned(), reserved+len(pins), len(c.blocks), c.capacity)
			}
			for id, n := range pins {
				if at, ok := c.blocks[id]; !ok || c.slots[at].pins != n {
					t.Fatalf("block %d has not its %d pins", id, n)
				}
			}
		}
	}
}
