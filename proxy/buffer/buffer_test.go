package buffer

import (
	"bytes"
	"runtime"
	"sync"
	"testing"
)

func TestBufferClasses(t *testing.T) {
	for _, n := range []int{0, 1, 4095, 4096, 4097, 8192, 100_000, 1 << 20, 1<<22 - 1, 1 << 22, 1<<22 + 1, 1 << 24} {
		b := Get(n)
		if len(b.B) != 0 || cap(b.B) < n {
			t.Errorf("Get(%d): length %d, room %d", n, len(b.B), cap(b.B))
		}
		if n > 1<<maxBits && cap(b.B) != n {
			t.Errorf("Get(%d): a buffer that is not pooled has room %d", n, cap(b.B))
		}
		if n <= 1<<maxBits && n > 4096 && cap(b.B) >= 4*n {
			t.Errorf("Get(%d): room %d", n, cap(b.B))
		}
		b.Free()
	}
}

// A buffer from the pools always has the requested room, even if buffers of odd sizes
// were returned to the pools.
func TestBufferRoomAfterFree(t *testing.T) {
	for c := 1; c < 3<<22; c = c*3/2 + 1 {
		b := &Buffer{B: make([]byte, c/2, c)}
		b.Free()
		for _, n := range []int{c, c / 2, c/2 + 1, c * 2} {
			if got := Get(n); len(got.B) != 0 || cap(got.B) < n {
				t.Fatalf("after Free of a buffer of %d: Get(%d) has length %d, room %d", c, n, len(got.B), cap(got.B))
			}
		}
	}
}

// A buffer with several holders returns to its pool once, when the last holder frees it.
func TestBufferHeld(t *testing.T) {
	const n = 3 << 20 // no other test uses a buffer of this class
	for range 1000 {
		b := Get(n)
		b.B = append(b.B, "whole"...)
		var wg sync.WaitGroup
		for range 3 {
			b.Hold()
			wg.Go(func() {
				if string(b.B) != "whole" {
					t.Error("returned to the pool too early")
				}
				b.Free()
			})
		}
		b.Free()
		wg.Wait()
		x, y := Get(n), Get(n)
		if x == y {
			t.Fatal("given back twice")
		}
		x.Free()
		y.Free()
	}
}

func TestGrow(t *testing.T) {
	tests := []struct {
		room, want, most, after int
	}{
		{4096, 0, 1 << 20, 8192},
		{4096, 9000, 1 << 20, 16384}, // the announced size is near: the buffer grows to it at once
		{65536, 263_000, 1 << 26, 1 << 19},
		{65536, 16<<20 + 1, 1 << 26, 262144}, // the announced size is far: the buffer grows as bytes arrive
		{4 << 20, 16<<20 + 1, 1 << 26, 16<<20 + 1},
		{40 << 20, 0, 64<<20 + 1, 64<<20 + 1}, // the buffer does not grow to twice the limit
		{32 << 20, 0, 64<<20 + 1, 64<<20 + 1}, // the buffer does not grow again for the last byte
	}
	for _, tt := range tests {
		var g Budget
		b, err := g.Get(tt.room)
		for err == nil && cap(b.B) != tt.room { // a larger buffer that another test has put into the pool
			g.Release(b.Uncount())
			b, err = g.Get(tt.room)
		}
		if err != nil {
			t.Fatal(err)
		}
		want := []byte("the bytes that were read before")
		b.B = append(b.B, want...)
		if err := b.Grow(tt.want, tt.most); err != nil {
			t.Fatal(err)
		}
		// The pool may again return a larger buffer, but less than twice as large.
		if !bytes.Equal(b.B, want) || cap(b.B) < tt.after || cap(b.B) >= 2*tt.after || g.Used() != int64(cap(b.B)) {
			t.Errorf("buffer of %d: got size %d and %d counted bytes, want %d", tt.room, cap(b.B), g.Used(), tt.after)
		}
		b.Free()
		if g.Used() != 0 {
			t.Errorf("got %d counted bytes after the end", g.Used())
		}
	}
	(*Buffer)(nil).Free() // allowed
}

// If the budget has no room, the buffer stays unchanged. The budget counts the copy
// during the growth.
func TestBudgetFull(t *testing.T) {
	var g Budget
	g.SetLimit(20 << 10)
	b, err := g.Get(8 << 10)
	if err != nil {
		t.Fatal(err)
	}
	b.B = append(b.B, "kept"...)
	if err := b.Grow(0, 1<<20); err != ErrFull { // the buffer grows in steps of 8 and 16 KiB
		t.Fatalf("grown beyond the limit: %v", err)
	}
	if string(b.B) != "kept" || g.Used() != 8<<10 {
		t.Errorf("%q, %d bytes counted", b.B, g.Used())
	}
	if _, err := g.Get(16 << 10); err != ErrFull {
		t.Errorf("a second buffer: %v", err)
	}
	if !g.Take(12<<10) || g.Take(1) {
		t.Error("the limit is not exact")
	}
	g.Release(12 << 10)
	b.Set(append(b.B, make([]byte, 100<<10)...)) // the budget counts present bytes
	if g.Used() != int64(cap(b.B)) {
		t.Errorf("%d bytes counted of %d", g.Used(), cap(b.B))
	}
	b.Hold()
	b.Free()
	if g.Used() == 0 {
		t.Error("returned to the pool before the last holder freed it")
	}
	b.Free()
	if g.Used() != 0 {
		t.Errorf("got %d counted bytes after the end", g.Used())
	}
}

func TestBudgetTogether(t *testing.T) {
	var g Budget
	g.SetLimit(1 << 20)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				b, err := g.Get(100 << 10)
				if err != nil {
					continue
				}
				if g.Used() > 1<<20+8*(128<<10) { // refused bytes count for a short time
					t.Error("beyond the limit")
				}
				b.Free()
			}
		})
	}
	wg.Wait()
	if g.Used() != 0 {
		t.Errorf("got %d counted bytes after the end", g.Used())
	}
}

// The collector frees large unused buffers before the heap has doubled.
func TestLargeBuffersAreCollected(t *testing.T) {
	forced := func() uint32 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.NumForcedGC
	}
	for range 100 { // each buffer becomes garbage that the collector frees
		before := forced()
		for range maxGarbage / (8 << 20) {
			Get(8 << 20).Free()
		}
		for range 1000 {
			if forced() > before {
				return
			}
			runtime.Gosched()
		}
	}
	t.Error("100 times the most garbage caused no collection")
}
