package load

import (
	"sync"
	"testing"
)

func TestHold(t *testing.T) {
	var c Counter
	a := c.Hold(100)
	b := c.Hold(20)
	if c.Requests() != 2 || c.Tokens() != 120 {
		t.Errorf("%d requests, %d tokens", c.Requests(), c.Tokens())
	}
	a.Drop()
	a.Drop() // an empty hold takes nothing away
	if c.Requests() != 1 || c.Tokens() != 20 {
		t.Errorf("%d requests, %d tokens", c.Requests(), c.Tokens())
	}
	b.Drop()
	var none Hold
	none.Drop()
	if c.Requests() != 0 || c.Tokens() != 0 {
		t.Errorf("%d requests, %d tokens", c.Requests(), c.Tokens())
	}
}

func TestHoldHammer(t *testing.T) {
	var (
		c  Counter
		wg sync.WaitGroup
	)
	for g := range 8 {
		wg.Go(func() {
			for i := range 5000 {
				h := c.Hold(int64(g*i + 1))
				if c.Requests() < 1 || c.Tokens() < 1 {
					t.Error("a load below what is held")
				}
				h.Drop()
			}
		})
	}
	wg.Wait()
	if c.Requests() != 0 || c.Tokens() != 0 {
		t.Errorf("%d requests, %d tokens are left", c.Requests(), c.Tokens())
	}
}

func TestHoldDoesNotAllocate(t *testing.T) {
	var c Counter
	if n := testing.AllocsPerRun(100, func() { h := c.Hold(1); h.Drop() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkHold(b *testing.B) {
	var c Counter
	for b.Loop() {
		h := c.Hold(100)
		h.Drop()
	}
}
